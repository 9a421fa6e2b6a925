"""`TieredKVCache`: recent tokens packed with one key format, older ones with a smaller one.

    sinks | cold | recent | window

Once a token is older than `recent` packed ones, its key is decoded and encoded again in the cold format; its value
stays as it is, to the bit. A normalized key keeps its scale and mean. The block that went cold last keeps its recent
form for one block more, so that a trim of up to 32 tokens leads back to exactly the cache that never saw them.
Attention decodes the cold tokens at each step.

Cold and recent tokens are evicted by the same scores, of their decoded keys. If they are archived, only cold ones are
evicted: a row with a recent key would be reloaded to where keys are cold.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import mlx.core as mx
import numpy as np

from mlx_tq.cache.layer import CompressedKVCache, Group
from mlx_tq.cache.packed_rows import PackedRows, Pair, SharedBuffers, join_tokens, row_capacity
from mlx_tq.cache.saved_state import check_rows, read_count
from mlx_tq.cache.spec import CacheSpec
from mlx_tq.cache.view import StepView
from mlx_tq.codec.formats import get_format
from mlx_tq.codec.normalization import KeyNormalization, decode_keys, denormalize, rerotate_means
from mlx_tq.codec.rows import RowLayout
from mlx_tq.errors import CacheFormatError
from mlx_tq.kernels.encode import compact
from mlx_tq.kernels.regions import Regions, splice


@dataclass(frozen=True, kw_only=True)
class TieredView(StepView):
    """A view whose packed region, the recent tokens, follows a run of cold ones."""

    cold: mx.array  # their rows, uint32 [B, H, n, W]
    cold_layout: RowLayout
    cold_normalization: KeyNormalization | None  # that was applied to their keys before these were first encoded

    @property
    def tokens(self) -> int:
        return self.regions.tokens + self.cold.shape[2]

    def cold_keys(self) -> mx.array:
        """Decode and denormalize the cold keys, fp32 [B, H, n, D]."""
        keys = self.cold_layout.key.decode(self.cold_layout.keys(self.cold))
        normalization = self.cold_normalization
        return keys if normalization is None else denormalize(keys, normalization, self.regions.layout.key.rotation)

    def merged_regions(self) -> Regions:
        """Return the same tokens, with the cold ones decoded and put behind the sinks."""
        layout, rows, recent = self.cold_layout, self.cold, self.regions
        return replace(
            recent,
            full_keys=splice(recent.keys, recent.sink_tokens, self.cold_keys()),
            full_values=splice(recent.values, recent.sink_tokens, layout.value.decode(layout.values(rows))),
            sink_tokens=recent.sink_tokens + rows.shape[2],
            full_tokens=recent.full_tokens + rows.shape[2],
        )


class TieredKVCache(CompressedKVCache):
    """A compressed cache with two key formats: `spec.key` for recent tokens, `spec.cold` for older ones."""

    growing_state: ClassVar[dict[str, int]] = {}

    def __init__(self, spec: CacheSpec, number: int = 0, group: Group | None = None) -> None:
        super().__init__(spec, number, group)
        # Cold rows lie in buffers of their own. The other rows begin at position `_recent_start`, which is earlier than
        # the end of the cold ones for as long as a trim may lead back to recent keys.
        self._cold = PackedRows()
        self._recent_start = spec.sinks

    def trim(self, n: int) -> int:
        """Drop the last n tokens; return how many were dropped. Deeper than 32, cold tokens stay cold."""
        trimmed = super().trim(n)
        self._recent_start = max(self.spec.sinks, min(self._recent_start, self.offset))
        return trimmed

    def fork(self) -> "TieredKVCache":
        twin: Any = super().fork()
        twin._cold = self._cold.fork()
        return twin  # type: ignore[no-any-return]

    @property
    def state(self) -> dict[str, Any]:
        return self._with_cold(super().state, self._cold_rows())

    @state.setter
    def state(self, state: dict[str, Any]) -> None:
        self._recent_start = read_count(state, "recent_start")
        CompressedKVCache.state.fset(self, state)  # type: ignore[attr-defined]
        self._cold = PackedRows(state.get("cold"))

    def _check_state(self, state: dict[str, Any]) -> None:
        if not self.spec.cold or not self.spec.sinks <= self._recent_start <= max(self.spec.sinks, self.offset):
            raise CacheFormatError("a layer's state contradicts itself: its cold tokens")
        super()._check_state(state)

    def _check_rows(self, state: dict[str, Any], batch: int, heads: int, words: int) -> None:
        super()._check_rows(state, batch, heads, words)
        keys, values = state["keys"], state["values"]
        recent = self.spec.layout(keys.shape[3], values.shape[3], keys.dtype)
        cold = self.spec.cold_layout(recent, keys.dtype).words
        check_rows(state, "cold", (batch, heads, self.num_evictable, cold))

    @property
    def state_in_place(self) -> dict[str, Any]:
        return self._with_cold(super().state_in_place, self._cold.in_place(self.num_evictable))

    def _with_cold(self, state: dict[str, Any], cold: Any) -> dict[str, Any]:
        return state | {"recent_start": self._recent_start} | ({} if cold is None else {"cold": cold})

    @property
    def packed_tokens(self) -> int:
        """Number of tokens that attention reads packed, cold ones included."""
        return self.regions.stored_before(self._packed(self.offset))

    @property
    def packed_nbytes(self) -> int:
        cold = self._cold_rows()
        return super().packed_nbytes + (0 if cold is None else cold.nbytes)

    def packed_rows(self) -> tuple[mx.array, RowLayout, KeyNormalization | None]:
        """Return all packed tokens with keys in the model's dtype, for scores: two formats have no common layout."""
        view = self._current_view()
        if not isinstance(view, TieredView):
            return super().packed_rows()
        recent, cold = view.regions, view.cold_layout
        exact = get_format("fp16").codec(recent.layout.key.head_dim, self.spec.key_options, recent.full_keys.dtype)
        layout = RowLayout(exact, recent.layout.value)
        parts = [layout.join(exact.encode(view.cold_keys()), cold.values(view.cold))]
        if recent.packed_tokens:
            rows, packed = recent.rows(), recent.layout
            keys = decode_keys(packed.key, packed.keys(rows), recent.normalization)
            parts.append(layout.join(exact.encode(keys), packed.values(rows)))
        return mx.concatenate(parts, axis=2), layout, None

    def compact(self, indices: np.ndarray, positions: np.ndarray) -> mx.array:
        """Keep these packed rows of both tiers; return arrays that wait for both."""
        view = self._current_view()
        if not isinstance(view, TieredView):
            return super().compact(indices, positions)
        num_cold, rows = view.cold.shape[2], view.regions.rows()
        cold_indices, recent_indices = indices[indices < num_cold], indices[indices >= num_cold] - num_cold
        self._recent_start = self._cold_end(self._packed(self.offset))  # no trim leads back to what went cold last
        cold = compact(view.cold, mx.array(cold_indices, mx.int32), row_capacity(max(1, len(cold_indices))))
        self._cold = PackedRows(cold)
        recent = compact(rows, mx.array(recent_indices, mx.int32), row_capacity(max(1, len(recent_indices))))
        both: mx.array = mx.depends(self.replace_packed(recent, positions), cold)
        return both

    def shareable_buffers(self) -> SharedBuffers:
        """Return none: rows move when they go cold, so copies soon share none."""
        return []

    # Rows for the archive: the cold ones.

    @property
    def num_evictable(self) -> int:
        return self.regions.stored_before(self._cold_end(self._packed(self.offset)))

    def evictable_rows(self) -> tuple[mx.array, RowLayout, KeyNormalization | None]:
        if self._full is None or not self._rows:
            raise CacheFormatError("nothing of the cache is packed yet. Read more tokens first.")
        layout, rows = self._cold_layout(self._full), self._cold_rows()
        if rows is None:
            rows = mx.zeros((*self._full[0].shape[:2], 0, layout.words), mx.uint32)
        return rows, layout, self._cold_normalization(self._packed(self.offset))

    def _cold_normalization(self, packed: int) -> KeyNormalization | None:
        normalization = super()._normalization(packed)
        return None if normalization is None else replace(normalization, index=self._mean_index, first=0)

    def archived_normalization(self, means: np.ndarray, index: mx.array) -> KeyNormalization | None:
        normalization = super().archived_normalization(means, index)
        if normalization is None or self._full is None:
            return normalization
        layout = self._layout(self._full)  # means are in the domain of the recent format's codes
        rotation = self._cold_layout(self._full).key.rotation
        return replace(normalization, means=rerotate_means(normalization.means, layout.key.rotation, rotation))

    def _replace_evictable(self, rows: mx.array, positions: np.ndarray, means: Mapping[int, np.ndarray]) -> mx.array:
        packed, later = self._packed(self.offset), self.packed_positions[self.num_evictable :]
        end = self._cold_end(packed)
        recent = self._rows.between(self._row(end), self._row(packed))
        recent = mx.zeros_like(rows[:, :, :0]) if recent is None else recent
        self._recent_start, self._cold = end, PackedRows(rows)  # no trim leads back to what went cold last
        recent = join_tokens([recent], row_capacity(max(1, len(later))))
        both: mx.array = mx.depends(self.replace_packed(recent, np.concatenate([positions, later]), means), rows)
        return both

    # Regions and buffers.

    def arrays(self) -> list[mx.array]:
        return super().arrays() + self._cold.arrays

    def _row(self, position: int) -> int:
        return self.regions.stored_before(position) - self.regions.stored_before(self._recent_start)

    def _normalization(self, packed: int) -> KeyNormalization | None:
        normalization = super()._normalization(packed)
        # The index of means covers the cold rows too.
        skipped = self.regions.stored_before(self._recent_start)
        return normalization if normalization is None or normalization.index is None else normalization.after(skipped)

    def _cold_end(self, packed: int) -> int:
        """Return the position before which tokens are cold when those before `packed` are packed."""
        return max(self.spec.cold_until(packed), self._recent_start)

    def _cold_rows(self) -> mx.array | None:
        return self._cold.between(0, self.num_evictable)

    def _cold_layout(self, full: Pair) -> RowLayout:
        return self.spec.cold_layout(self._layout(full), full[0].dtype)

    def _current_view(self) -> StepView | None:
        """Return what the next token would attend to, or None if nothing is packed."""
        if not self._rows or self._full is None:
            return None
        packed = self._packed(self.offset)
        return self._view(self._full, packed, self.offset, packed)

    def _view(self, full: Pair, window_start: int, length: int, packed: int) -> StepView:
        view = super()._view(full, window_start, length, packed)
        end, regions = self._cold_end(packed), view.regions
        num_cold = self.regions.stored_before(end)
        cold = self._cold.between(0, num_cold)
        if cold is None or not self._rows or num_cold == 0:
            return view
        twice = self._row(end)  # cold tokens that still have recent rows, too
        normalization = regions.normalization
        recent = replace(
            regions,
            packed_rows=regions.rows(twice),
            shared=(),
            packed_tokens=regions.packed_tokens - twice,
            normalization=None if normalization is None else normalization.after(twice),
        )
        normalization = self._cold_normalization(packed)
        return TieredView(recent, cold=cold, cold_layout=self._cold_layout(full), cold_normalization=normalization)

    def _pack(self, full: Pair, packed: int, target: int) -> None:
        super()._pack(full, packed, target)
        start, stop = self._cold_end(packed), self._cold_end(target)
        rows = self._rows.between(self._row(start), self._row(stop))
        if rows is None or self._row(stop) == self._row(start):
            return
        layout, cold = self._layout(full), self._cold_layout(full)
        rows = cold.join(cold.key.encode(layout.key.decode(layout.keys(rows))), layout.values(rows))
        self._cold.write(rows, self.regions.stored_before(start))

    def _retain(self, full: Pair, window_start: int, packed: int) -> Pair:
        retained = super()._retain(full, window_start, packed)
        start = max(self.spec.recent_from(packed), self._recent_start)
        rows = self._rows.between(self._row(start), self._row(packed))
        if rows is not None and start > self._recent_start:
            self._recent_start = start
            self._rows = PackedRows(join_tokens([rows], row_capacity(rows.shape[2])))
        return retained
