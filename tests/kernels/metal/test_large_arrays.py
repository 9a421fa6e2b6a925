"""Kernels on arrays of more than 2^32 elements, where an offset of 32 bits would wrap around to the start."""

import tempfile
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from kernels.cases import make_layout, random
from kernels.metal.simulated import launching, reference
from metal_sim.capture import capture
from metal_sim.run import name_arrays, run_text
from mlx_tq.kernels import gpu
from mlx_tq.kernels.encode import compact, encode
from mlx_tq.kernels.gpu import Constants, Kernel
from mlx_tq.kernels.prefill import dequantize
from mlx_tq.kernels.regions import Regions
from mlx_tq.kernels.score import score
from mlx_tq.kernels.wht import wht

DIM, END = 128, 96
MANY = 2**32 // DIM + END  # vectors, so that each of the last END has an offset of more than 32 bits
LAYOUT = make_layout((DIM, DIM), "tq4", "tq4", "float16")
VECTOR = random((1, 1, 1, DIM))


class _HasRun(Exception):  # noqa: N818 - ends a call, not an error
    pass


def run_end(call: Callable[[], Any]) -> list[np.ndarray]:
    """Run the last 2 END simdgroups of the kernel that a call launches, and return its outputs.

    Outputs are sparse files, in which all is zero that was not stored.
    """
    outputs: list[np.ndarray] = []

    def run(kernel: Kernel, *, inputs: list[mx.array], constants: Constants, **launch: Any) -> list[mx.array]:
        text = capture(gpu.compile_kernel(kernel, "metal", constants), inputs, **launch)
        given = dict(zip(kernel.input_names(constants), map(as_numpy, inputs), strict=True))
        for shape, dtype in zip(launch["output_shapes"], launch["output_dtypes"], strict=True):
            with tempfile.TemporaryFile() as file:
                outputs.append(np.memmap(file, as_numpy(mx.zeros(1, dtype)).dtype, shape=shape))
        arrays = name_arrays(given) | dict(zip(kernel.outputs, outputs, strict=True))
        threads, size = launch["grid"][0], launch["threadgroup"][0]
        first = threads // size - 2 * END * 32 // size
        run_text(text, arrays, grid=launch["grid"], threadgroup=launch["threadgroup"], first=first)
        raise _HasRun

    with launching(run), suppress(_HasRun):
        call()
    return outputs


def as_numpy(array: mx.array) -> np.ndarray:
    mx.eval(array)
    return np.array(array, copy=False)


def repeat(array: mx.array, count: int) -> mx.array:
    """Return a view of an array [B, H, 1, D] in which all of `count` tokens are the same memory."""
    return mx.broadcast_to(array, (*array.shape[:2], count, array.shape[3]))


def check_ends(outputs: list[np.ndarray], expected: list[mx.array]) -> None:
    """Check the last END rows of each output, which are all equal, and that nothing was stored in its first rows."""
    for output, rows in zip(outputs, expected, strict=True):
        row = as_numpy(rows).reshape(-1)
        ends = output.reshape(-1, row.size)
        np.testing.assert_array_equal(ends[-END:], np.broadcast_to(row, (END, row.size)))
        assert not ends[: 2 * END].any()


def regions(packed: int, full: int) -> Regions:
    rows = reference(encode, VECTOR, VECTOR, LAYOUT).rows
    return Regions(repeat(rows, packed), packed, LAYOUT, repeat(VECTOR, full), repeat(VECTOR, full), 0, full)


@pytest.mark.parametrize(("packed", "full"), [(MANY, 0), (1, MANY)], ids=["packed", "full"])
def test_dequantize(packed, full):
    small = regions(min(packed, 1), min(full, 1))
    expected = [output[:, :, -1:] for output in reference(dequantize, small)]
    check_ends(run_end(lambda: dequantize(regions(packed, full))), expected)


def test_encode():
    rows = reference(encode, VECTOR, VECTOR, LAYOUT).rows.view(mx.uint16)
    many = 2**32 // rows.shape[-1] + 2 * END
    vectors = repeat(VECTOR, many)
    packed, _ = run_end(lambda: encode(vectors, vectors, LAYOUT))
    check_ends([packed], [rows])


def test_wht():
    rotation = LAYOUT.key.rotation
    check_ends(run_end(lambda: wht(repeat(VECTOR, MANY), rotation)), [reference(wht, VECTOR, rotation)])


def test_compact():
    wide = random((1, 1, 1, 1024), "float32").view(mx.uint32)
    kept = mx.zeros(2**32 // 1024 + END, mx.int32)
    check_ends(run_end(lambda: compact(wide, kept, kept.size)), [wide])


def test_score():
    heads, tokens = 128, 2**25 + END
    rows = reference(encode, VECTOR, VECTOR, LAYOUT).rows
    queries, weights = random((1, heads, DIM), "float32", 1), random((1, heads, DIM // 2), "float32", 2)
    pairs = mx.arange(DIM, dtype=mx.int32).reshape(2, -1)

    def scores(count: int) -> mx.array:
        return score(repeat(rows, count), count, LAYOUT, queries, weights, pairs, None)

    (output,) = run_end(lambda: scores(tokens))
    expected = as_numpy(reference(scores, 1))
    np.testing.assert_allclose(
        output[0, 0, :, -END:], np.broadcast_to(expected[0, 0], (heads, END)), rtol=1e-5, atol=1e-5
    )
    assert not output[0, 0, :, :END].any()
