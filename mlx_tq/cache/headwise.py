"""`HeadwiseKVCache`: a layer of retrieval heads, which keep all tokens, and streaming heads, which evict.

Sinks and window, in full precision, are common to all heads; each kind has packed rows in a buffer of its own. In a
long pass, a streaming head sees its packed rows, the first `head_sinks` tokens, and the last `head_window` before each
query. The terms are those of DuoAttention (Xiao et al., arXiv 2410.10819).
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
from mlx_tq.errors import CacheFormatError
from mlx_tq.kernels.regions import HeadRows, Regions


class HeadwiseKVCache(CompressedKVCache):
    """A compressed cache whose heads `spec.retrieval_heads` keep all tokens."""

    growing_state: ClassVar[dict[str, int]] = {}

    def __init__(self, spec: CacheSpec, number: int = 0, group: Group | None = None) -> None:
        super().__init__(spec, number, group)
        self._retrieval_rows = PackedRows()

    @property
    def _heads_differ(self) -> bool:
        return bool(self.regions.evicted and self.spec.retrieval_heads)

    def size(self) -> int:
        """Return the number of tokens that the head with most of them stores."""
        return self.offset if self.spec.retrieval_heads else super().size()

    @property
    def positions(self) -> np.ndarray | list[np.ndarray]:
        """Positions of the stored tokens, ascending, int64 [N]: of all heads, or of each if they differ."""
        if not self._heads_differ or self._full is None:
            return super().positions
        streaming, every = self.regions.positions, np.arange(self.offset)
        return [every if head in self.spec.retrieval_heads else streaming for head in range(self._full[0].shape[1])]

    @property
    def packed_nbytes(self) -> int:
        """Bytes of the packed tokens and of their key normalization, without spare capacity."""
        rows = self._retrieval_rows.between(0, self._num_retrieval)
        return super().packed_nbytes + (0 if rows is None else rows.nbytes)

    def packed_rows(self) -> tuple[mx.array, RowLayout, KeyNormalization | None]:
        """Return what is packed of the streaming heads."""
        rows, layout, normalization = super().packed_rows()
        return rows, layout.select_heads(self._select_streaming), self._of_streaming(normalization)

    def searched(self, queries: mx.array) -> tuple[mx.array, Regions]:
        regions = super().searched(queries)[1]
        group = regions.groups[-1]
        query_heads = group.query_heads(queries.shape[1] // regions.full_keys.shape[1])
        return mx.take(queries, mx.array(query_heads), axis=1), regions.part([group])

    def shareable_buffers(self) -> SharedBuffers:
        return self._retrieval_rows.shareable(self._num_retrieval)

    def fork(self) -> "HeadwiseKVCache":
        twin: Any = super().fork()
        twin._retrieval_rows = self._retrieval_rows.fork()
        return twin  # type: ignore[no-any-return]

    def arrays(self) -> list[mx.array]:
        return super().arrays() + self._retrieval_rows.arrays

    # The state.

    @property
    def state(self) -> dict[str, Any]:
        return self._with_retrieval_rows(super().state, self._retrieval_rows.between(0, self._num_retrieval))

    @state.setter
    def state(self, state: dict[str, Any]) -> None:
        CompressedKVCache.state.fset(self, state)  # type: ignore[attr-defined]
        self._retrieval_rows = PackedRows(state.get("retrieval_rows"))

    @property
    def state_in_place(self) -> dict[str, Any]:
        return self._with_retrieval_rows(super().state_in_place, self._retrieval_rows.in_place(self._num_retrieval))

    def _with_retrieval_rows(self, state: dict[str, Any], rows: StoredRows) -> dict[str, Any]:
        return state if rows is None else state | {"retrieval_rows": rows}

    def _check_rows(self, state: dict[str, Any], batch: int, heads: int, words: int) -> None:
        retrieval_heads = self.spec.retrieval_heads
        if len(retrieval_heads) >= heads or any(not 0 <= head < heads for head in retrieval_heads):
            raise CacheFormatError(
                f"a layer's state contradicts itself: {len(retrieval_heads)} of {heads} heads are retrieval heads"
            )
        super()._check_rows(state, batch, heads - len(retrieval_heads), words)
        if retrieval_heads:
            check_rows(state, "retrieval_rows", (batch, len(retrieval_heads), self._num_retrieval, words))

    # Regions and buffers.

    @property
    def _num_retrieval(self) -> int:
        return self._packed(self.offset) - self.spec.sinks if self.spec.retrieval_heads else 0

    @property
    def _mean_map(self) -> RegionMap:
        """All positions, where a head keeps all: its rows need their means."""
        regions = self.regions
        return regions.without_evictions() if self.spec.retrieval_heads else regions

    def _streaming(self, heads: int) -> tuple[int, ...]:
        return tuple(head for head in range(heads) if head not in self.spec.retrieval_heads)

    def _of_streaming(self, normalization: KeyNormalization | None) -> KeyNormalization | None:
        return normalization and normalization.select_heads(self._select_streaming)

    def _select_streaming(self, array: mx.array) -> mx.array:
        return mx.take(array, mx.array(self._streaming(array.shape[1])), axis=1)

    def _write_rows(self, rows: mx.array, start: int) -> None:
        retrieval_heads = self.spec.retrieval_heads
        if retrieval_heads:
            self._retrieval_rows.write(mx.take(rows, mx.array(retrieval_heads), axis=1), start - self.spec.sinks)
        super()._write_rows(mx.take(rows, mx.array(self._streaming(rows.shape[1])), axis=1), start)

    def _view(self, full: Pair, window_start: int, length: int, packed: int) -> StepView:
        view = super()._view(full, window_start, length, packed)
        regions, retrieval_heads = view.regions, self.spec.retrieval_heads
        streaming = self._streaming(full[0].shape[1])
        groups = [HeadRows(streaming, regions.packed_rows, regions.packed_tokens, regions.shared, self._mean_index)]
        if retrieval_heads:
            count = max(0, packed - self.spec.sinks)
            rows = self._retrieval_rows
            groups.insert(0, HeadRows(retrieval_heads, rows.unshared, count, rows.shared(count)))
        return replace(view, regions=regions.with_groups(groups))

    def _long_view(self, full: Pair, packed: int, length: int) -> StepView:
        view = super()._long_view(full, packed, length)
        regions, spec = view.regions, self.spec
        first = regions.sink_tokens + max(0, spec.head_sinks - max(packed, regions.sink_tokens))
        group = replace(regions.groups[-1], window=spec.head_window, sinks=min(first, regions.full_tokens))
        return replace(view, regions=replace(regions, groups=(*regions.groups[:-1], group)))

    def _replace_evictable(self, rows: mx.array, positions: np.ndarray, means: Mapping[int, np.ndarray]) -> mx.array:
        """Retrieval heads need the means of all blocks."""
        return super()._replace_evictable(rows, positions, {} if self.spec.retrieval_heads else means)
