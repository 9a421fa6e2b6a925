"""`HeadwiseKVCache`: a layer whose KV heads keep different tokens.

Some heads keep all tokens; the others lose those that the layers' group evicts. Sinks and window, in full precision,
are those of all heads; the packed rows of the two kinds of heads lie in buffers of their own. In a long pass, heads
that evict see only the first tokens and the last ones before each query, besides what is packed.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import mlx.core as mx
import numpy as np

from mlx_tq.cache.layer import CompressedKVCache, Group
from mlx_tq.cache.packed_rows import PackedRows, Pair, SharedBuffers, StoredRows
from mlx_tq.cache.region_map import RegionMap
from mlx_tq.cache.saved_state import check_rows
from mlx_tq.cache.spec import CacheSpec
from mlx_tq.cache.view import StepView
from mlx_tq.codec.normalization import KeyNormalization
from mlx_tq.codec.rows import RowLayout
from mlx_tq.errors import CacheFormatError, UnsupportedModelError
from mlx_tq.kernels.regions import HeadRows, Regions


class HeadwiseKVCache(CompressedKVCache):
    """A compressed cache of which the heads `spec.kept_heads` keep all tokens."""

    growing_state: ClassVar[dict[str, int]] = {}

    def __init__(self, spec: CacheSpec, number: int = 0, group: Group | None = None) -> None:
        super().__init__(spec, number, group)
        self._kept_rows = PackedRows()  # of heads that keep all tokens

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array | str | None:
        if self.regions.evicted and self.spec.kept_heads and (return_array or window_size is not None):
            raise UnsupportedModelError(
                "the model asks for a mask of all tokens, and the heads of a layer keep different ones. Use --kv-evict "
                "none, or another policy."
            )
        return super().make_mask(N, return_array, window_size)

    def size(self) -> int:
        """Return the number of tokens that the head with most of them stores."""
        return self.offset if self.spec.kept_heads else super().size()

    @property
    def positions(self) -> np.ndarray | list[np.ndarray]:
        """Positions of the stored tokens, ascending, int64 [N]: of all heads, or of each if they differ."""
        if not self.regions.evicted or not self.spec.kept_heads or self._full is None:
            return super().positions
        evicting, every = self.regions.positions, np.arange(self.offset)
        return [every if head in self.spec.kept_heads else evicting for head in range(self._full[0].shape[1])]

    @property
    def packed_nbytes(self) -> int:
        """Bytes of the packed tokens and of their key normalization, without spare capacity."""
        rows = self._kept_rows.between(0, self._num_kept)
        return super().packed_nbytes + (0 if rows is None else rows.nbytes)

    def packed_rows(self) -> tuple[mx.array, RowLayout, KeyNormalization | None]:
        """Return what is packed of the heads that evict."""
        rows, layout, normalization = super().packed_rows()
        return rows, layout, self._of_evicting(normalization)

    def searched(self, queries: mx.array) -> tuple[mx.array, Regions]:
        regions = super().searched(queries)[1]
        group = regions.groups[-1]
        query_heads = group.query_heads(queries.shape[1] // regions.full_keys.shape[1])
        return mx.take(queries, mx.array(query_heads), axis=1), regions.group(group)

    def shareable_buffers(self) -> SharedBuffers:
        return self._kept_rows.shareable(self._num_kept)

    def fork(self) -> "HeadwiseKVCache":
        twin: Any = super().fork()
        twin._kept_rows = self._kept_rows.fork()
        return twin  # type: ignore[no-any-return]

    def arrays(self) -> list[mx.array]:
        return super().arrays() + self._kept_rows.arrays

    # The state.

    @property
    def state(self) -> dict[str, Any]:
        return self._with_kept(super().state, self._kept_rows.between(0, self._num_kept))

    @state.setter
    def state(self, state: dict[str, Any]) -> None:
        CompressedKVCache.state.fset(self, state)  # type: ignore[attr-defined]
        self._kept_rows = PackedRows(state.get("kept"))

    @property
    def state_in_place(self) -> dict[str, Any]:
        return self._with_kept(super().state_in_place, self._kept_rows.in_place(self._num_kept))

    def _with_kept(self, state: dict[str, Any], rows: StoredRows) -> dict[str, Any]:
        return state if rows is None else state | {"kept": rows}

    def _check_rows(self, state: dict[str, Any], batch: int, heads: int, words: int) -> None:
        kept_heads = self.spec.kept_heads
        if len(kept_heads) >= heads or any(not 0 <= head < heads for head in kept_heads):
            raise CacheFormatError(
                f"a layer's state contradicts itself: {len(kept_heads)} of {heads} heads evict nothing"
            )
        super()._check_rows(state, batch, heads - len(kept_heads), words)
        if kept_heads:
            check_rows(state, "kept", (batch, len(kept_heads), self._num_kept, words))

    # Regions and buffers.

    @property
    def _num_kept(self) -> int:
        return self._packed(self.offset) - self.spec.sinks if self.spec.kept_heads else 0

    @property
    def _mean_map(self) -> RegionMap:
        """All positions, where a head keeps all: its rows need their means."""
        regions = self.regions
        return RegionMap(regions.sizes, regions.length, regions.originals) if self.spec.kept_heads else regions

    def _evicting(self, heads: int) -> tuple[int, ...]:
        return tuple(head for head in range(heads) if head not in self.spec.kept_heads)

    def _of_evicting(self, normalization: KeyNormalization | None) -> KeyNormalization | None:
        if normalization is None:
            return None
        heads = mx.array(self._evicting(normalization.scale.shape[1]))
        return normalization.select_heads(lambda array: mx.take(array, heads, axis=1))

    def _write_rows(self, rows: mx.array, start: int) -> None:
        kept_heads = self.spec.kept_heads
        if kept_heads:
            self._kept_rows.write(mx.take(rows, mx.array(kept_heads), axis=1), start - self.spec.sinks)
        super()._write_rows(mx.take(rows, mx.array(self._evicting(rows.shape[1])), axis=1), start)

    def _view(self, full: Pair, window_start: int, length: int, packed: int) -> StepView:
        view = super()._view(full, window_start, length, packed)
        regions, kept_heads = view.regions, self.spec.kept_heads
        evicting = self._evicting(full[0].shape[1])
        groups = [HeadRows(evicting, regions.packed_rows, regions.packed_tokens, regions.shared, self._mean_index)]
        most = regions.packed_tokens
        if kept_heads:
            most = max(0, packed - self.spec.sinks)
            groups.insert(0, HeadRows(kept_heads, self._kept_rows.unshared, most, self._kept_rows.shared(most)))
        normalization = regions.normalization and replace(regions.normalization, index=None, first=0)
        return replace(
            view,
            regions=replace(
                regions,
                packed_rows=None,
                packed_tokens=most,
                shared=(),
                normalization=normalization,
                groups=tuple(groups),
            ),
        )

    def _long_view(self, full: Pair, packed: int, length: int) -> StepView:
        view = super()._long_view(full, packed, length)
        regions, spec = view.regions, self.spec
        first = regions.sink_tokens + max(0, spec.head_sinks - max(packed, regions.sink_tokens))
        group = replace(regions.groups[-1], window=spec.head_window, sinks=min(first, regions.full_tokens))
        return replace(view, regions=replace(regions, groups=(*regions.groups[:-1], group)))

    def _replace_evictable(self, rows: mx.array, positions: np.ndarray, means: Mapping[int, np.ndarray]) -> mx.array:
        """Heads that keep all tokens have all means."""
        return super()._replace_evictable(rows, positions, {} if self.spec.kept_heads else means)
