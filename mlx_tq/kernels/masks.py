"""Masks as mlx-lm hands them to attention, applied to scores of part of the keys.

A mask is None (one query, everything visible), "causal" (the queries are the last tokens), or an array that broadcasts
to [B, Hq, L, S] in logical order: bool, True where visible, or additive.
"""

import mlx.core as mx

from mlx_tq.kernels.constants import table
from mlx_tq.kernels.softmax import MASKED

Mask = mx.array | str | None


def take_columns(mask: mx.array, *ranges: tuple[int, int]) -> mx.array:
    """The columns of some ranges of keys, side by side."""
    if mask.shape[-1] == 1:
        return mask
    return mx.concatenate([mask[..., start:stop] for start, stop in ranges], axis=-1)


def apply_mask(scores: mx.array, mask: mx.array, length: int) -> mx.array:
    """Mask scores fp32 [B, H, G L, S] of L = `length` queries with an array that broadcasts to [B, H G, L, S]."""
    batch, heads, rows, keys = scores.shape
    mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
    mask = mask.reshape(mask.shape[0], heads, -1, *mask.shape[2:]) if mask.shape[1] > 1 else mask[:, :, None]
    grid = scores.reshape(batch, heads, rows // length, length, keys)
    grid = mx.where(mask, grid, MASKED) if mask.dtype == mx.bool_ else mx.maximum(grid + mask, MASKED)
    return grid.reshape(scores.shape)


def causal_columns(length: int, keys: int) -> mx.array:
    """Bool [L, S]: what L queries see of S keys, the last L of which are their own tokens."""
    return mx.arange(keys)[None] <= mx.arange(keys - length, keys)[:, None]


def mask_bias(mask: Mask, tokens: int) -> mx.array:
    """A mask array as what is added to scores of S = `tokens` keys, fp32 [B, Hq, L, S] or 1 for the first, for kernels.

    Without an array, any numbers.
    """
    if not isinstance(mask, mx.array):
        return table([], mx.float32).reshape(1, 1, 1, -1)
    bias = mx.where(mask, 0.0, -mx.inf) if mask.dtype == mx.bool_ else mask
    bias = bias.astype(mx.float32).reshape((1,) * (4 - mask.ndim) + mask.shape)
    return mx.broadcast_to(bias, (*bias.shape[:3], tokens))
