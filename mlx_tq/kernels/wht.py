"""Rotating vectors: the Walsh-Hadamard rotation of queries, uncompressed keys, and outputs."""

import math
from functools import partial

import mlx.core as mx

from mlx_tq.codec.normalization import KeyNormalization, cast_clamped, normalize_queries
from mlx_tq.codec.rotation import Rotation, split_order
from mlx_tq.kernels import backend, build
from mlx_tq.kernels.constants import check_can_rotate, flips

KERNEL = build.Kernel("wht", inputs=("vectors", "rotation_flips"), outputs=("rotated",))
NORMALIZED = KERNEL.with_more(inputs=("key_scale",))
SIMDGROUPS = 4


def wht(
    x: mx.array, rotation: Rotation, *, inverse: bool = False, normalization: KeyNormalization | None = None
) -> mx.array:
    """R x, or R^T x, of vectors [..., D] in their own type; computed in fp32.

    With `normalization` they are queries [B, Hq, L, D], which are divided by its weights first.
    """
    check = partial(check_can_rotate, rotation)
    return backend.call(_wht_gpu, wht_ref, x, rotation, inverse=inverse, normalization=normalization, check=check)


def wht_ref(
    x: mx.array, rotation: Rotation, *, inverse: bool = False, normalization: KeyNormalization | None = None
) -> mx.array:
    """`wht` in mlx's own operations."""
    wide = normalize_queries(x, normalization).astype(mx.float32)
    y = rotation.inverse(wide) if inverse else rotation.forward(wide) / math.sqrt(rotation.dim)
    return cast_clamped(y, x.dtype, normalization)


def _wht_gpu(
    x: mx.array, rotation: Rotation, *, inverse: bool = False, normalization: KeyNormalization | None = None
) -> mx.array:
    vectors = x.reshape(-1, *x.shape[-3:]) if x.ndim > 4 else x.reshape((1,) * (4 - x.ndim) + x.shape)
    count = x.size // rotation.dim
    order, _ = split_order(rotation.dim) or (1, 0)
    constants = (
        ("T", x.dtype),
        ("DIM", rotation.dim),
        ("ORDER", order),
        ("INVERSE", inverse),
        ("NORMALIZED", normalization is not None),
        ("CLAMPED", normalization is not None and x.dtype == mx.float16),
        ("SIMDGROUPS", SIMDGROUPS),
    )
    (rotated,) = build.run(
        KERNEL if normalization is None else NORMALIZED,
        inputs=[vectors, flips(rotation)] + ([] if normalization is None else [mx.contiguous(normalization.scale)]),
        constants=constants,
        grid=(32 * SIMDGROUPS, -(-count // SIMDGROUPS), 1),
        threadgroup=(32 * SIMDGROUPS, 1, 1),
        output_shapes=[x.shape],
        output_dtypes=[x.dtype],
    )
    return rotated
