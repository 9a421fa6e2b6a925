"""`TieredKVCache`: recent tokens packed with one format of keys, older ones with a smaller one.

    sinks | cold | recent | tail

Once a token is older than `recent` packed ones, its key is decoded and stored again in the cold format; its value stays
as it is, to the bit. A normalized key is decoded to what was encoded of it, so it stays normalized by its weights and
its mean. The block that went cold last keeps its recent form for one block more, so that a trim of up to 32 tokens
leads back to exactly the cache that never saw them. Attention decodes the cold tokens for each step.

Tokens may leave, cold and recent ones by the same scores: those of the decoded keys. Where they are to come back, only
cold ones leave, as a row that left with its recent key would come back to where keys are cold.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_tq.cache.body import Body
from mlx_tq.cache.buffers import Pair, body_capacity, buffer
from mlx_tq.cache.handles import StepView
from mlx_tq.cache.layer import CompressedKVCache
from mlx_tq.cache.links import SequencePart
from mlx_tq.cache.spec import CacheSpec
from mlx_tq.codec.formats import get_format
from mlx_tq.codec.normalization import KeyNormalization, decode_keys, denormalize
from mlx_tq.codec.rotation import Rotation
from mlx_tq.codec.rows import RowLayout
from mlx_tq.errors import CacheFormatError
from mlx_tq.kernels.encode import compact
from mlx_tq.kernels.regions import Regions, splice


@dataclass(frozen=True, kw_only=True)
class TieredView(StepView):
    """A view whose body, the recent tokens, comes after a run of cold ones.

    Attributes:
        cold: rows of the cold tokens, uint32 [B, H, n, W].
        cold_layout: of these rows.
        cold_normalization: of their keys: what was subtracted from these before they were first encoded.
    """

    cold: mx.array
    cold_layout: RowLayout
    cold_normalization: KeyNormalization | None

    @property
    def tokens(self) -> int:
        """All that the last query sees."""
        return self.regions.tokens + self.cold.shape[2]

    def cold_keys(self) -> mx.array:
        """The keys of the cold tokens as they were before they were normalized, fp32 [B, H, n, D]."""
        keys = self.cold_layout.key.decode(self.cold_layout.keys(self.cold))
        known = self.cold_normalization
        return keys if known is None else denormalize(keys, known, self.regions.layout.key.rotation)

    def undivided(self) -> Regions:
        """The same tokens, the cold ones decoded and put behind the sinks."""
        layout, rows, recent = self.cold_layout, self.cold, self.regions
        return replace(
            recent,
            full_keys=splice(recent.keys, recent.sink_tokens, self.cold_keys()),
            full_values=splice(recent.values, recent.sink_tokens, layout.value.decode(layout.values(rows))),
            sink_tokens=recent.sink_tokens + rows.shape[2],
            full_tokens=recent.full_tokens + rows.shape[2],
        )


class TieredKVCache(CompressedKVCache):
    """A compressed cache with two formats of keys: `spec.key` for recent tokens, `spec.cold` for older ones."""

    def __init__(self, spec: CacheSpec, number: int = 0, sequence: SequencePart | None = None) -> None:
        super().__init__(spec, number, sequence)
        # What is stored of [sinks, cold end) lies in a buffer of its own; the body's rows are of [cooled, packed).
        self._cold = Body()
        self._cooled = spec.sinks

    def trim(self, n: int) -> int:
        """Drop the last n tokens; returns how many were dropped. Deeper than 32, cold tokens stay cold."""
        trimmed = super().trim(n)
        self._cooled = max(self.spec.sinks, min(self._cooled, self.offset))
        return trimmed

    @property
    def state(self) -> tuple[Any, ...]:
        """As of `CompressedKVCache`, then the cold rows and where the body's own begin."""
        return *super().state, self._cold_body(), self._cooled

    @state.setter
    def state(self, state: tuple[Any, ...]) -> None:
        *base, cold, self._cooled = state
        self._cold = Body(cold)
        CompressedKVCache.state.fset(self, tuple(base))  # type: ignore[attr-defined]

    @property
    def state_in_place(self) -> tuple[Any, ...]:
        """As of `CompressedKVCache`."""
        end = self._stored(self._cold_end(self._packed(self.offset)))
        return *super().state_in_place, self._cold.in_place(end), self._cooled

    @property
    def body_tokens(self) -> int:
        """Tokens that attention reads packed, cold ones too."""
        return self._stored(self._packed(self.offset))

    def body(self) -> tuple[mx.array, RowLayout, KeyNormalization | None]:
        """All packed tokens with keys in the model's type, for scores: rows of two formats have no layout in common.

        Raises:
            CacheFormatError: nothing is packed.
        """
        view = self._whole_view()
        if not isinstance(view, TieredView):
            return super().body()
        recent, cold = view.regions, view.cold_layout
        exact = get_format("fp16").codec(recent.layout.key.head_dim, self.spec.key_options, recent.full_keys.dtype)
        layout, parts = RowLayout(exact, recent.layout.value), []
        parts.append(layout.join(exact.encode(view.cold_keys()), cold.values(view.cold)))
        if recent.packed_tokens:
            rows, own = recent.rows(), recent.layout
            keys = decode_keys(own.key, own.keys(rows), recent.normalization)
            parts.append(layout.join(exact.encode(keys), own.values(rows)))
        return mx.concatenate(parts, axis=2), layout, None

    @property
    def cold_tokens(self) -> int:
        """Packed tokens with cold keys."""
        return self._stored(self._cold_end(self._packed(self.offset)))

    @property
    def body_rotation(self) -> Rotation | None:
        """That in whose domain the means of keys are, cold ones too."""
        return None if self._full is None else self._layout(self._full).key.rotation

    def cold_body(self) -> tuple[mx.array, RowLayout, KeyNormalization | None]:
        """The rows of cold tokens, uint32 [B, H, cold_tokens, W], and how they are made; see `TieredView`.

        Raises:
            CacheFormatError: nothing is packed.
        """
        if self._full is None or not self._body:
            raise CacheFormatError("nothing of the cache is packed yet. Read more tokens first.")
        layout, known = self._cold_layout(self._full), super()._normalization(self._packed(self.offset))
        rows = self._cold.between(0, self.cold_tokens)
        if rows is None:
            rows = mx.zeros((*self._full[0].shape[:2], 0, layout.words), mx.uint32)
        return rows, layout, None if known is None else replace(known, index=self._mean_of_row, first=0)

    def replace_cold(self, rows: mx.array, positions: np.ndarray, means: Mapping[int, np.ndarray]) -> mx.array:
        """As `replace_body`, but of the cold tokens alone; returns arrays that wait for all rows."""
        packed, later = self._packed(self.offset), self.body_positions[self.cold_tokens :]
        end = self._cold_end(packed)
        recent = self._body.between(self._row(end), self._row(packed))
        body = mx.zeros_like(rows[:, :, :0]) if recent is None else recent
        self._cooled, self._cold = end, Body(rows)  # no trim leads back to what went cold last
        body = buffer([body], body_capacity(max(1, len(later))))
        both: mx.array = mx.depends(self.replace_body(body, np.concatenate([positions, later]), means), rows)
        return both

    def compact(self, kept: np.ndarray, positions: np.ndarray) -> mx.array:
        """As of `CompressedKVCache`: each of the tiers keeps its own; returns arrays that wait for both."""
        view = self._whole_view()
        if not isinstance(view, TieredView):
            return super().compact(kept, positions)
        cold, rows = view.cold.shape[2], view.regions.rows()
        stay, later = kept[kept < cold], kept[kept >= cold] - cold
        self._cooled = self._cold_end(self._packed(self.offset))  # no trim leads back to what went cold last
        colder = compact(view.cold, mx.array(stay, mx.int32), body_capacity(max(1, len(stay))))
        self._cold = Body(colder)
        body = compact(rows, mx.array(later, mx.int32), body_capacity(max(1, len(later))))
        both: mx.array = mx.depends(self.replace_body(body, positions), colder)
        return both

    def _whole_view(self) -> StepView | None:
        """What the next token would attend to; None where nothing is packed."""
        if not self._body or self._full is None:
            return None
        packed = self._packed(self.offset)
        return self._view(self._full, packed, self.offset, packed)

    @property
    def body_nbytes(self) -> int:
        """Bytes of the packed tokens, without spare capacity."""
        cold = self._cold_body()
        return super().body_nbytes + (0 if cold is None else cold.nbytes)

    def _cold_body(self) -> mx.array | None:
        """The cold rows without spare capacity."""
        return self._cold.between(0, self._stored(self._cold_end(self._packed(self.offset))))

    def fork(self) -> "TieredKVCache":
        """A copy that shares no change with this one."""
        twin = super().fork()
        twin._cold = self._cold.fork()
        twin._cooled = self._cooled
        return twin

    def arrays(self) -> list[mx.array]:
        """As of `CompressedKVCache`, and the cold rows."""
        return super().arrays() + self._cold.arrays

    def _stored(self, position: int) -> int:
        """How many tokens are stored between the sinks and a position."""
        gaps = self.gaps
        if position < gaps.floor:
            return int(np.searchsorted(gaps.kept, position))
        return position - self.spec.sinks - gaps.evicted

    def _row(self, position: int) -> int:
        return self._stored(position) - self._stored(self._cooled)

    def _normalization(self, packed: int) -> KeyNormalization | None:
        known = super()._normalization(packed)
        # Where tokens have left, the numbers of means begin with those of the cold rows.
        return known if known is None or known.index is None else known.after(self._stored(self._cooled))

    def _cold_end(self, packed: int) -> int:
        """The position before which tokens are cold when those before `packed` are packed."""
        return max(self.spec.cold_until(packed), self._cooled)

    def _cold_layout(self, full: Pair) -> RowLayout:
        return self.spec.cold_layout(self._layout(full), full[0].dtype)

    def _view(self, full: Pair, tail: int, length: int, packed: int) -> StepView:
        view = super()._view(full, tail, length, packed)
        end, regions = self._cold_end(packed), view.regions
        count = self._stored(end)
        cold = self._cold.between(0, count)
        if cold is None or not self._body or count == 0:
            return view
        twice = self._row(end)  # rows of cold tokens that have not left the body
        normalization = regions.normalization
        return TieredView(
            replace(
                regions,
                packed_rows=regions.rows(twice),
                shared=(),
                packed_tokens=regions.packed_tokens - twice,
                normalization=None if normalization is None else normalization.after(twice),
            ),
            cold=cold,
            cold_layout=self._cold_layout(full),
            cold_normalization=None
            if normalization is None
            else replace(normalization, index=self._mean_of_row, first=0),
        )

    def _pack(self, full: Pair, packed: int, target: int) -> None:
        super()._pack(full, packed, target)
        start, stop = self._cold_end(packed), self._cold_end(target)
        rows = self._body.between(self._row(start), self._row(stop))
        if rows is None or self._row(stop) == self._row(start):
            return
        layout, cold = self._layout(full), self._cold_layout(full)
        rows = cold.join(cold.key.encode(layout.key.decode(layout.keys(rows))), layout.values(rows))
        self._cold.write(rows, self._stored(start))

    def _retain(self, full: Pair, tail: int, packed: int) -> Pair:
        kept = super()._retain(full, tail, packed)
        cooled = max(self.spec.cold_until(self.spec.originals_from(packed)), self._cooled)
        rows = self._body.between(self._row(cooled), self._row(packed))
        if rows is not None and cooled > self._cooled:
            self._cooled = cooled
            self._body = Body(buffer([rows], body_capacity(rows.shape[2])))
        return kept
