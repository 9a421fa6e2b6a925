"""Encoding keys and values into rows of the cache."""

from functools import partial

import mlx.core as mx

from mlx_tq.codec.rows import RowLayout, Rows
from mlx_tq.kernels import build, impl
from mlx_tq.kernels.constants import check_can_run, flips, layout_constants

KERNEL = build.Kernel(
    "encode",
    inputs=("keys", "values", "key_flips", "value_flips"),
    outputs=("packed_rows", "health_flags"),
)
SIMDGROUPS = 4


def encode(keys: mx.array, values: mx.array, layout: RowLayout) -> Rows:
    """Encode keys [B, H, S, Dk] and values [B, H, S, Dv] of one type into rows uint32 [B, H, S, W]."""
    return impl.call(_encode_gpu, encode_ref, keys, values, layout, check=partial(check_can_run, layout, keys.dtype))


def encode_ref(keys: mx.array, values: mx.array, layout: RowLayout) -> Rows:
    """`encode` in mlx's own operations."""
    return layout.encode(keys, values)


def _encode_gpu(keys: mx.array, values: mx.array, layout: RowLayout) -> Rows:
    batch, heads, tokens, _ = keys.shape
    count = batch * heads * tokens
    words, flags = build.run(
        KERNEL,
        inputs=[keys, values, flips(layout.key.rotation), flips(layout.value.rotation)],
        constants=(("T", keys.dtype), ("SIMDGROUPS", SIMDGROUPS), *layout_constants(layout)),
        grid=(32 * SIMDGROUPS, -(-count // SIMDGROUPS), 2),
        threadgroup=(32 * SIMDGROUPS, 1, 1),
        output_shapes=[(batch, heads, tokens, 2 * layout.words), (2, count)],
        output_dtypes=[mx.uint16, mx.uint8],
    )
    health = mx.stack([(flags & 1).sum(), (flags >> 1).sum()]).astype(mx.int32)
    return Rows(words.view(mx.uint32), health)
