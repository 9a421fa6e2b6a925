"""`CompactedKVCache`: a layer of which each KV head keeps different rows of a document, and all tokens after it.

The document's sinks and window, in full precision, are common to all heads. Each head has its packed rows in a buffer
of its own, to which later ones are appended.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import mlx.core as mx
import numpy as np

from mlx_tq.cache.layer import CompressedKVCache
from mlx_tq.cache.packed_rows import PackedRows, Pair, SharedBuffers, StoredRows
from mlx_tq.cache.region_map import RegionMap
from mlx_tq.cache.saved_state import check_rows, read_positions
from mlx_tq.cache.view import StepView
from mlx_tq.codec.normalization import MEAN_TOKENS
from mlx_tq.errors import CacheFormatError, UnsupportedModelError
from mlx_tq.kernels.encode import compact
from mlx_tq.kernels.regions import HeadRows


class CompactedKVCache(CompressedKVCache):
    """A compressed cache made by `from_cache`."""

    growing_state: ClassVar[dict[str, int]] = {}

    _head_rows: list[PackedRows]
    _document: list[np.ndarray]  # positions of each head's packed rows of the document, ascending

    @classmethod
    def from_cache(cls, cache: CompressedKVCache, kept_indices: Sequence[np.ndarray]) -> "CompactedKVCache":
        """Return a copy of a cache that keeps all tokens, with these packed rows of each head, ascending indices."""
        state, positions, sinks = dict(cache.state), cache.packed_positions, cache.spec.sinks
        rows, packed = state.pop("rows"), int(positions[-1]) + 1
        slack = packed - state["originals"]  # full-precision copies of packed rows, to which no trim leads back
        for side in ("keys", "values"):
            state[side] = mx.concatenate([state[side][:, :, :sinks], state[side][:, :, sinks + slack :]], axis=2)
        if "normalizer" in state:  # the scale is never learned again
            state["normalizer"] = {name: x for name, x in state["normalizer"].items() if name != "queries"}
        heads = []
        for head, indices in enumerate(kept_indices):
            heads.append({"positions": mx.array(positions[indices], mx.int32)})
            if len(indices):
                heads[-1]["rows"] = compact(rows[:, head : head + 1], mx.array(indices, mx.int32), len(indices))
        regions = cache.regions.with_packed(positions[:0], packed)
        numbers = {"originals": packed, "evicted": regions.evicted, "floor": regions.floor}
        compacted: CompactedKVCache = cls.from_state(
            {**state, **numbers, "retained": mx.zeros(0, mx.int32), "heads": heads}
        )
        return compacted

    @property
    def _heads_differ(self) -> bool:
        return True

    def size(self) -> int:
        """Return the number of tokens that the head with most of them stores."""
        return super().size() + max(map(len, self._document))

    @property
    def positions(self) -> np.ndarray | list[np.ndarray]:
        """Positions of the stored tokens of each head, ascending, int64 [N]."""
        common, sinks = self.regions.positions, self.spec.sinks
        return [np.concatenate([common[:sinks], positions, common[sinks:]]) for positions in self._document]

    @property
    def packed_tokens(self) -> int:
        """Number of tokens that attention reads packed, of the head with most of them."""
        return max(map(len, self._document)) + self._num_rows

    @property
    def packed_positions(self) -> np.ndarray:
        raise UnsupportedModelError("a compacted cache evicts nothing, and its heads have different packed tokens.")

    @property
    def packed_nbytes(self) -> int:
        """Bytes of the packed tokens and of their key normalization, without spare capacity."""
        rows = [rows.between(0, count) for rows, count in zip(self._head_rows, self._counts, strict=True)]
        return super().packed_nbytes + sum(array.nbytes for array in rows if array is not None)

    def shareable_buffers(self) -> SharedBuffers:
        return [
            part for rows, count in zip(self._head_rows, self._counts, strict=True) for part in rows.shareable(count)
        ]

    def trim(self, n: int) -> int:
        if isinstance(n, int) and self.offset - n < self.regions.floor:
            raise CacheFormatError(
                f"a trim of {n} tokens from {self.offset} leads back into the {self.regions.floor} that were compacted."
                f" Trim at most {self.offset - self.regions.floor}, or prefill the text again."
            )
        return super().trim(n)

    def fork(self) -> "CompactedKVCache":
        twin: Any = super().fork()
        twin._head_rows = [rows.fork() for rows in self._head_rows]
        return twin  # type: ignore[no-any-return]

    def arrays(self) -> list[mx.array]:
        return super().arrays() + [array for rows in self._head_rows for array in rows.arrays]

    # The state.

    @property
    def state(self) -> dict[str, Any]:
        return self._with_heads(super().state, lambda rows, count: rows.between(0, count))

    @state.setter
    def state(self, state: dict[str, Any]) -> None:
        self._document, self._head_rows = [], []
        CompressedKVCache.state.fset(self, state)  # type: ignore[attr-defined]
        heads = state["heads"]
        self._document = [read_positions(head, "positions", self.spec.sinks, self.regions.floor) for head in heads]
        layout = self._layout((state["keys"], state["values"]))
        for head, count in zip(heads, self._counts, strict=True):
            check_rows(head, "rows", (state["keys"].shape[0], 1, count, layout.words))
        self._head_rows = [PackedRows(head.get("rows")) for head in heads]
        self._mean_index = self._make_mean_index()

    @property
    def state_in_place(self) -> dict[str, Any]:
        return self._with_heads(super().state_in_place, lambda rows, count: rows.in_place(count))

    def _with_heads(self, state: dict[str, Any], read: Callable[[PackedRows, int], StoredRows]) -> dict[str, Any]:
        heads: list[dict[str, Any]] = []
        for positions, rows, count in zip(self._document, self._head_rows, self._counts, strict=True):
            heads.append({"positions": mx.array(positions, mx.int32)})
            if count:
                heads[-1]["rows"] = read(rows, count)
        return state | {"heads": heads}

    def _check_state(self, state: dict[str, Any]) -> None:
        super()._check_state(state)
        regions, heads = self.regions, state.get("heads", [])
        if "keys" not in state or "rows" in state or not regions.evicted or len(regions.retained):
            raise CacheFormatError("a layer's state contradicts itself: it is compacted, and has rows of all heads")
        if len(heads) != state["keys"].shape[1]:
            raise CacheFormatError(f"a layer's state contradicts itself: rows of {len(heads)} heads")

    def _check_rows(self, state: dict[str, Any], batch: int, heads: int, words: int) -> None:
        """Do nothing: the setter of the state checks the rows of each head, once it knows its positions."""

    # Regions and buffers.

    @property
    def _counts(self) -> list[int]:
        """Packed rows of each head."""
        return [len(positions) + self._num_rows for positions in self._document]

    @property
    def _mean_map(self) -> RegionMap:
        return self.regions.without_evictions()

    def _make_mean_index(self) -> mx.array | None:
        """Return which mean each packed row of each head has, int32 [H, n], padded with zeros."""
        if not self.spec.normalize or not self._document:
            return None
        later = np.arange(self.regions.floor, self._packed(self.offset))
        index = np.zeros((len(self._document), max(map(len, self._document)) + len(later)), np.int32)
        for row, document in zip(index, self._document, strict=True):
            positions = np.concatenate([document, later])
            row[: len(positions)] = (positions - self.spec.sinks) // MEAN_TOKENS
        return mx.array(index)

    def _write_rows(self, rows: mx.array, start: int) -> None:
        for head, (head_rows, document) in enumerate(zip(self._head_rows, self._document, strict=True)):
            head_rows.write(rows[:, head : head + 1], len(document) + self._row(start))

    def _view(self, full: Pair, window_start: int, length: int, packed: int) -> StepView:
        view, later = super()._view(full, window_start, length, packed), self._row(packed)
        groups = []
        for head, (rows, document) in enumerate(zip(self._head_rows, self._document, strict=True)):
            count = len(document) + later
            index = None if self._mean_index is None else self._mean_index[head]
            groups.append(HeadRows((head,), rows.unshared if count else None, count, rows.shared(count), index))
        return replace(view, regions=view.regions.with_groups(groups))
