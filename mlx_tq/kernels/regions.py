"""What attention of one layer reads: the tokens of a cache, as the kernels take them."""

from dataclasses import dataclass

import mlx.core as mx

from mlx_tq.codec.conditioning import Conditioning, decode
from mlx_tq.codec.rows import RowLayout
from mlx_tq.errors import CacheFormatError


@dataclass(frozen=True)
class Regions:
    """`prefix | body | tail` of one layer, in logical order.

    Attributes:
        rows: packed body, uint32 [B, H, capacity, W], or None while it is empty; what lies past `body` is never read.
        body: tokens in the body.
        layout: of the rows.
        full_keys: prefix and tail in the model's type, [B, H, capacity, Dk]; what lies past `beside` is never read.
        full_values: theirs, [B, H, capacity, Dv].
        prefix: how many of these come before the body.
        beside: how many there are.
        conditioning: of the packed keys, row by row; None where they are plain.
    """

    rows: mx.array | None
    body: int
    layout: RowLayout
    full_keys: mx.array
    full_values: mx.array
    prefix: int
    beside: int
    conditioning: Conditioning | None = None

    @property
    def tokens(self) -> int:
        """All of them."""
        return self.beside + self.body

    @property
    def keys(self) -> mx.array:
        """Those of prefix and tail without spare capacity, [B, H, beside, Dk]."""
        return self.full_keys[:, :, : self.beside]

    @property
    def values(self) -> mx.array:
        """Theirs, [B, H, beside, Dv]."""
        return self.full_values[:, :, : self.beside]

    def stored(self) -> mx.array:
        """The rows, spare capacity included.

        Raises:
            CacheFormatError: there are none.
        """
        if self.rows is None:
            raise CacheFormatError("nothing is packed, so there are no rows to attend to; use mlx's own attention.")
        return self.rows

    def packed(self) -> mx.array:
        """The rows without spare capacity, uint32 [B, H, body, W]; raises as `stored`."""
        return self.stored()[..., : self.body, :]

    def decoded(self) -> tuple[mx.array, mx.array]:
        """Keys [B, H, tokens, Dk] and values [B, H, tokens, Dv] in logical order, in the model's type."""
        if self.body == 0:
            return self.keys, self.values
        rows, layout = self.packed(), self.layout
        return (
            splice(self.keys, self.prefix, decode(layout.key, layout.keys(rows), self.conditioning)),
            splice(self.values, self.prefix, layout.value.decode(layout.values(rows))),
        )


def splice(full: mx.array, prefix: int, body: mx.array) -> mx.array:
    """[B, H, T, D] with the vectors of `body` between the first `prefix` of `full` and the rest, in its type."""
    return mx.concatenate([full[:, :, :prefix], body.astype(full.dtype), full[:, :, prefix:]], axis=2)
