"""Rotating vectors: the Walsh-Hadamard rotation of queries, uncompressed keys, and outputs."""

import math
from functools import partial

import mlx.core as mx

from mlx_tq.codec.exact import split_order
from mlx_tq.codec.rotation import Rotation
from mlx_tq.kernels import build, impl
from mlx_tq.kernels.constants import check_can_rotate, flips

KERNEL = build.Kernel("wht", inputs=("vectors", "rotation_flips"), outputs=("rotated",))
SIMDGROUPS = 4


def wht(x: mx.array, rotation: Rotation, *, inverse: bool = False) -> mx.array:
    """R x, or R^T x, of vectors [..., D] in their own type; computed in fp32."""
    return impl.call(_wht_gpu, wht_ref, x, rotation, inverse=inverse, check=partial(check_can_rotate, rotation))


def wht_ref(x: mx.array, rotation: Rotation, *, inverse: bool = False) -> mx.array:
    """`wht` in mlx's own operations."""
    wide = x.astype(mx.float32)
    y = rotation.inverse(wide) if inverse else rotation.forward(wide) / math.sqrt(rotation.dim)
    return y.astype(x.dtype)


def _wht_gpu(x: mx.array, rotation: Rotation, *, inverse: bool = False) -> mx.array:
    vectors = x.reshape(-1, *x.shape[-3:]) if x.ndim > 4 else x.reshape((1,) * (4 - x.ndim) + x.shape)
    count = x.size // rotation.dim
    order, _ = split_order(rotation.dim) or (1, 0)
    constants = (
        ("T", x.dtype),
        ("DIM", rotation.dim),
        ("ORDER", order),
        ("INVERSE", inverse),
        ("SIMDGROUPS", SIMDGROUPS),
    )
    (rotated,) = build.run(
        KERNEL,
        inputs=[vectors, flips(rotation)],
        constants=constants,
        grid=(32 * SIMDGROUPS, -(-count // SIMDGROUPS), 1),
        threadgroup=(32 * SIMDGROUPS, 1, 1),
        output_shapes=[x.shape],
        output_dtypes=[x.dtype],
    )
    return rotated
