"""Masks as mlx-lm hands them to attention, applied to scores of part of the keys.

A mask is None (one query, everything visible), "causal" (the queries are the last tokens), or an array that broadcasts
to [B, Hq, L, S] in logical order: bool, True where visible, or additive.
"""

import mlx.core as mx

from mlx_tq.kernels.constants import LEAST, table
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


def restrict(mask: Mask, visible: mx.array, keys: int) -> mx.array:
    """A mask array that also hides what lies outside of ranges int32 [B, L, 2] of S = `keys` keys."""
    places = mx.arange(keys)
    seen = (places >= visible[:, None, :, :1]) & (places < visible[:, None, :, 1:])  # [B, 1, L, S]
    if isinstance(mask, str):
        mask = causal_columns(visible.shape[1], keys)
    if mask is None:
        return seen
    return seen & mask if mask.dtype == mx.bool_ else mx.where(seen, mask, -mx.inf)


def visible_ranges(mask: Mask, visible: mx.array | None, batch: int, length: int, keys: int) -> mx.array:
    """Tokens [first, last) that a mask without an array and ranges `visible` [B, L, 2] let queries see, for kernels.

    Returns:
        int32 [B L, 2], and a few more to be 8 numbers.

    """
    lasts = [keys - length + 1 + i if isinstance(mask, str) else keys for i in range(length)]
    if visible is None:
        return table([number for last in lasts for number in (0, last)] * batch)
    ends = mx.minimum(visible[..., 1], mx.array(lasts, mx.int32))
    ranges = mx.stack([mx.maximum(visible[..., 0], 0), ends], axis=-1).astype(mx.int32).reshape(-1)
    return mx.pad(ranges, (0, max(0, LEAST - ranges.size)))


def mask_bias(mask: Mask, shape: tuple[int, ...]) -> mx.array:
    """A mask array as what is added to scores, fp32 [B, Hq, L, S] = `shape`, broadcast without a copy, for kernels."""
    if not isinstance(mask, mx.array):
        return table([], mx.float32).reshape(1, 1, 1, -1)
    bias = mx.where(mask, 0.0, -mx.inf) if mask.dtype == mx.bool_ else mask
    return mx.broadcast_to(bias.astype(mx.float32), shape)
