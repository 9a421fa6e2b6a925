"""Encoding on a CPU: encode.cpp."""

import ctypes
from functools import lru_cache

import mlx.core as mx
import numpy as np

from mlx_tq.codec.codebook import POLYNOMIALS, boundaries
from mlx_tq.codec.formats.base import FP16_MAX, SCALE_RULES
from mlx_tq.codec.formats.sorted_pairs import SortedCodec
from mlx_tq.codec.formats.turbo import TurboCodec
from mlx_tq.codec.normalization import KeyNormalization
from mlx_tq.codec.rows import RowLayout, Rows
from mlx_tq.kernels import arguments
from mlx_tq.kernels.cpu.arrays import Reader, evaluate
from mlx_tq.kernels.cpu.build import run_kernel
from mlx_tq.kernels.cpu.codecs import (
    KeyGroupsStruct,
    RotationStruct,
    format_number,
    groups_struct,
    int32,
    levels_address,
    long,
    of_all_heads,
    pointer,
    rotation_struct,
    thread_count,
)

_BITS = (2, 3, 4)


class _Vectors(ctypes.Structure):
    """Mirror of the struct in calls.h, as is the other."""

    _fields_ = (
        ("vectors", pointer),
        ("strides", long * 3),
        ("rotation", RotationStruct),
        ("scale", pointer),
        ("centers", pointer),
        ("center_index", pointer),
        ("groups", KeyGroupsStruct),
        ("factors", pointer),
        ("weights", pointer),
        ("center_count", long),
        ("dim", int32),
        ("format", int32),
        ("rule", int32),
        ("codes", int32),
        ("scales", int32),
        ("wide_scale", int32),
        ("clips", int32),
        ("limit", ctypes.c_float),
    )


class _Encoding(ctypes.Structure):
    _fields_ = (
        ("parts", _Vectors * 2),
        ("rows", pointer),
        ("row_bytes", long),
        ("boundaries", pointer * 3),
        ("coefficients", pointer * 3),
        ("levels", pointer),
        ("batch", long),
        ("heads", long),
        ("tokens", long),
        ("clamped", long),
        ("broken", long),
        ("threads", int32),
        ("padding", int32),
    )


def launch_encode(
    keys: mx.array, values: mx.array, layout: RowLayout, normalization: KeyNormalization | None = None
) -> Rows:
    arguments.check_can_run(layout, keys.dtype)
    batch, heads, tokens, _ = keys.shape
    vectors = [x.astype(mx.float32) for x in (keys, values)]
    more = [] if normalization is None else _normalization_arrays(normalization, layout, tokens)
    evaluate(vectors, more)
    rows = np.zeros((batch, heads, tokens, layout.words), np.uint32)
    call = _Encoding(
        rows=rows.ctypes.data,
        row_bytes=layout.nbytes,
        levels=levels_address(),
        batch=batch,
        heads=heads,
        tokens=tokens,
        threads=thread_count(),
    )
    tables = _codebooks()
    for i in range(len(_BITS)):
        call.boundaries[i], call.coefficients[i] = tables[0][i].ctypes.data, tables[1][i].ctypes.data
    starts = [0, 2 * layout.key.words]
    scales = [2 * (layout.key.words + layout.value.words)]
    scales.append(scales[0] + (0 if layout.key.scale_dtype is None else layout.key.scale_dtype.size))
    with Reader() as reader:
        for i, (codec, dtype) in enumerate(((layout.key, keys.dtype), (layout.value, values.dtype))):
            part = call.parts[i]
            memory = reader.read(vectors[i])
            part.vectors = memory.address
            part.strides = (long * 3)(*(stride // 4 for stride in memory.strides[:3]))
            part.dim, part.format, part.codes, part.scales = codec.head_dim, format_number(codec), starts[i], scales[i]
            part.rotation = rotation_struct(codec.rotation)
            part.rule = SCALE_RULES.index(codec.rule) if isinstance(codec, TurboCodec) else 0
            part.wide_scale = codec.scale_dtype is not None and codec.scale_dtype == mx.float32
            if i == 0 and more:
                dtype = mx.float32
                scale, centers, index = (reader.read(array).address for array in more)
                part.scale, part.centers, part.center_index, part.center_count = scale, centers, index, more[1].shape[2]
            if isinstance(codec, SortedCodec):
                groups = groups_struct(codec, batch, heads)
                factors, weights = (
                    of_all_heads(array, np.float32, batch, heads)
                    for array in (codec.groups.factors, codec.groups.weights)
                )
                part.groups, part.factors, part.weights = groups, factors.ctypes.data, weights.ctypes.data
            part.clips = dtype != mx.float16
            part.limit = mx.array(FP16_MAX, dtype).astype(mx.float32).item()
        run_kernel("encode", call)
    health = mx.array([call.clamped, call.broken], mx.int32)
    return Rows(mx.array(rows), health)


def _normalization_arrays(n: KeyNormalization, layout: RowLayout, tokens: int) -> list[mx.array]:
    """Return the scale of keys, the means that are subtracted before the rotation, and the index of each token's."""
    rotation = layout.key.rotation
    means = n.means.astype(mx.float32)
    means = means if rotation is None else rotation.inverse(means)
    return [mx.contiguous(n.scale), mx.contiguous(means), mx.contiguous(n.mean_index(tokens))]


@lru_cache(maxsize=1)
def _codebooks() -> tuple[list[np.ndarray], list[np.ndarray]]:
    coefficients = [np.zeros(3, np.float32) for _ in _BITS]
    for row, bits in zip(coefficients, _BITS, strict=True):
        row[: len(POLYNOMIALS[bits])] = POLYNOMIALS[bits]
    return [np.ascontiguousarray(boundaries(bits)) for bits in _BITS], coefficients
