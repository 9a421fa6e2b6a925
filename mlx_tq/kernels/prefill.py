"""Attention of many queries over a compressed cache: the past is decoded in rotated space, one layer at a time.

The inverse rotation is never applied to a cached token: tokens in the model's own type are rotated instead, and the
output is rotated back once.
"""

import mlx.core as mx

from mlx_tq.codec.rows import RowLayout
from mlx_tq.kernels.dequantize import dequantize
from mlx_tq.kernels.masks import Mask, take_columns
from mlx_tq.kernels.wht import wht


def prefill(
    queries: mx.array,
    rows: mx.array,
    body: int,
    layout: RowLayout,
    keys: mx.array,
    values: mx.array,
    *,
    prefix: int,
    scale: float,
    mask: Mask = None,
    sinks: mx.array | None = None,
) -> mx.array:
    """Attend to `prefix | body | tail`; arguments and result as in `attend.attend`, any L."""
    if body == 0:
        return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask, sinks=sinks)
    tokens = keys.shape[2]
    if isinstance(mask, mx.array):
        mask = take_columns(mask, (prefix, prefix + body), (0, prefix), (prefix + body, tokens + body))
    out = mx.fast.scaled_dot_product_attention(
        queries if layout.key.rotation is None else wht(queries, layout.key.rotation),
        *dequantize(rows[..., :body, :], layout, keys.dtype, (keys, values)),
        scale=scale,
        mask=mask,
        sinks=sinks,
    )
    return out if layout.value.rotation is None else wht(out, layout.value.rotation, inverse=True)
