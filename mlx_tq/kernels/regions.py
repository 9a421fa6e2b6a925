"""The tokens of one layer that attention reads, and the masks that apply to them."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import mlx.core as mx

from mlx_tq.codec.normalization import KeyNormalization, decode_keys
from mlx_tq.codec.rows import RowLayout
from mlx_tq.errors import CacheFormatError

# As mlx-lm passes it to attention: None (one query that sees everything), "causal" (the queries are the last tokens),
# or an array that broadcasts to [B, Hq, L, S] in logical order: bool, True where visible, or additive.
Mask = mx.array | str | None
# Stands for minus infinity, so that fully masked scores have finite differences instead of NaN.
MASKED = -1e30


class SharedRows(NamedTuple):
    """The first `tokens` of packed rows uint32 [B, H, capacity, W] that several caches may share."""

    rows: mx.array
    tokens: int


@dataclass(frozen=True)
class Regions:
    """Keys and values of one layer in logical order: `sinks | packed region | window`.

    Sinks and window are in the model's dtype and lie side by side in one buffer.

    Attributes:
        packed_rows: buffer of the packed region, uint32 [B, H, capacity, W]; None if it has no rows of its own.
        packed_tokens: tokens of the packed region, including those of `shared`. Later rows are never read.
        layout: layout of the packed rows.
        full_keys: buffer of the keys of sinks and window, [B, H, capacity, Dk].
        full_values: buffer of their values, [B, H, capacity, Dv].
        sink_tokens: number of sink tokens, which come first in these buffers.
        full_tokens: number of sink and window tokens. Later entries of the buffers are never read.
        normalization: normalization of the packed keys, row by row; None for plain keys.
        shared: shared rows that precede `packed_rows` in the packed region.
    """

    packed_rows: mx.array | None
    packed_tokens: int
    layout: RowLayout
    full_keys: mx.array
    full_values: mx.array
    sink_tokens: int
    full_tokens: int
    normalization: KeyNormalization | None = None
    shared: tuple[SharedRows, ...] = ()

    @property
    def tokens(self) -> int:
        return self.full_tokens + self.packed_tokens

    @property
    def keys(self) -> mx.array:
        """The keys of sinks and window, [B, H, full_tokens, Dk]."""
        return self.full_keys[:, :, : self.full_tokens]

    @property
    def values(self) -> mx.array:
        """The values of sinks and window, [B, H, full_tokens, Dv]."""
        return self.full_values[:, :, : self.full_tokens]

    def rows(self, start: int = 0, stop: int | None = None) -> mx.array:
        """Return packed rows [start, stop) in one array, uint32 [B, H, n, W]; by default all of them.

        Raises:
            CacheFormatError: the packed region is empty.
        """
        if self.packed_rows is None and not self.shared:
            raise CacheFormatError("the packed region is empty. Use mlx's own attention.")
        return rows_between(self.shared, self.packed_rows, start, self.packed_tokens if stop is None else stop)

    def decode(self) -> tuple[mx.array, mx.array]:
        """Return all keys [B, H, tokens, Dk] and values [B, H, tokens, Dv] in logical order and the model's dtype."""
        if self.packed_tokens == 0:
            return self.keys, self.values
        rows, layout = self.rows(), self.layout
        return (
            splice(self.keys, self.sink_tokens, decode_keys(layout.key, layout.keys(rows), self.normalization)),
            splice(self.values, self.sink_tokens, layout.value.decode(layout.values(rows))),
        )


def splice(full: mx.array, sink_tokens: int, packed: mx.array) -> mx.array:
    """Insert the decoded vectors of the packed region after the sinks: [B, H, T, D] -> [B, H, T + n, D]."""
    return mx.concatenate([full[:, :, :sink_tokens], packed.astype(full.dtype), full[:, :, sink_tokens:]], axis=2)


def rows_between(shared: Sequence[SharedRows], rows: mx.array | None, start: int, stop: int) -> mx.array:
    """Return rows [start, stop) of the shared rows and those after them; a view if they lie in one buffer."""
    edges = [0, *accumulate(part.tokens for part in shared)]
    ends = [*edges[1:], max(stop, edges[-1])]
    buffers = [*(part.rows for part in shared), *([] if rows is None else [rows])]
    pieces = [
        buffer[:, :, max(start - first, 0) : min(stop, end) - first]
        for buffer, first, end in zip(buffers, edges, ends, strict=False)
        if first < stop and start < end
    ]
    pieces = pieces or [buffers[-1][:, :, :0]]
    return pieces[0] if len(pieces) == 1 else mx.concatenate(pieces, axis=2)


def take_columns(mask: mx.array, *ranges: tuple[int, int]) -> mx.array:
    """Return the columns of some ranges of tokens, side by side."""
    if mask.shape[-1] == 1:
        return mask
    return mx.concatenate([mask[..., start:stop] for start, stop in ranges], axis=-1)


def apply_mask(scores: mx.array, mask: mx.array, length: int) -> mx.array:
    """Mask scores [B, H, G L, S] of L = `length` queries with an array that broadcasts to [B, H G, L, S]."""
    batch, heads, rows, tokens = scores.shape
    mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
    mask = mask.reshape(mask.shape[0], heads, -1, *mask.shape[2:]) if mask.shape[1] > 1 else mask[:, :, None]
    grid = scores.reshape(batch, heads, rows // length, length, tokens)
    grid = mx.where(mask, grid, MASKED) if mask.dtype == mx.bool_ else mx.maximum(grid + mask, MASKED)
    return grid.reshape(scores.shape)
