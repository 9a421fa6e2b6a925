"""`MixedKVCache`: recent tokens packed with one format of keys, older ones with a smaller one.

    prefix | cold | recent | tail

Once a token is older than `recent` packed ones, its key is decoded and stored again in the cold format; its value stays
as it is, to the bit. The block that went cold last keeps its recent form for one block more, so that a trim of up to 32
tokens leads back to exactly the cache that never saw them. Attention decodes the cold tokens for each step.
"""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlx_tq.cache.compressed import STEP, CompressedKVCache, Pair, buffer
from mlx_tq.cache.spec import CacheSpec
from mlx_tq.cache.view import Regions
from mlx_tq.codec.rows import RowLayout
from mlx_tq.config import BLOCK
from mlx_tq.kernels.masks import Mask


@dataclass(frozen=True, kw_only=True)
class MixedRegions(Regions):
    """Regions whose body, the recent tokens, comes after a run of cold ones.

    Attributes:
        cold: rows of the cold tokens, uint32 [B, H, n, W].
        cold_layout: of these rows.
    """

    cold: mx.array
    cold_layout: RowLayout

    def _shape(self, array: mx.array) -> tuple[int, ...]:
        batch, heads, tokens, dim = super()._shape(array)
        return batch, heads, tokens + self.cold.shape[2], dim

    def _attend(self, queries: mx.array, scale: float, mask: Mask, sinks: mx.array | None) -> mx.array:
        return self._warmed()._attend(queries, scale, mask, sinks)

    def materialize(self) -> tuple[mx.array, mx.array]:
        """Decoded keys and values in logical order, in the model's type."""
        return self._warmed().materialize()

    def _warmed(self) -> Regions:
        """The same tokens, the cold ones decoded and put behind the prefix."""
        layout, rows = self.cold_layout, self.cold
        keys = self._splice(self.keys, layout.key, layout.keys(rows))
        values = self._splice(self.values, layout.value, layout.values(rows))
        return Regions(self.rows, self.body, self.layout, keys, values, self.prefix + rows.shape[2])


class MixedKVCache(CompressedKVCache):
    """A compressed cache with two formats of keys: `spec.key` for recent tokens, `spec.cold` for older ones."""

    def __init__(self, spec: CacheSpec) -> None:
        super().__init__(spec)
        # Positions [prefix, cold end) lie in a buffer of their own; the body's rows are those of [cooled, packed).
        self._cold: mx.array | None = None  # uint32 [B, H, capacity, W]
        self._cooled = spec.prefix

    def trim(self, n: int) -> int:
        """Drop the last n tokens; returns how many were dropped. Deeper than 32, cold tokens stay cold."""
        trimmed = super().trim(n)
        self._cooled = max(self.spec.prefix, min(self._cooled, self.offset))
        return trimmed

    @property
    def state(self) -> tuple[Any, ...]:
        """As of `CompressedKVCache`, then the cold rows and where the body's own begin."""
        return *super().state, self._cold_body(), self._cooled

    @state.setter
    def state(self, state: tuple[Any, ...]) -> None:
        *base, self._cold, self._cooled = state
        CompressedKVCache.state.fset(self, tuple(base))  # type: ignore[attr-defined]

    @property
    def body_tokens(self) -> int:
        """Tokens that attention reads packed, cold ones too."""
        return self._packed(self.offset) - self.spec.prefix

    @property
    def body_nbytes(self) -> int:
        """Bytes of the packed tokens, without spare capacity."""
        cold = self._cold_body()
        return super().body_nbytes + (0 if cold is None else cold.nbytes)

    def _cold_body(self) -> mx.array | None:
        """The cold rows without spare capacity."""
        end = self._cold_end(self._packed(self.offset)) - self.spec.prefix
        return None if self._cold is None else self._cold[:, :, :end]

    def fork(self) -> "MixedKVCache":
        """A copy that shares no change with this one."""
        twin = super().fork()
        twin._cold = None if self._cold is None else self._cold[:]
        twin._cooled = self._cooled
        return twin

    def _blank(self) -> "MixedKVCache":
        return MixedKVCache(self.spec)

    def _arrays(self) -> list[mx.array]:
        return super()._arrays() + ([] if self._cold is None else [self._cold])

    def _row(self, position: int) -> int:
        return position - self._cooled

    def _cold_end(self, packed: int) -> int:
        """The position before which tokens are cold when those before `packed` are packed."""
        return max(self.spec.cold_until(packed), self._cooled)

    def _cold_layout(self, full: Pair) -> RowLayout:
        return self.spec.cold_layout(self._layout(full), full[0].dtype)

    def _view(self, full: Pair, tail: int, length: int, packed: int) -> Regions:
        view = super()._view(full, tail, length, packed)
        count = self._cold_end(packed) - self.spec.prefix
        if self._cold is None or view.rows is None or count == 0:
            return view
        twice = self._row(self.spec.prefix + count)  # rows of cold tokens that have not left the body
        return MixedRegions(
            rows=view.rows[:, :, twice:],
            body=view.body - twice,
            layout=view.layout,
            keys=view.keys,
            values=view.values,
            prefix=view.prefix,
            cold=self._cold[:, :, :count],
            cold_layout=self._cold_layout(full),
        )

    def _pack(self, full: Pair, packed: int, target: int) -> None:
        super()._pack(full, packed, target)
        start, stop = self._cold_end(packed), self._cold_end(target)
        if self._rows is None or stop == start:
            return
        layout, cold = self._layout(full), self._cold_layout(full)
        rows = self._rows[:, :, self._row(start) : self._row(stop)]
        rows = cold.join(cold.key.encode(layout.key.decode(layout.keys(rows))), layout.values(rows))
        first, last = start - self.spec.prefix, stop - self.spec.prefix
        if self._cold is None or last > self._cold.shape[2]:
            self._cold = buffer([rows[:, :, :0] if self._cold is None else self._cold], -(-last // STEP) * STEP)
        self._cold[:, :, first:last] = rows

    def _retain(self, full: Pair, tail: int, packed: int) -> Pair:
        kept = super()._retain(full, tail, packed)
        cooled = max(self._cold_end(packed) - BLOCK, self._cooled)
        if self._rows is not None and cooled > self._cooled:
            rows = self._rows[:, :, self._row(cooled) : self._row(packed)]
            self._cooled = cooled
            self._rows = buffer([rows], -(-rows.shape[2] // STEP) * STEP)
        return kept
