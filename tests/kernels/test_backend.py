"""The choice of a backend, and the fallback where a kernel cannot run."""

import sys
import warnings
from unittest import mock

import mlx.core as mx
import pytest

from mlx_tq import __main__
from mlx_tq.codec.rotation import get_rotation
from mlx_tq.errors import ConfigError, KernelUnavailableError
from mlx_tq.kernels import backend, gpu
from mlx_tq.kernels.wht import wht

X, ROTATION, HAAR = mx.arange(128).reshape(2, 64) / 100, get_rotation("wht", 64, 0), get_rotation("haar", 64, 0)
REJECTED = "Unable to build metal library: use of undeclared identifier 'lan'"


@pytest.fixture(autouse=True)
def _auto():
    with backend.using("auto"):
        yield


@pytest.fixture
def metal(monkeypatch):
    """Make mlx_tq find a GPU with Metal."""
    monkeypatch.setattr(gpu, "gpu_backend", lambda: "metal")


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(gpu, "gpu_backend", lambda: None)


@pytest.fixture
def rejected(monkeypatch, metal):
    """Make the GPU's compiler reject every kernel; returns the names of kernels that it got."""
    names = []

    def compile_kernel(kernel, device, constants):
        def call(**_):
            names.append(kernel.name)
            raise RuntimeError(REJECTED)

        return gpu.CompiledKernel(call)

    monkeypatch.setattr(gpu, "compile_kernel", compile_kernel)
    return names


def assert_reference(result, rotation=ROTATION):
    with backend.using("reference"):
        assert mx.array_equal(result, wht(X, rotation))


def test_auto_uses_the_gpu(metal):
    assert (backend.current(), backend.describe()) == ("metal", "metal kernels")
    with backend.using("reference"):
        assert backend.current() == "reference"
    assert backend.current() == "metal"


def test_auto_without_a_gpu_is_no_fallback(no_gpu):
    assert (backend.current(), backend.describe()) == ("cpu", "cpu kernels")
    assert_reference(wht(X, ROTATION))  # without a warning


def test_reference_runs_no_kernel(rejected):
    backend.choose("reference")
    assert backend.describe() == "reference implementation (chosen)"
    assert_reference(wht(X, ROTATION))
    assert not rejected


def test_auto_falls_back_with_one_warning(rejected):
    with pytest.warns(backend.KernelFallbackWarning, match=f"cannot run on metal: {REJECTED}.*slow") as caught:
        results = [wht(X, ROTATION) for _ in range(3)]
    assert len(caught) == 1
    for result in results:
        assert_reference(result)
    assert len(rejected) == 1, "a kernel that failed is not tried again"
    assert REJECTED in backend.describe()


def test_auto_falls_back_when_not_even_one_simdgroup_fits(monkeypatch, metal):
    """Four, two and one were tried."""
    sizes = []

    def call(threadgroup, **_):
        sizes.append(threadgroup[0])
        limit = "is greater than  the maximum allowed threads per threadgroup (16)."
        raise ValueError(f"Thread group size ({threadgroup[0]}) {limit}")

    monkeypatch.setattr(gpu, "compile_kernel", lambda *_: gpu.CompiledKernel(call))
    with (
        mock.patch.dict(gpu.thread_limits),
        pytest.warns(backend.KernelFallbackWarning, match="'wht' has 32 threads per threadgroup.* 16.*slow"),
    ):
        assert_reference(wht(X, ROTATION))
    assert sizes == [128, 64, 32]


def test_metal_does_not_fall_back(rejected):
    backend.choose("metal")
    for _ in range(2):
        with pytest.raises(KernelUnavailableError, match=REJECTED):
            wht(X, ROTATION)
    assert len(rejected) == 2


def test_auto_falls_back_for_unsupported_calls_only(metal):
    with pytest.warns(backend.KernelFallbackWarning, match=r"cannot rotate by Haar\(64\); they support .* instead"):
        assert_reference(wht(X, HAAR), HAAR)
    assert backend.current() == "metal"
    backend.choose("metal")
    with pytest.raises(KernelUnavailableError, match="cannot rotate by Haar"):
        wht(X, HAAR)


def test_missing_and_unknown_backends_are_errors(no_gpu):
    for name in ("metal", "cuda"):
        with pytest.raises(
            KernelUnavailableError, match=f"'{name}' is not available.*backend cpu. Use auto or reference"
        ):
            backend.choose(name)
    with pytest.raises(ConfigError, match="unknown backend 'opencl'; valid are auto, metal, cuda, cpu, reference"):
        backend.choose("opencl")


def test_flag_and_environment(monkeypatch, no_gpu, capsys):
    monkeypatch.setenv("MLX_TQ_BACKEND", "opencl")
    assert __main__.main(["doctor"]) == 2
    assert "unknown backend 'opencl'" in capsys.readouterr().err
    words = ["generate", "-p", "hi", "-m", "1", "--dtype", "float32"]
    assert __main__.main([*words, "--backend", "reference"]) == 0
    assert "ran on reference implementation (chosen)" in capsys.readouterr().err
    assert __main__.main(["doctor", "--backend", "metal"]) == 1
    assert "'metal' is not available" in capsys.readouterr().err


def test_an_answer_reports_what_ran_and_not_what_was_asked_for(rejected, capsys):
    words = ["-p", "The harbour is quiet at night. " * 40, "-m", "3", "--prefill-step-size", "128"]
    words += ["--dtype", "float32"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert __main__.main(["generate", *words, "--kv-sinks", "16", "--kv-window", "32"]) == 0
    *_, line = capsys.readouterr().err.splitlines()
    failed = f"kernel 'encode' cannot run on metal: {REJECTED}"
    assert line.startswith(f"ran on reference implementation, because a kernel failed: {failed}")
    assert line.endswith(
        "; prefill: mlx attention + reference wht + reference dequantize; decode: reference attend; in full precision: "
        "no layer"
    )


@pytest.mark.full
def test_a_command_prints_the_warning_without_its_place(rejected, capsys):
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        warnings.showwarning = lambda *parts: sys.stderr.write(warnings.formatwarning(*parts[:4]))  # not pytest's
        assert __main__.main(["doctor"]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert lines
    assert all(line.startswith("warning: kernel ") and line.count("warning") == 1 for line in lines)
    assert len(set(lines)) == len(lines), "one warning per kernel"
