"""`mlx_tq.doctor --kernels`: passes if kernels are right, fails if one is wrong, is an error without any."""

import mlx.core as mx
import pytest

from kernels.metal.simulated import simulated
from mlx_tq import __main__
from mlx_tq.cli import diagnostics
from mlx_tq.kernels import backend, selftest

KERNELS = {
    "encode",
    "dequantize",
    "attend",
    "attend_short",
    "attend_by_head",
    "score",
    "recall_score",
    "compact",
    "wht",
}


@pytest.fixture
def few_cases(monkeypatch):
    monkeypatch.setattr(selftest, "FORMATS", ("tq4",))
    monkeypatch.setattr(selftest, "SORTED", ())
    monkeypatch.setattr(selftest, "DIMS", (64,))


@pytest.mark.usefixtures("few_cases")
def test_every_kernel_is_checked(monkeypatch):
    """The reference implementation runs on a CPU: CUDA would multiply in TF32."""
    devices, stream = [], mx.stream
    monkeypatch.setattr(mx, "stream", lambda device: devices.append(device) or stream(device))
    with simulated():
        checks = diagnostics.check_kernels()
    assert mx.cpu in devices
    assert {check.name for check in checks} == {f"kernel {name}" for name in KERNELS}
    assert all(check.passed for check in checks), checks


@pytest.mark.usefixtures("few_cases")
@pytest.mark.parametrize(
    ("old", "new", "kernel"),
    [
        ("kept_rows[row] *", "row *", "compact"),
        ("block_maxima[place] = maximum", "block_maxima[place] = sum", "recall_score"),
        ("tq_fma(a, a, tq_mul(b, b))", "tq_mul(a, a)", "score"),
    ],
)
def test_a_wrong_kernel_fails(old, new, kernel):
    with simulated(edit=lambda text: text.replace(old, new)):
        failed = [check.name for check in diagnostics.check_kernels() if not check.passed]
    assert failed == [f"kernel {kernel}"]


def test_every_kernel_is_checked_with_one_and_two_kv_heads(monkeypatch):
    """mlx passes arrays of fewer than 8 elements in another address space."""
    monkeypatch.setattr(selftest, "FORMATS", ("tq4",))
    heads = {
        (kernel, int(case.split(" KV heads")[0].split()[-1])) for kernel, case, _ in selftest.kernel_cases("metal")
    }
    assert {(kernel, count) for kernel in KERNELS - {"attend_by_head"} for count in (1, 2)} <= heads


def test_kernels_of_a_cpu(monkeypatch):
    with backend.using("cpu"):
        checks = diagnostics.check_kernels()
        assert {check.name for check in checks} == {f"kernel {name}" for name in selftest.CPU_KERNELS}
        assert all(check.passed for check in checks), checks
        monkeypatch.setattr("mlx_tq.kernels.attend.rotate_back", lambda x, rotation: x)  # of the reference
        monkeypatch.setattr(selftest, "DIMS", (64,))
        failed = [check.name for check in diagnostics.check_kernels() if not check.passed]
    assert failed == ["kernel attend", "kernel attend_by_head"]


def test_needs_kernels(capsys):
    with backend.using("reference"):
        assert __main__.main(["doctor", "--kernels", "--backend", "reference"]) == 1
    assert "the backend is the reference implementation (chosen). Use --backend auto." in capsys.readouterr().err
