"""The text of kernels, its agreement with the codec, and errors where kernels cannot run."""

import re
from unittest import mock

import mlx.core as mx
import numpy as np
import pytest

from kernels.cases import make_layout
from kernels.metal.simulated import launching, zeros
from mlx_tq.cli.diagnostics import environment
from mlx_tq.codec.codebook import POLYNOMIALS, boundaries
from mlx_tq.codec.formats.base import FP16_MAX
from mlx_tq.codec.rotation import get_rotation
from mlx_tq.errors import KernelUnavailableError
from mlx_tq.kernels import backend, gpu
from mlx_tq.kernels.arguments import can_rotate
from mlx_tq.kernels.attend import attend
from mlx_tq.kernels.encode import compact, encode
from mlx_tq.kernels.gpu import CompiledKernel, Kernel, ThreadLimitError, fit_simdgroups, kernel_text
from mlx_tq.kernels.prefill import prefill
from mlx_tq.kernels.recall_score import recall_score
from mlx_tq.kernels.regions import Regions
from mlx_tq.kernels.score import score
from mlx_tq.kernels.wht import wht

NAMES = sorted(file.name.removesuffix(".metal") for file in gpu.kernels_folder().iterdir() if file.suffix == ".metal")
COPY = Kernel("copy", inputs=("values",), outputs=("copied",))
CALL = {"inputs": [mx.zeros(8)], "constants": (), "grid": (8, 1, 1), "threadgroup": (8, 1, 1)}


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_text_is_complete_and_short(name, normalized):
    header, body = kernel_text(name, normalized=normalized)
    assert "TQ_NORMALIZED" not in header + body
    assert "#include" not in header + body
    assert "//" not in header + body, "mlx would find names in comments"
    assert header.count("#define TQ_FN") == 1
    assert "#pragma METAL fp contract(off)" in header
    assert "CUDA" not in header
    limit = 31_000 if normalized else 28_500
    assert len(header + body) < limit, "mlx copies the text at every call: 20 kB take 0.5 us"


def test_text_of_a_wheel_and_missing_text(tmp_path):
    (tmp_path / "wheel" / "metal").mkdir(parents=True)
    (tmp_path / "wheel" / "metal" / "tq_compat.h").touch()
    with mock.patch.object(gpu, "files", return_value=tmp_path / "wheel"):
        assert gpu.kernels_folder() == tmp_path / "wheel" / "metal"
    with (
        mock.patch.object(gpu, "files", return_value=tmp_path),
        mock.patch.object(gpu, "__file__", str(tmp_path / "a" / "b" / "c")),
        pytest.raises(KernelUnavailableError, match="Install mlx_tq again"),
    ):
        gpu.kernels_folder()


def numbers(pattern: str, text: str) -> list[float]:
    return [float(number) for number in re.findall(r"-?\d[\d.e-]*(?=f)", re.search(pattern, text, re.S).group(0))]


def test_constants_are_those_of_the_codec():
    header = kernel_text("encode").header
    expected = [*boundaries(2), *boundaries(3), *boundaries(4)]
    assert np.array_equal(np.float32(numbers(r"tq_boundaries\[25\].*?;", header)), expected)
    for i, name in enumerate(("first", "third", "fifth")):
        by_bits = [POLYNOMIALS[bits][i] if i < len(POLYNOMIALS[bits]) else 0.0 for bits in (2, 3, 4)]
        assert np.array_equal(np.float32(numbers(rf"float tq_{name}\(\) .*?;", header)), np.float32(by_bits))
    assert numbers(r"#define TQ_FP16_MAX [^\n]*", header) == [FP16_MAX]


def test_rotations_without_a_kernel():
    assert not can_rotate(None)
    for name, dim in (("haar", 64), ("wht", 1024), ("wht", 12 * 64)):
        assert not can_rotate(get_rotation(name, dim, 0))


def test_a_kernel_needs_a_gpu(monkeypatch):
    monkeypatch.setattr(gpu, "gpu_backend", lambda: None)
    with pytest.raises(KernelUnavailableError, match=r"kernel 'copy' needs a GPU.*Device\(.*Use backend auto"):
        COPY.run(**CALL, output_shapes=[(8,)], output_dtypes=[mx.float32])


def test_only_the_first_call_waits(monkeypatch):
    monkeypatch.setattr(gpu, "gpu_backend", lambda: "metal")
    call = mock.Mock(return_value=[mx.zeros(8)])
    compiled = CompiledKernel(call)
    monkeypatch.setattr(gpu, "compile_kernel", lambda *_: compiled)
    with mock.patch.object(mx, "eval") as evaluate:
        for _ in range(3):
            COPY.run(**CALL, output_shapes=[(8,)], output_dtypes=[mx.float32])
    assert (call.call_count, evaluate.call_count) == (3, 1)


THREAD_LIMIT = "Thread group size ({}) is greater than  the maximum allowed threads per threadgroup (448)."


def test_fewer_simdgroups_where_the_gpu_has_a_limit(monkeypatch):
    """Mlx raises at evaluation; the limit is asked for once, and is no failure of the kernel."""
    monkeypatch.setattr(gpu, "gpu_backend", lambda: "metal")
    sizes, evaluated = [], []

    def call(*, threadgroup, **_):
        sizes.append(threadgroup[0])
        return [mx.zeros(8)]

    def evaluate(outputs):
        evaluated.append(sizes[-1])
        if sizes[-1] > 448:
            raise ValueError(THREAD_LIMIT.format(sizes[-1]))

    compiled = CompiledKernel(call)
    monkeypatch.setattr(gpu, "compile_kernel", lambda *_: compiled)
    monkeypatch.setattr(mx, "eval", evaluate)

    def launch(simdgroups):
        threads = {"threadgroup": (32 * simdgroups, 1, 1), "grid": (32 * simdgroups, 1, 1)}
        return simdgroups, COPY.run(**CALL | threads, output_shapes=[(8,)], output_dtypes=[mx.float32])

    with mock.patch.dict(gpu.thread_limits, clear=True):
        assert "thread limits" not in environment()
        assert [fit_simdgroups(32, launch)[0] for _ in range(2)] == [8, 8]
        assert (sizes, evaluated) == ([1024, 256, 256], [1024, 256])
        assert environment()["thread limits"] == "copy 448"
    with pytest.raises(ThreadLimitError, match="'copy' has 512 threads per threadgroup, and the GPU allows 448"):
        launch(16)


@pytest.mark.parametrize("formats", [("tq4", "tq4"), ("tcq4", "q8")])
def test_large_calls_have_a_grid_that_cuda_allows(formats):
    """Nothing is computed here; 2^19 tokens of 8 heads, and 8 requests of 128 query heads."""
    grids, tokens, layout = {}, 2**19, make_layout((64, 64), *formats, "float16")

    def run(kernel, *, inputs, constants, grid, threadgroup, **call):
        assert max(grid) < 2**31, "mlx counts threads in 32 bits"
        grids[kernel.name] = [-(-threads // size) for threads, size in zip(grid, threadgroup, strict=True)]
        return zeros(**call)

    keys, full = mx.zeros((1, 8, tokens, 64), mx.float16), mx.zeros((8, 8, 128, 64), mx.float16)
    queries = mx.zeros((8, 128, 64, 64), mx.float16)
    with launching(run, "cuda"):
        rows = encode(keys, keys, layout).rows
        compact(rows, mx.arange(tokens, dtype=mx.int32), tokens)
        virtual, pairs = mx.zeros((8, 16, 64)), mx.zeros((2, 0), mx.int32)
        score(rows, tokens, layout, virtual, mx.zeros((8, 16, 0)), pairs)
        recall_score(virtual[None], layout.keys(rows), layout, None, [4] * (tokens // 4))
        regions = Regions(mx.broadcast_to(rows, (8, *rows.shape[1:])), tokens, layout, full, full, 64, 128)
        attend(queries, regions, scale=1.0)
        prefill(mx.zeros((8, 128, 2048, 64), mx.float16), regions, scale=1.0)
    assert grids.keys() == {"encode", "compact", "score", "recall_score", "attend", "merge", "wht", "dequantize"}
    for name, (_, y, z) in grids.items():
        assert max(y, z) <= 65535, name


@pytest.mark.full
@pytest.mark.usefixtures("compiled")
def test_mx_compile_traces_a_kernel(monkeypatch):
    """A traced call cannot wait; the first call outside of `mx.compile` does."""

    def add_one(inputs, **call):
        return [inputs[0].reshape(2, 64) + 1]

    monkeypatch.setattr(gpu, "gpu_backend", lambda: "metal")
    compiled = CompiledKernel(add_one)
    monkeypatch.setattr(gpu, "compile_kernel", lambda *_: compiled)
    x, rotation = mx.zeros((2, 64)), get_rotation("wht", 64, 0)
    with backend.using("metal"):
        assert mx.array_equal(mx.compile(lambda x: wht(x, rotation))(x), x + 1)
        with mock.patch.object(mx, "eval") as evaluate:
            wht(x, rotation)
    assert evaluate.called
