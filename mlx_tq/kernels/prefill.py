"""Attention of many queries: mlx's own kernel over the packed region of one layer, decoded in rotated space.

The inverse rotation is never applied to a cached token: full-precision keys and values are rotated instead, and the
output is rotated back once.
"""

import mlx.core as mx

from mlx_tq.codec.normalization import cast_clamped, normalize_queries
from mlx_tq.kernels.dequantize import dequantize
from mlx_tq.kernels.regions import Mask, Regions, take_columns
from mlx_tq.kernels.wht import wht


def prefill(
    queries: mx.array, regions: Regions, *, scale: float, mask: Mask = None, sinks: mx.array | None = None
) -> mx.array:
    """Attend to a cache, with or without packed tokens; arguments and result are those of `attend`, for any L."""
    layout, normalization = regions.layout, regions.normalization
    attention = mx.fast.scaled_dot_product_attention
    if regions.packed_tokens == 0:
        return attention(queries, regions.keys, regions.values, scale=scale, mask=mask, sinks=sinks)
    if isinstance(mask, mx.array):  # packed tokens come first in what `dequantize` returns
        start, stop = regions.sink_tokens, regions.sink_tokens + regions.packed_tokens
        mask = take_columns(mask, (start, stop), (0, start), (stop, regions.tokens))
    if layout.key.rotation is None:
        rotated = cast_clamped(normalize_queries(queries, normalization), queries.dtype, normalization)
    else:
        rotated = wht(queries, layout.key.rotation, normalization=normalization)
    out = attention(rotated, *dequantize(regions), scale=scale, mask=mask, sinks=sinks)
    return out if layout.value.rotation is None else wht(out, layout.value.rotation, inverse=True)
