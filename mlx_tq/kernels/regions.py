"""What attention of one layer reads: the tokens of a cache, as the kernels take them."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import mlx.core as mx

from mlx_tq.codec.normalization import KeyNormalization, decode_keys
from mlx_tq.codec.rows import RowLayout
from mlx_tq.errors import CacheFormatError


class SharedRows(NamedTuple):
    """The first `tokens` of the rows uint32 [B, H, capacity, W], which other caches may have too."""

    rows: mx.array
    tokens: int


@dataclass(frozen=True)
class Regions:
    """`sink_tokens | body | tail` of one layer, in logical order.

    Attributes:
        rows: packed body, uint32 [B, H, capacity, W], or None while it is empty; what lies past `body` is never read.
        body: tokens in the body, those of `shared` included.
        layout: of the rows.
        full_keys: sinks and tail in the model's type, [B, H, capacity, Dk]; what lies past `beside` is never read.
        full_values: theirs, [B, H, capacity, Dv].
        sink_tokens: how many of these come before the body.
        beside: how many there are.
        normalization: of the packed keys, row by row; None where they are plain.
        shared: rows of the body that come before `rows`.
    """

    rows: mx.array | None
    body: int
    layout: RowLayout
    full_keys: mx.array
    full_values: mx.array
    sink_tokens: int
    beside: int
    normalization: KeyNormalization | None = None
    shared: tuple[SharedRows, ...] = ()

    @property
    def tokens(self) -> int:
        """All of them."""
        return self.beside + self.body

    @property
    def keys(self) -> mx.array:
        """Those of sink_tokens and tail without spare capacity, [B, H, beside, Dk]."""
        return self.full_keys[:, :, : self.beside]

    @property
    def values(self) -> mx.array:
        """Theirs, [B, H, beside, Dv]."""
        return self.full_values[:, :, : self.beside]

    def between(self, start: int, stop: int) -> mx.array:
        """Rows [start, stop) of the body in one array, uint32 [B, H, n, W].

        Raises:
            CacheFormatError: there are none.
        """
        if self.rows is None and not self.shared:
            raise CacheFormatError("nothing is packed, so there are no rows to attend to; use mlx's own attention.")
        return rows_between(self.shared, self.rows, start, stop)

    def packed(self) -> mx.array:
        """The rows without spare capacity, uint32 [B, H, body, W]; raises as `between`."""
        return self.between(0, self.body)

    def decoded(self) -> tuple[mx.array, mx.array]:
        """Keys [B, H, tokens, Dk] and values [B, H, tokens, Dv] in logical order, in the model's type."""
        if self.body == 0:
            return self.keys, self.values
        rows, layout = self.packed(), self.layout
        return (
            splice(self.keys, self.sink_tokens, decode_keys(layout.key, layout.keys(rows), self.normalization)),
            splice(self.values, self.sink_tokens, layout.value.decode(layout.values(rows))),
        )


def splice(full: mx.array, sink_tokens: int, body: mx.array) -> mx.array:
    """[B, H, T, D] with the vectors of `body` between the first `sink_tokens` of `full` and the rest, in its type."""
    return mx.concatenate([full[:, :, :sink_tokens], body.astype(full.dtype), full[:, :, sink_tokens:]], axis=2)


def rows_between(shared: Sequence[SharedRows], rows: mx.array | None, start: int, stop: int) -> mx.array:
    """Rows [start, stop) of those shared and of those behind them: a view where they lie side by side."""
    edges = [0, *accumulate(piece.tokens for piece in shared)]
    ends = [*edges[1:], max(stop, edges[-1])]
    arrays = [*(piece.rows for piece in shared), *([] if rows is None else [rows])]
    found = [
        array[:, :, max(start - first, 0) : min(stop, last) - first]
        for array, first, last in zip(arrays, edges, ends, strict=False)
        if first < stop and start < last
    ]
    found = found or [arrays[-1][:, :, :0]]
    return found[0] if len(found) == 1 else mx.concatenate(found, axis=2)
