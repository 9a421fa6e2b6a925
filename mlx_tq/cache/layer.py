"""`CompressedKVCache`: the keys and values of one layer as sinks | packed region | window; see `region_map`."""

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Protocol

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import CacheList, _BaseCache
from mlx_lm.models.cache import create_attention_mask as make_causal_mask

from mlx_tq.cache.batch import BatchCompressedKVCache
from mlx_tq.cache.blocks import LayerRows, LayerShape
from mlx_tq.cache.normalizer import KeyNormalizer
from mlx_tq.cache.packed_rows import (
    BLOCK_ROWS,
    PackedRows,
    Pair,
    SharedBuffers,
    StoredRows,
    join_tokens,
    row_capacity,
    write_tokens,
)
from mlx_tq.cache.region_map import SCALE_TOKENS, SHORT_PASS, RegionMap
from mlx_tq.cache.saved_state import check_arrays, check_rows, read_count, read_regions, read_spec
from mlx_tq.cache.spec import CacheSpec
from mlx_tq.cache.view import Handle, QueryListener, StepView, check_attention_is_patched, make_handles
from mlx_tq.codec.normalization import MEAN_TOKENS, KeyNormalization
from mlx_tq.codec.rows import RowLayout
from mlx_tq.config import BLOCK
from mlx_tq.errors import CacheFormatError, ConfigError, NonFiniteError, UnsupportedModelError
from mlx_tq.kernels.encode import compact, encode
from mlx_tq.kernels.regions import Regions, refuse_different_heads

HEALTH_BYTES = 8  # of a cache's two counters


class Group(Protocol):
    """The layers that evict together, as one of them sees them: `prompt_cache.LayerGroup`."""

    announced: int  # position up to which forward passes were announced

    @property
    def captures_queries(self) -> bool: ...

    def rewind(self, layer: Any, length: int) -> bool: ...

    def listeners(self, number: int, start: int, stop: int) -> tuple[QueryListener, ...]: ...

    def part(self, number: int) -> "Group": ...

    def part_state(self, number: int) -> dict[str, Any]: ...


class CompressedKVCache(_BaseCache):  # type: ignore[misc]
    """A drop-in for mlx-lm's `KVCache` that packs the keys and values of older tokens.

    Attributes:
        spec: formats and region sizes.
        regions: where the tokens are.
        number: number of the layer among those of its model, from 0.
        group: the layers that it evicts together with; None if it keeps all tokens.
        on_queries: called with the queries [B, Hq, L, Dk] of each pass, the scale of its scores and its attention-sink
            logits; returns arrays that are to be computed with the pass. Copies do not call it.
    """

    # State arrays that grow with the packed tokens, along axis 2, and the tokens of an entry. The prefix cache stores
    # them in blocks. Empty in a class whose packed rows change later.
    growing_state: ClassVar[dict[str, int]] = {"rows": 1, "normalizer.means": MEAN_TOKENS}

    def __init__(self, spec: CacheSpec, number: int = 0, group: Group | None = None) -> None:
        self.spec, self.number, self.group = spec, number, group
        self.regions = RegionMap.empty(spec)
        self.block_keys: tuple[str, ...] = ()  # of the first rows in the prefix cache, BLOCK_ROWS for each
        self.saved_part: dict[str, Any] | None = None  # of the group, in a state, until the next pass restores it
        # Sinks and window lie next to each other, [B, H, capacity, D]; the slack is [B, H, packed - originals, D].
        self._full: Pair | None = None
        self._slack: Pair | None = None
        self._rows = PackedRows()
        self._fitted: RowLayout | None = None  # the layout, if a format learns from the first tokens
        self._normalizer = KeyNormalizer()
        self._mean_index: mx.array | None = None  # int32 [packed_tokens], if tokens were evicted
        self._health = mx.zeros(2, mx.int32)  # vectors clamped, vectors not finite
        self._last_view: StepView | None = None  # of the last pass, if later layers share it
        self.on_queries: Callable[[mx.array, float, mx.array | None], list[mx.array]] | None = None

    @property
    def evicts(self) -> bool:
        return self.group is not None or self.saved_part is not None

    def join_group(self, group: Group) -> None:
        self.group, self.saved_part = group, None

    # mlx-lm's interface.

    @property
    def offset(self) -> int:
        """Tokens seen: the position of the next one, which RoPE uses."""
        return self.regions.length

    @property
    def keys(self) -> mx.array | None:
        """The keys in full precision, by which a model makes the next pass compute other arrays as well."""
        return None if self._full is None else self._full[0]

    @keys.setter
    def keys(self, keys: mx.array) -> None:
        assert self._full is not None  # noqa: S101 - tells the type checker: the caller got keys
        self._full = keys, self._full[1]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Handle, Handle]:
        """Append keys [B, H, L, Dk] and values [B, H, L, Dv]; return handles of all that these tokens attend to."""
        check_attention_is_patched()
        return make_handles(self.append(keys, values), keys.dtype)

    def keys_and_values(self) -> tuple[Handle, Handle]:
        """Return handles of what is stored; in a layer that later layers share, of the last pass's view."""
        if self._full is None:
            raise CacheFormatError("the cache is empty; run the model on a prompt first.")
        packed = self._packed(self.offset)
        view = self._last_view or self._view(self._full, packed, self.offset, packed)
        return make_handles(view, self._full[0].dtype)

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array | str | None:
        """Make the mask of the next N tokens over those stored, as mlx-lm's own cache does."""
        if self._heads_differ:
            if window_size is not None or (return_array and N > 1):
                refuse_different_heads("the model asks for a mask of all tokens")
            return_array = False
        if not self.regions.evicted or (window_size is None and not return_array):
            return make_causal_mask(N, self.offset, return_array, window_size)  # type: ignore[no-any-return]
        queries = np.arange(self.offset, self.offset + N)[:, None]
        keys = np.concatenate([self.regions.positions, queries[:, 0]])
        visible = keys <= queries
        return mx.array(visible if window_size is None else visible & (keys > queries - window_size))

    @property
    def _heads_differ(self) -> bool:
        """Whether KV heads store different tokens, which no mask can describe."""
        return False

    def size(self) -> int:
        """Return the number of stored tokens."""
        return self.regions.stored

    def empty(self) -> bool:
        return self._full is None

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays, unused capacity included."""
        return sum(array.nbytes for array in self.arrays())

    def is_trimmable(self) -> bool:
        return True

    def trim(self, n: int) -> int:
        """Drop the last n tokens; return how many were dropped.

        Up to 32 tokens back from the longest length, this leads to exactly the cache that never saw them. Deeper,
        tokens that were packed stay packed. Past an eviction, what the window then needs is reloaded from the archive.
        """
        if not isinstance(n, int) or n < 0:
            raise ConfigError(f"a trim of {n!r} tokens; it must be a whole number from 0 on.")
        n = min(self.offset, n)
        length = self.offset - n
        is_whole = self.group.rewind(self, length) if self.group is not None else self.saved_part is None
        before = self.regions
        if length < before.floor and not is_whole:
            raise CacheFormatError(
                f"a trim of {n} tokens from {self.offset} leads back past an eviction: some positions before "
                f"{before.floor} are evicted, and not in the archive. Trim at most {self.offset - before.floor}, or "
                "prefill the text again."
            )
        packed = self._packed(self.offset)
        self.regions = before.trimmed_to(length)
        self._last_view = None
        if self.spec.normalize:
            num_means = len(self._mean_map.mean_blocks(self._packed(length)))
            self._normalizer = self._normalizer.trimmed(length, num_means)
        if self._full is not None and self._packed(length) < packed:
            originals = self._originals(self._full, before.originals, packed, before.length)
            self._lay_out(self._full, originals, before.originals)
        self.block_keys = self.block_keys[: self._num_rows // BLOCK_ROWS]
        return n

    @classmethod
    def merge(cls, caches: list["CompressedKVCache"]) -> Any:
        """Return a batch of copies of `caches`."""
        return BatchCompressedKVCache.merge(caches)

    def to_batch(self, left_padding: list[int]) -> Any:
        """Refuse prompts that mlx-vlm prefills together."""
        raise UnsupportedModelError(
            f"mlx-vlm prefills {len(left_padding)} prompts together, padded on the left, which a compressed cache "
            "cannot store. Prefill one at a time, as with BatchGenerator(..., prefill_batch_size=1)."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> "CompressedKVCache":
        twin = self.fork()
        twin.group = copy.deepcopy(self.group, memo)  # a list of layers gets one copy of their group
        return twin

    def fork(self) -> "CompressedKVCache":
        """Return a copy that shares packed rows, but no change, with this cache."""
        twin = copy.copy(self)
        twin._full = None if self._full is None else (self._full[0][:], self._full[1][:])
        twin._rows, twin._health = self._rows.fork(), self._health[:]
        twin._last_view = twin.on_queries = None
        twin.group = None if self.group is None else self.group.part(self.number)
        return twin

    # The state: named arrays, numbers and text, from which `from_state` makes an equal cache.

    @property
    def state(self) -> dict[str, Any]:
        """Arrays without spare capacity, numbers and text."""
        return self._state(self._rows.between(0, self._num_rows))

    @state.setter
    def state(self, state: dict[str, Any]) -> None:
        self.spec = read_spec(state["spec"])
        self.number, self.group, self.saved_part = read_count(state, "number"), None, state.get("group")
        self.regions = read_regions(state, self.spec)
        self._normalizer = KeyNormalizer(**state.get("normalizer", {}))
        self._check_state(state)
        self._rows, self._health = PackedRows(state.get("rows")), state["health"]
        self._full = self._slack = self._fitted = self._last_view = self.on_queries = None
        self.block_keys = ()
        if "keys" in state:
            full, sinks = (state["keys"], state["values"]), self.spec.sinks
            self._lay_out(full, (full[0][:, :, sinks:], full[1][:, :, sinks:]), self.regions.originals)
            if learned := state.get("learned"):
                self._fitted = self._layout(full).restore(learned.get("key"), learned.get("value"))
        self._mean_index = self._make_mean_index()

    def _check_state(self, state: dict[str, Any]) -> None:
        """Raise CacheFormatError unless arrays and numbers agree."""
        check_arrays(state, self._mean_map, self.spec, self._packed(self.offset))
        if "keys" in state:
            keys, values = state["keys"], state["values"]
            layout = self.spec.layout(keys.shape[3], values.shape[3], keys.dtype)
            self._check_rows(state, keys.shape[0], keys.shape[1], layout.words)

    def _check_rows(self, state: dict[str, Any], batch: int, heads: int, words: int) -> None:
        """Raise CacheFormatError unless there are as many packed rows as the numbers say."""
        check_rows(state, "rows", (batch, heads, self._num_rows, words))

    @property
    def state_in_place(self) -> dict[str, Any]:
        """The same, but rows that lie in several buffers are a list, so that nothing is copied to read it."""
        return self._state(self._rows.in_place(self._num_rows))

    def _state(self, rows: StoredRows) -> dict[str, Any]:
        regions = self.regions
        full: tuple[mx.array | None, ...] = (None, None)
        if self._full is not None:
            originals = self._originals(self._full, regions.originals, self._packed(self.offset), self.offset)
            sinks = (x[:, :, : min(self.offset, self.spec.sinks)] for x in self._full)
            full = tuple(mx.concatenate([x, y], axis=2) for x, y in zip(sinks, originals, strict=True))
        learned = (None, None) if self._fitted is None else self._fitted.learned
        part = self.saved_part if self.group is None else self.group.part_state(self.number)
        state = {
            "keys": full[0],
            "values": full[1],
            "rows": rows,
            "health": self._health,
            "learned": _drop_none(dict(zip(("key", "value"), learned, strict=True))) or None,
            "normalizer": self._normalizer.arrays or None,
            "retained": mx.array(regions.retained, mx.int32) if regions.evicted else None,
            "length": regions.length,
            "originals": regions.originals,
            "evicted": regions.evicted,
            "floor": regions.floor,
            "number": self.number,
            "spec": json.dumps(self.spec.to_dict()),
            "group": part,
        }
        return _drop_none(state)

    # Appending.

    def append(self, keys: mx.array, values: mx.array) -> StepView:
        """Store L tokens, pack those that leave the window, and return what the L tokens attend to.

        Up to `SHORT_PASS` tokens see each what it would have seen alone. More tokens (a prefill) see one another, and
        what was not packed before them, in full precision.
        """
        self._last_view = None
        before, after = self.offset, self.offset + keys.shape[2]
        if self.saved_part is not None or (self.group is not None and after > self.group.announced):
            raise CacheFormatError(
                "a forward pass wrote to a cache that evicts, but did not announce itself, so no eviction round could "
                "be held before it. Call the model itself, not one of its parts, inside "
                "`with mlx_tq.compressed(model):`."
            )
        packed = self._packed(before)
        full = self._extend(keys, values)
        self.regions = self.regions.grown_to(after)
        if self.spec.normalize:
            self._normalizer = self._normalizer.before_pass(full[0], before, after, self.spec.key_options.pairs)
        listeners = self._listeners(before, after)
        target = self._packed(after)
        if target > packed:
            self._pack(full, packed, target)
        if keys.shape[2] > SHORT_PASS:
            view = self._long_view(full, packed, after)
            self._retain(full, packed, target)
        else:
            view = self._short_view(full, before, packed, target)
        pending = tuple(self.arrays()) if target > packed else ()
        view = replace(view, pending=pending, listeners=listeners)
        if self.spec.shared:
            self._last_view = view
        return view

    def _long_view(self, full: Pair, packed: int, length: int) -> StepView:
        """Return the view of a long pass, before which the tokens before `packed` were packed."""
        return self._view(full, packed, length, packed)

    def _short_view(self, full: Pair, before: int, packed: int, target: int) -> StepView:
        """Return the view of a short pass, in the middle of which a block may be packed."""
        first, earlier = self._packed(before + 1), None
        if target > first:
            length = target + self.spec.window  # at which the last block is packed
            earlier = (length - 1 - before, self._view(full, packed, length - 1, first))
        full = self._retain(full, packed, target)
        return replace(self._view(full, target, self.offset, target), earlier=earlier)

    def _listeners(self, start: int, stop: int) -> tuple[QueryListener, ...]:
        listeners: tuple[QueryListener, ...] = ()
        if self._is_learning and start < SCALE_TOKENS:
            listeners = (QueryListener(partial(self._learn_from, start, stop)),)
        if self.on_queries is not None:
            listeners = (*listeners, QueryListener(self.on_queries))
        return listeners if self.group is None else (*listeners, *self.group.listeners(self.number, start, stop))

    @property
    def _is_learning(self) -> bool:
        """True until the key scale is known; nothing is packed before."""
        return self.spec.normalize and self._normalizer.scale is None

    def _learn_from(self, start: int, stop: int, queries: mx.array, *_: Any) -> list[mx.array]:
        """Learn the key scale from queries [B, Hq, L, Dk] of positions [start, stop), and pack what waited for it."""
        if self._full is None or self.offset != stop or not self._is_learning:
            return []
        pairs = self.spec.key_options.pairs
        self._normalizer = self._normalizer.after_pass(self._full[0], queries, start, stop, pairs)
        self._pack_waiting(self._full)
        return self.arrays()

    def stop_learning(self) -> None:
        """Pack without the queries of stored tokens; if they were not seen, the key scale is 1."""
        if self._full is not None and self._is_learning:
            unit = self._normalizer.with_unit_scale(self._full[0])
            self._normalizer = unit.without_settled_queries(self.offset)
            self._pack_waiting(self._full)

    def _pack_waiting(self, full: Pair) -> None:
        sinks, target = self.spec.sinks, self._packed(self.offset)
        if not self._is_learning:
            if target > sinks:
                self._pack(full, sinks, target)
            self._retain(full, sinks, target)

    def _pack(self, full: Pair, packed: int, target: int) -> None:
        """Encode positions [packed, target) into the packed region."""
        if packed > self.spec.sinks:
            with suppress(ValueError):  # from mlx inside `mx.compile`, where nothing has been computed
                self.check_health()  # of earlier blocks, computed long ago: nothing waits
        else:
            self._fit(full)
        sinks, layout, normalization = self.spec.sinks, self._layout(full), None
        keys, values = (x[:, :, sinks : sinks + target - packed] for x in full)
        if self.spec.normalize:
            self._normalizer, normalization, clamped = self._normalizer.add_means(
                full[0][:, :, sinks:], packed, target, self._mean_map, layout.key.rotation
            )
            self._health = self._health + mx.stack([clamped, mx.array(0, mx.int32)])
        encoded = encode(keys, values, layout, normalization)
        self._health = self._health + encoded.health
        self._write_rows(mx.depends(encoded.rows, self._health), packed)
        self._mean_index = self._make_mean_index()

    def _write_rows(self, rows: mx.array, start: int) -> None:
        """Store rows [B, H, n, W] of positions from `start` on."""
        self._rows.write(rows, self._row(start))

    def _fit(self, full: Pair) -> None:
        """Let formats learn from the first tokens: the same ones, however many arrive at a time."""
        self._fitted = None
        layout, sinks = self._layout(full), self.spec.sinks
        keys, values = (x[:, :, : sinks + BLOCK] for x in full)
        if self.spec.normalize and layout.learned_bytes:
            if not self._normalizer.knows_queries:
                return
            keys = self._normalizer.first_keys(full[0])
        fitted = layout.fit(keys, values)
        self._fitted = None if fitted is layout else fitted

    # The packed region.

    @property
    def positions(self) -> np.ndarray | list[np.ndarray]:
        """Positions of the stored tokens, ascending, int64 [N]: of all heads, or of each if they differ."""
        return self.regions.positions

    @property
    def packed_tokens(self) -> int:
        """Number of tokens that attention reads packed."""
        return self._num_rows

    @property
    def packed_positions(self) -> np.ndarray:
        """Positions of the packed tokens that can be evicted, ascending, int64 [packed_tokens]."""
        start = min(self.spec.sinks, self.offset)
        return self.regions.positions[start : start + self.packed_tokens]

    @property
    def packed_nbytes(self) -> int:
        """Bytes of the packed tokens and of their key normalization, without spare capacity."""
        packed = self._packed(self.offset)
        arrays, normalization = [self._rows.between(0, self._row(packed))], self._normalization(packed)
        if normalization is not None:
            arrays += [normalization.scale, normalization.means, normalization.index]
        return sum(array.nbytes for array in arrays if array is not None)

    def packed_rows(self) -> tuple[mx.array, RowLayout, KeyNormalization | None]:
        """Return uint32 [B, H, capacity, W], of which the first `packed_tokens` rows are in use, and their layout."""
        rows = self._rows.first(self._num_rows)
        if rows is None or self._full is None:
            raise CacheFormatError("nothing of the cache is packed yet. Read more tokens first.")
        return rows, self._layout(self._full), self._normalization(self._packed(self.offset))

    def compact(self, indices: np.ndarray, positions: np.ndarray) -> mx.array:
        """Keep these packed rows, ascending indices [N], whose positions are given; return the new rows."""
        rows = compact(self.packed_rows()[0], mx.array(indices, mx.int32), row_capacity(max(1, len(indices))))
        return self.replace_packed(rows, positions)

    def replace_packed(
        self, rows: mx.array, positions: np.ndarray, means: Mapping[int, np.ndarray] | None = None
    ) -> mx.array:
        """Make these rows the packed region; return them.

        `rows` uint32 [B, H, capacity, W] begin with those of `positions`, ascending int64 [N]. `means` are those of
        reloaded blocks of MEAN_TOKENS positions, fp16 [H, D] by block number.
        """
        packed = self._packed(self.offset)
        before = self._mean_map.mean_blocks(packed)
        self.regions = self.regions.with_packed(positions, packed)
        self._normalizer = self._normalizer.with_blocks(before, self._mean_map.mean_blocks(packed), means or {})
        self._mean_index = self._make_mean_index()
        self._rows, self.block_keys = PackedRows(rows), ()
        self._last_view = None
        return rows

    def release_capacity(self) -> None:
        """Free capacity without tokens, and buffers of which few rows are in use; the next pass allocates again."""
        if self._full is not None:
            stop = self.regions.full_index(self.offset, self._packed(self.offset))
            keys, values = (mx.contiguous(x[:, :, :stop]) for x in self._full)
            self._full = keys, values
        self._rows.release_capacity(self._num_rows)

    def shareable_buffers(self) -> SharedBuffers:
        """Return the packed rows that copies of this cache share while nothing is evicted, in whole steps."""
        return self._rows.shareable(self._num_rows)

    # Rows for the archive. A subclass may restrict which packed rows can be evicted and reloaded.

    def searched(self, queries: mx.array) -> tuple[mx.array, Regions]:
        """Return those of queries [1, Hq, L, Dk] whose heads can evict, and all that these heads store."""
        view: Any = self.keys_and_values()[0].view
        return queries, view.merged_regions()

    @property
    def num_evictable(self) -> int:
        """Number of packed tokens that can be evicted and reloaded: the first ones."""
        return self.packed_tokens

    def evictable_rows(self) -> tuple[mx.array, RowLayout, KeyNormalization | None]:
        """Return what `packed_rows` returns, of the evictable tokens alone."""
        return self.packed_rows()

    def archived_normalization(self, means: np.ndarray, index: mx.array) -> KeyNormalization | None:
        """Return the normalization of archived rows from the means of their pieces, fp16 [n, H, D], and each row's."""
        normalization = self.evictable_rows()[2]
        if normalization is None:
            return None
        return KeyNormalization(normalization.scale, mx.array(means.swapaxes(0, 1))[None], index)

    def row_shape(self) -> LayerShape:
        """Return the shape of this layer's rows in a block."""
        rows, layout, _ = self.evictable_rows()
        key_words, value_words = layout.split_sizes
        return LayerShape(rows.shape[1], key_words, value_words, layout.key.head_dim if self.spec.normalize else 0)

    def split_into_blocks(self, index: np.ndarray) -> list[tuple[int, LayerRows]]:
        """Copy evictable rows by their ascending indices [N], a piece for each block, with the piece's first index.

        Waits for them.
        """
        rows, layout, normalization = self.evictable_rows()
        keys, values = (np.array(part[0]) for part in layout.split(mx.take(rows, mx.array(index), axis=2)))
        blocks = (self.packed_positions[index] - self.spec.sinks) // BLOCK
        starts = np.flatnonzero(np.diff(blocks, prepend=-1))
        means = [None] * len(starts)
        if normalization is not None:
            mean_index = np.array(normalization.mean_index(self.num_evictable))[index[starts]]
            means = list(np.array(normalization.means[0])[:, mean_index].swapaxes(0, 1))
        return [
            (int(start), LayerRows(keys[:, start:stop], values[:, start:stop], mean))
            for start, stop, mean in zip(starts, [*starts[1:], len(index)], means, strict=True)
        ]

    def reload(self, pieces: Sequence[tuple[np.ndarray, LayerRows]]) -> mx.array:
        """Put evicted rows back at their positions [n], pieces in any order; return the new rows."""
        (rows, layout, _), count = self.evictable_rows(), self.num_evictable
        keys, values = (
            mx.array(np.concatenate(side, axis=1))[None]
            for side in ([piece.keys for _, piece in pieces], [piece.values for _, piece in pieces])
        )
        positions = np.concatenate([self.packed_positions[:count], *(reloaded for reloaded, _ in pieces)])
        order = np.argsort(positions)
        together = mx.concatenate([rows[:, :, :count], layout.unsplit(keys, values)], axis=2)
        ordered = join_tokens([mx.take(together, mx.array(order), axis=2)], row_capacity(len(order)))
        numbers = [(int(reloaded[0]) - self.spec.sinks) // MEAN_TOKENS for reloaded, _ in pieces]
        means = {n: piece.mean for n, (_, piece) in zip(numbers, pieces, strict=True) if piece.mean is not None}
        return self._replace_evictable(ordered, positions[order], means)

    def _replace_evictable(self, rows: mx.array, positions: np.ndarray, means: Mapping[int, np.ndarray]) -> mx.array:
        return self.replace_packed(rows, positions, means)

    # Health.

    @property
    def clamped(self) -> int:
        """Number of vectors whose norm or components exceeded fp16 and were clamped to it. Waits for the arrays."""
        return int(self._health[0])

    def check_health(self) -> None:
        """Raise NonFiniteError if a packed vector was not finite. Waits for the arrays."""
        broken = int(self._health[1])
        if broken:
            raise NonFiniteError(
                f"{broken} key or value vectors before position {self.offset} are NaN or infinite; only finite values "
                "can be cached. Check the model's weights, or load it in bfloat16 or float32."
            )

    # Regions and buffers.

    def arrays(self) -> list[mx.array]:
        """Return all stored arrays; rows that caches share are the same array in each."""
        learned = (*(self._fitted.learned if self._fitted else ()), *self._normalizer.arrays.values())
        arrays = (*(self._full or ()), *(self._slack or ()), self._health, self._mean_index, *learned)
        return [*(array for array in arrays if array is not None), *self._rows.arrays]

    def _packed(self, length: int) -> int:
        """Return the position before which tokens are packed at a length."""
        return self.regions.originals if self._is_learning else self.regions.packed_until(length)

    @property
    def _mean_map(self) -> RegionMap:
        """The positions whose blocks of keys have means."""
        return self.regions

    def _row(self, position: int) -> int:
        """Return the row of a packed position, or of the first position behind the packed region."""
        return self.regions.stored_before(position)

    @property
    def _num_rows(self) -> int:
        return self._row(self._packed(self.offset))

    def _layout(self, full: Pair) -> RowLayout:
        return self._fitted or self.spec.layout(full[0].shape[-1], full[1].shape[-1], full[0].dtype)

    def _normalization(self, packed: int) -> KeyNormalization | None:
        """Return the normalization of the packed rows when tokens before `packed` are packed."""
        if self._normalizer.means is None or packed == self.spec.sinks:
            return None
        return self._normalizer.normalization(-self._row(self.spec.sinks), self._mean_index)

    def _make_mean_index(self) -> mx.array | None:
        """Return which mean each packed row has, int32 [packed_tokens], if that does not follow from its index."""
        if not self.spec.normalize or not self.regions.evicted:
            return None
        blocks = self._mean_map.mean_blocks(self._packed(self.offset))
        return mx.array(np.searchsorted(blocks, (self.packed_positions - self.spec.sinks) // MEAN_TOKENS), mx.int32)

    def _extend(self, keys: mx.array, values: mx.array) -> Pair:
        """Return full-precision buffers with new tokens behind the last; longer ones than the cache's if needed."""
        full = self._full or self._lay_out((keys, values), (keys, values), self.regions.originals)
        return write_tokens(full, (keys, values), self.regions.full_index(self.offset, self._packed(self.offset)))

    def _view(self, full: Pair, window_start: int, length: int, packed: int) -> StepView:
        """Return what a token attends to at a length, when those before `packed` are packed.

        In the buffers `full` the window begins at position `window_start`.
        """
        sinks = self.spec.sinks
        start, stop = (self.regions.full_index(position, window_start) for position in (packed, length))
        if start == sinks or length <= sinks:
            keys, values, full_tokens = full[0][:], full[1][:], stop
        else:
            keys, values = (mx.concatenate([x[:, :, :sinks], x[:, :, start:stop]], axis=2) for x in full)
            full_tokens = sinks + stop - start
        count, layout, normalization = self._row(packed), self._layout(full), self._normalization(packed)
        rows, shared = self._rows.unshared, self._rows.shared(count)
        return StepView(Regions(rows, count, layout, keys, values, sinks, full_tokens, normalization, shared))

    def _retain(self, full: Pair, window_start: int, packed: int) -> Pair:
        """Keep what is behind `packed` in full precision, and one block before it as slack; return the buffers."""
        if packed == window_start and full is self._full:
            return full
        before = self.regions.originals
        after = max(before, self.spec.originals_from(packed))
        start = window_start if after >= window_start else before
        originals = self._originals(full, start, window_start, self.offset)
        self.regions = replace(self.regions, originals=after)
        return self._lay_out(full, originals, start)

    def _originals(self, full: Pair, start: int, window_start: int, length: int) -> Pair:
        """Return tokens [start, length) in full precision; those before `window_start` are in the slack."""
        sinks = self.spec.sinks
        stop = max(sinks, self.regions.full_index(length, window_start))
        keys, values = (x[:, :, sinks:stop] for x in full)
        if self._slack is None or start == window_start:
            return keys, values
        slack_keys, slack_values = (x[:, :, : window_start - start] for x in self._slack)
        return mx.concatenate([slack_keys, keys], axis=2), mx.concatenate([slack_values, values], axis=2)

    def _lay_out(self, full: Pair, originals: Pair, start: int) -> Pair:
        """Build the buffers from the sinks of `full` and the originals of [start, offset): slack and window."""
        length = max(self.offset - start, 0)
        packed = min(max(self._packed(self.offset) - start, 0), length)
        first = min(max(self.regions.originals - start, 0), packed)
        sinks, capacity = self.spec.sinks, self.spec.full_capacity(self._packed(self.offset), self.offset)
        keys, values = (
            join_tokens([x[:, :, : min(sinks, self.offset)], y[:, :, packed:length]], capacity)
            for x, y in zip(full, originals, strict=True)
        )
        slack_keys, slack_values = (join_tokens([x[:, :, first:packed]], 0) for x in originals)
        self._full, self._slack = (keys, values), (slack_keys, slack_values)
        return self._full


def _drop_none(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def cache_parts(caches: Sequence[Any]) -> list[Any]:
    """Return the caches of a prompt cache, with those inside a CacheList one by one."""
    return [part for cache in caches for part in (cache.caches if isinstance(cache, CacheList) else [cache])]


def can_trim(caches: Sequence[Any]) -> bool:
    """Return whether caches can be cut to any length; chunked ones cannot once they dropped their first rows."""
    return all(part.is_trimmable() and not getattr(part, "start_position", 0) for part in cache_parts(caches))
