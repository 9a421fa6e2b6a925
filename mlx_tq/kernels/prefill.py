"""Attention of many queries over a compressed cache: the past is decoded in rotated space, one layer at a time.

The inverse rotation is never applied to a cached token: tokens in the model's own type are rotated instead, and the
output is rotated back once.
"""

import mlx.core as mx

from mlx_tq.codec.rotation import Rotation
from mlx_tq.codec.rows import RowLayout
from mlx_tq.kernels.dequantize import dequantize
from mlx_tq.kernels.masks import Mask, take_columns
from mlx_tq.kernels.wht import wht


def _rotate(x: mx.array, rotation: Rotation | None) -> mx.array:
    return x if rotation is None else wht(x, rotation)


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
    past_keys, past_values = dequantize(rows[..., :body, :], layout, keys.dtype)
    tokens = keys.shape[2]
    if isinstance(mask, mx.array):
        mask = take_columns(mask, (prefix, prefix + body), (0, prefix), (prefix + body, tokens + body))
    out = mx.fast.scaled_dot_product_attention(
        _rotate(queries, layout.key.rotation),
        mx.concatenate([past_keys, _rotate(keys, layout.key.rotation)], axis=2),
        mx.concatenate([past_values, _rotate(values, layout.value.rotation)], axis=2),
        scale=scale,
        mask=mask,
        sinks=sinks,
    )
    return out if layout.value.rotation is None else wht(out, layout.value.rotation, inverse=True)
