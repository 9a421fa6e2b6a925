"""Which implementation serves, what happens where a kernel cannot, and that it is said."""

import sys
import warnings
from unittest import mock

import mlx.core as mx
import pytest

from mlx_tq import __main__
from mlx_tq.codec.rotation import get_rotation
from mlx_tq.errors import ConfigError, KernelUnavailableError
from mlx_tq.kernels import backend, build
from mlx_tq.kernels.wht import wht, wht_ref

X, ROTATION = mx.arange(128).reshape(2, 64) / 100, get_rotation("wht", 64, 0)
REFUSED = "Unable to build metal library: use of undeclared identifier 'lan'"


@pytest.fixture(autouse=True)
def _as_found():
    with backend.using("auto"):
        yield


@pytest.fixture
def metal(monkeypatch):
    """A machine with Metal, as far as mlx_tq can tell."""
    monkeypatch.setattr(build, "gpu_backend", lambda: "metal")


def refuse(**call):
    raise RuntimeError(REFUSED)


@pytest.fixture
def broken(monkeypatch, metal):
    """Its compiler refuses every kernel."""
    compiler = mock.Mock(return_value=refuse)
    monkeypatch.setattr(build, "built", compiler)
    return compiler


def test_auto_takes_the_gpu_and_without_one_is_no_fall_back(metal):
    assert (backend.current(), backend.describe()) == ("metal", "metal kernels")
    with backend.using("reference"):
        assert backend.current() == "reference"
    assert backend.current() == "metal"
    with mock.patch.object(build, "backend", return_value=None):
        assert (backend.current(), backend.describe()) == ("reference", "mlx's own operations (no GPU)")
        assert mx.array_equal(wht(X, ROTATION), wht_ref(X, ROTATION))


def test_ops_runs_no_kernel(broken):
    backend.choose("reference")
    assert backend.describe() == "mlx's own operations (chosen)"
    assert mx.array_equal(wht(X, ROTATION), wht_ref(X, ROTATION))
    assert not broken.called


def test_auto_falls_back_loudly_and_once(broken):
    with pytest.warns(backend.KernelFallbackWarning, match=f"cannot run on metal: {REFUSED}.*slow") as caught:
        found = [wht(X, ROTATION) for _ in range(3)]
    assert len(caught) == 1
    assert all(mx.array_equal(y, wht_ref(X, ROTATION)) for y in found)
    assert broken.call_count == 1, "what failed is not tried again"
    assert REFUSED in backend.describe()
    backend.choose("metal")  # which never falls back
    for _ in range(2):
        with pytest.raises(KernelUnavailableError, match=REFUSED):
            wht(X, ROTATION)
    assert broken.call_count == 3


def test_what_kernels_do_not_know_is_said(metal):
    haar = get_rotation("haar", 64, 0)
    with pytest.warns(backend.KernelFallbackWarning, match=r"cannot rotate by Haar\(64\); they have .* serve instead"):
        assert mx.array_equal(wht(X, haar), wht_ref(X, haar))
    assert backend.current() == "metal", "other caches keep their kernels"
    backend.choose("metal")
    with pytest.raises(KernelUnavailableError, match="cannot rotate by Haar"):
        wht(X, haar)


@pytest.mark.parametrize("name", ["metal", "cuda"])
def test_a_gpu_that_is_not_here_is_refused(name):
    with (
        mock.patch.object(build, "backend", return_value=None),
        pytest.raises(KernelUnavailableError, match=f"'{name}' was asked for.*no GPU. Use auto or reference"),
    ):
        backend.choose(name)
    with pytest.raises(ConfigError, match="'opencl' is unknown; valid are auto, metal, cuda, reference"):
        backend.choose("opencl")


def test_flag_and_environment(monkeypatch, capsys):
    monkeypatch.setenv("MLX_TQ_BACKEND", "opencl")
    assert __main__.main(["doctor"]) == 2
    assert "implementation 'opencl' is unknown" in capsys.readouterr().err
    assert __main__.main(["doctor", "--backend", "reference"]) == 0
    assert "attention mlx's own operations (chosen)" in capsys.readouterr().out
    monkeypatch.setattr(build, "gpu_backend", lambda: None)
    assert __main__.main(["doctor", "--backend", "metal"]) == 1
    assert "'metal' was asked for" in capsys.readouterr().err


def test_a_command_shows_the_warning_without_its_place(broken, capsys):
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        warnings.showwarning = lambda *parts: sys.stderr.write(warnings.formatwarning(*parts[:4]))  # not pytest's
        assert __main__.main(["doctor"]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert lines
    assert all(line.startswith("warning: kernel ") and line.count("warning") == 1 for line in lines)
    assert len(set(lines)) == len(lines), "each kernel's own, once"


@pytest.mark.usefixtures("compiled")
def test_inside_mx_compile_a_kernel_is_traced(metal, monkeypatch):
    """Where nothing can be waited for, nothing is; the text is proven by the first call outside."""
    monkeypatch.setattr(
        build, "built", lambda kernel, where, constants: lambda **call: [call["inputs"][0].reshape(2, 64) + 1]
    )
    monkeypatch.setattr(build, "_proven", set())
    assert mx.array_equal(mx.compile(lambda x: wht(x, ROTATION))(X), X + 1)
    assert build._proven == set()
    wht(X, ROTATION)
    assert len(build._proven) == 1
