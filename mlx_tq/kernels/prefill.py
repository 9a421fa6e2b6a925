"""Attention of many queries over a compressed cache: the past is decoded in rotated space, one layer at a time.

The inverse rotation is never applied to a cached token: tokens in the model's own type are rotated instead, and the
output is rotated back once.
"""

import math

import mlx.core as mx

from mlx_tq.codec.formats import Codec, Encoded
from mlx_tq.codec.rotation import Rotation
from mlx_tq.codec.rows import RowLayout
from mlx_tq.kernels.masks import Mask, take_columns


def dequantize(rows: mx.array, layout: RowLayout, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
    """Rotated keys [B, H, S, Dk] and values [B, H, S, Dv] of packed rows uint32 [B, H, S, W]."""
    return _decode(layout.key, layout.keys(rows), dtype), _decode(layout.value, layout.values(rows), dtype)


def _decode(codec: Codec, encoded: Encoded, dtype: mx.Dtype) -> mx.array:
    return codec.decode_rotated(encoded).astype(dtype)


def _rotate(x: mx.array, rotation: Rotation | None) -> mx.array:
    if rotation is None:
        return x
    return (rotation.forward(x.astype(mx.float32)) / math.sqrt(rotation.dim)).astype(x.dtype)


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
    if layout.value.rotation is None:
        return out
    return layout.value.rotation.inverse(out.astype(mx.float32)).astype(out.dtype)
