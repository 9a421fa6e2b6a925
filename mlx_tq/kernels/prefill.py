"""Attention of many queries over a compressed cache: the past is decoded in rotated space, one layer at a time.

The inverse rotation is never applied to a cached token: tokens in the model's own type are rotated instead, and the
output is rotated back once.
"""

import mlx.core as mx

from mlx_tq.codec.normalization import cast_clamped, normalize_queries
from mlx_tq.kernels.dequantize import dequantize
from mlx_tq.kernels.masks import Mask, take_columns
from mlx_tq.kernels.regions import Regions
from mlx_tq.kernels.wht import wht


def prefill(
    queries: mx.array, regions: Regions, *, scale: float, mask: Mask = None, sinks: mx.array | None = None
) -> mx.array:
    """Attend to regions, with rows or without; arguments and result as in `attend.attend`, any L."""
    keys, values, layout = regions.keys, regions.values, regions.layout
    if regions.body == 0:
        return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask, sinks=sinks)
    if isinstance(mask, mx.array):
        start, stop = regions.sink_tokens, regions.sink_tokens + regions.body
        mask = take_columns(mask, (start, stop), (0, start), (stop, regions.tokens))
    means, rotation = regions.normalization, layout.key.rotation
    out = mx.fast.scaled_dot_product_attention(
        cast_clamped(normalize_queries(queries, means), queries.dtype, means)
        if rotation is None
        else wht(queries, rotation, normalization=means),
        *dequantize(regions.packed(), layout, keys.dtype, (keys, values), means),
        scale=scale,
        mask=mask,
        sinks=sinks,
    )
    return out if layout.value.rotation is None else wht(out, layout.value.rotation, inverse=True)
