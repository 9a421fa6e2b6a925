"""`CompressedKVCache`: one layer's keys and values as `sinks | packed body | tail`.

A token enters in the model's type. Once it is older than the window, it moves to the body in a block of 32, encoded;
its original stays in the slack for one block more. So where a token is depends on the length alone, not on how the
tokens arrived, and a trim of up to 32 tokens leads back to exactly the cache that never saw them.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import _BaseCache
from mlx_lm.models.cache import create_attention_mask as make_causal_mask

from mlx_tq.cache.batch import BatchCompressedKVCache
from mlx_tq.cache.body import Body, Stored
from mlx_tq.cache.buffers import Pair, body_capacity, buffer, write_tokens
from mlx_tq.cache.gaps import NO_GAPS, Gaps
from mlx_tq.cache.handles import Handle, StepView, check_seam, handles
from mlx_tq.cache.links import SavedPart, SequencePart
from mlx_tq.cache.normalizer import KeyNormalizer
from mlx_tq.cache.spec import LEARNED, READY, SHORT_PASS, CacheSpec
from mlx_tq.codec.normalization import MEAN_TOKENS, KeyNormalization
from mlx_tq.codec.rows import RowLayout
from mlx_tq.config import BLOCK
from mlx_tq.errors import CacheFormatError, ConfigError, NonFiniteError
from mlx_tq.kernels.encode import compact, encode
from mlx_tq.kernels.regions import Regions

# Bytes of a cache's two counters.
HEALTH = 8


class CompressedKVCache(_BaseCache):  # type: ignore[misc]
    """A drop-in for mlx-lm's `KVCache`.

    Attributes:
        spec: formats and sizes.
        offset: tokens seen; the logical position of the next one, which RoPE uses.
        number: of the layer among those of its sequence, from 0.
        gaps: what has left.
        sequence: that the layer belongs to, where tokens may leave; None where all stay.
    """

    def __init__(self, spec: CacheSpec, number: int = 0, sequence: SequencePart | None = None) -> None:
        self.spec = spec
        self.offset = 0
        self.number = number
        self.sequence = sequence
        self.gaps = NO_GAPS
        # Positions [0, sinks) and [packed, offset) lie side by side in the model's type, in a pair of buffers
        # [B, H, full_capacity, Dk] and [B, H, full_capacity, Dv]. Those in [sinks, packed) lie in the body; the slack
        # [B, H, packed - kept, D] holds the originals of [kept, packed).
        self._kept = spec.sinks
        self._full: Pair | None = None
        self._slack: Pair | None = None
        self._body = Body()
        self._fitted: RowLayout | None = None  # the layout of the body, where a format learns from the first tokens
        self._known = KeyNormalizer()
        self._mean_of_row: mx.array | None = None  # int32 [body_tokens], where tokens have left
        self._health = mx.zeros(2, mx.int32)  # vectors clamped, vectors not finite
        self._last: StepView | None = None  # what the last step attended to, where later layers share it

    # What mlx-lm calls.

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Handle, Handle]:
        """Append keys [B, H, L, Dk] and values [B, H, L, Dv]; returns handles of all that these tokens attend to."""
        check_seam()
        return handles(self.append(keys, values), keys.dtype)

    def keys_and_values(self) -> tuple[Handle, Handle]:
        """Handles of what is stored; in a layer that later layers share, of what the last step attended to."""
        if self._full is None:
            raise CacheFormatError("the cache is empty; run the model on a prompt first.")
        packed = self._packed(self.offset)
        view = self._last or self._view(self._full, packed, self.offset, packed)
        return handles(view, self._full[0].dtype)

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array | str | None:
        """The mask of the next N tokens over those stored, as mlx-lm's own cache makes it."""
        if not self.gaps.evicted or (window_size is None and not return_array):
            return make_causal_mask(N, self.offset, return_array, window_size)  # type: ignore[no-any-return]
        queries = np.arange(self.offset, self.offset + N)[:, None]
        keys = np.concatenate([self.positions, queries[:, 0]])
        visible = keys <= queries
        return mx.array(visible if window_size is None else visible & (keys > queries - window_size))

    def size(self) -> int:
        """Tokens stored."""
        return self.offset - self.gaps.evicted

    def empty(self) -> bool:
        """Whether nothing has been stored yet."""
        return self._full is None

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays, unused capacity included."""
        return sum(array.nbytes for array in self.arrays())

    @property
    def positions(self) -> np.ndarray:
        """Logical positions of the stored tokens, ascending, int64 [size()]."""
        sinks = min(self.spec.sinks, self.offset)
        rest = np.arange(max(self.gaps.floor, sinks), self.offset)
        return np.concatenate([np.arange(sinks), self.gaps.kept, rest])

    def is_trimmable(self) -> bool:
        """The last tokens can be dropped."""
        return True

    def trim(self, n: int) -> int:
        """Drop the last n tokens; returns how many were dropped.

        Up to 32 tokens back from the longest length, this leads to exactly the cache that never saw them. Deeper,
        tokens that were packed stay packed. Past an eviction, what the window then needs comes back from the archive.

        Raises:
            ConfigError: n is no whole number from 0 on.
            CacheFormatError: that would lead back past an eviction, to tokens that are not in the archive.
        """
        if not isinstance(n, int) or n < 0:
            raise ConfigError(f"a trim of {n!r} tokens; it must be a whole number from 0 on.")
        n, sinks = min(self.offset, n), self.spec.sinks
        whole = self.sequence is None or self.sequence.rewind(self, self.offset - n)
        floor = self.gaps.floor
        if self.offset - n < floor and not whole:
            raise CacheFormatError(
                f"a trim of {n} tokens from {self.offset} leads back past an eviction: some positions before {floor} "
                f"are gone, and not in the archive. Trim at most {self.offset - floor}, or read the text anew."
            )
        self.gaps = self.gaps.before(self.offset - n, sinks)
        start, packed, length = self._kept, self._packed(self.offset), self.offset
        self.offset -= n
        self._last = None
        self._kept = max(sinks, min(start, self.offset))
        if self.spec.normalize:
            blocks = self.gaps.blocks(sinks, self._packed(self.offset))
            self._known = self._known.trimmed(self.offset, len(blocks))
        if self._full is not None and self._packed(self.offset) < packed:
            self._lay_out(self._full, self._originals(self._full, start, packed, length), start)
        return n

    @classmethod
    def merge(cls, caches: list["CompressedKVCache"]) -> Any:
        """A batch of copies of `caches`."""
        return BatchCompressedKVCache.merge(caches)

    def __deepcopy__(self, memo: object) -> "CompressedKVCache":
        return self.fork()

    @property
    def state(self) -> tuple[Any, ...]:
        """Arrays without their spare capacity, ints and a string, from which `from_state` makes an equal cache."""
        return self._state(self._body.between(0, self._row(self._packed(self.offset))))

    @state.setter
    def state(self, state: tuple[Any, ...]) -> None:
        keys, values, rows, self._health, *learned = state[:6]
        self._body = Body(rows)
        self.offset, self._kept, text, kept, part, *known = state[6:]  # files of before have no statistics
        about = json.loads(text)
        self.spec = CacheSpec.from_dict(about["spec"])
        self.number = about["number"]
        self.sequence = None if part is None else SavedPart(tuple(part))
        gone = None if kept is None else Gaps(about["evicted"], about["floor"], np.array(kept, np.int64).reshape(-1))
        self.gaps = gone or NO_GAPS
        self._known = KeyNormalizer(*(known[0] if known else ()))
        self._full = self._slack = self._fitted = self._last = None
        if keys is not None:
            full, sinks = (keys, values), self.spec.sinks
            self._lay_out(full, (keys[:, :, sinks:], values[:, :, sinks:]), self._kept)
            if any(part is not None for part in learned):
                self._fitted = self._layout(full).restore(*learned)
        self._mean_of_row = self._row_index()

    @property
    def state_in_place(self) -> tuple[Any, ...]:
        """The same, but for rows that lie in several buffers: these are a list, and nothing is copied to read it."""
        return self._state(self._body.in_place(self._row(self._packed(self.offset))))

    def _state(self, rows: Stored) -> tuple[Any, ...]:
        full: tuple[mx.array | None, ...] = (None, None)
        if self._full is not None:
            originals = self._originals(self._full, self._kept, self._packed(self.offset), self.offset)
            sinks = (x[:, :, : min(self.offset, self.spec.sinks)] for x in self._full)
            full = tuple(mx.concatenate([x, y], axis=2) for x, y in zip(sinks, originals, strict=True))
        learned = (None, None) if self._fitted is None else self._fitted.learned
        about = {
            "spec": self.spec.to_dict(),
            "number": self.number,
            "evicted": self.gaps.evicted,
            "floor": self.gaps.floor,
        }
        part = None if self.sequence is None else self.sequence.part_state(self.number)
        kept = mx.array(self.gaps.kept, mx.int32) if self.gaps.evicted else None  # `mx.compile` could not read it
        known = (self._known.queries, self._known.scale, self._known.means)
        return *full, rows, self._health, *learned, self.offset, self._kept, json.dumps(about), kept, part, known

    # What the rest of mlx_tq calls.

    @property
    def body_tokens(self) -> int:
        """Tokens that attention reads packed."""
        return self._row(self._packed(self.offset))

    @property
    def body_positions(self) -> np.ndarray:
        """Logical positions of the packed tokens, ascending, int64 [body_tokens]."""
        start = min(self.spec.sinks, self.offset)
        return self.positions[start : start + self.body_tokens]

    def body(self) -> tuple[mx.array, RowLayout, KeyNormalization | None]:
        """The packed rows uint32 [B, H, capacity, W], of which the first `body_tokens` count, and how they are made.

        Raises:
            CacheFormatError: nothing is packed.
        """
        rows = self._body.whole(self._row(self._packed(self.offset)))
        if rows is None or self._full is None:
            raise CacheFormatError("nothing of the cache is packed yet. Read more tokens first.")
        return rows, self._layout(self._full), self._normalization(self._packed(self.offset))

    def compact(self, kept: np.ndarray, positions: np.ndarray) -> mx.array:
        """Keep these rows of the body, ascending indices [N], and their positions [N]; returns the new rows.

        Raises:
            CacheFormatError: nothing is packed.
        """
        rows, capacity = self.body()[0], body_capacity(max(1, len(kept)))
        return self.replace_body(compact(rows, mx.array(kept, mx.int32), capacity), positions)

    def replace_body(
        self, rows: mx.array, positions: np.ndarray, means: Mapping[int, np.ndarray] | None = None
    ) -> mx.array:
        """Hold these rows as the body, of which all tokens have been seen; returns them.

        Args:
            rows: uint32 [B, H, capacity, W], the first of them those of `positions`.
            positions: ascending, int64 [N]: some of those in [sinks, end of the body).
            means: of blocks of MEAN_TOKENS positions that come back, fp16 [H, D] by their numbers.
        """
        packed, sinks = self._packed(self.offset), self.spec.sinks
        before, evicted = self.gaps.blocks(sinks, packed), packed - sinks - len(positions)
        self.gaps = Gaps(evicted, packed, positions) if evicted else NO_GAPS
        self._known = self._known.rearranged(before, self.gaps.blocks(sinks, packed), means or {})
        self._mean_of_row = self._row_index()
        self._body = Body(rows)
        # Originals of packed tokens would let a trim lead back to rows that are gone.
        self._kept = packed
        self._last = None
        return rows

    def settle(self) -> None:
        """Wait for no queries of what is stored: where attention has not asked with the first tokens, weights are 1."""
        if self._full is not None and self._learns:
            self._known = self._known.unweighted(self._full[0]).settled(self.offset)
            self._catch_up(self._full)

    @property
    def body_nbytes(self) -> int:
        """Bytes of the packed tokens and of what their keys were normalized by, without spare capacity."""
        packed = self._packed(self.offset)
        rows, known = self._body.between(0, self._row(packed)), self._normalization(packed)
        arrays = (rows,) if known is None else (rows, known.scale, known.means, known.index)
        return sum(array.nbytes for array in arrays if array is not None)

    @property
    def clamped(self) -> int:
        """Vectors whose norm or components exceeded fp16 and were clamped to it. Waits for the arrays."""
        return int(self._health[0])

    def check_health(self) -> None:
        """Raise if a packed vector was not finite. Waits for the arrays.

        Raises:
            NonFiniteError: the model produced NaN or infinite keys or values.
        """
        broken = int(self._health[1])
        if broken:
            raise NonFiniteError(
                f"{broken} key or value vectors before position {self.offset} are NaN or infinite; only finite values "
                "can be cached. Check the model's weights, or load it in bfloat16 or float32."
            )

    def fork(self) -> "CompressedKVCache":
        """A copy that shares no change with this one, but the rows of both; see `body`."""
        twin = type(self)(self.spec)
        twin.offset, twin._kept = self.offset, self._kept
        twin._full = None if self._full is None else (self._full[0][:], self._full[1][:])
        twin._slack, twin._fitted = self._slack, self._fitted  # never written to
        twin._body = self._body.fork()
        twin._health = self._health[:]
        twin.gaps, twin.number = self.gaps, self.number
        twin._known, twin._mean_of_row = self._known, self._mean_of_row
        twin.sequence = None if self.sequence is None else self.sequence.part(self.number)
        return twin

    def append(self, keys: mx.array, values: mx.array) -> StepView:
        """Store L tokens, pack those that leave the window, and return what the L attend to.

        Up to `SHORT_PASS` tokens see each what it would have seen had it come alone. More (a prefill) see one another,
        and what was not packed before them, in the model's type.
        """
        self._last = None
        before, after = self.offset, self.offset + keys.shape[2]
        if self.sequence is not None:
            self.sequence.admit(after)
        packed = self._packed(before)
        full = self._extend(keys, values)
        self.offset = after
        if self._learns and self._known.asked < min(before, LEARNED):
            self._known = self._known.unweighted(keys)  # nobody asked with tokens that were stored before
        if self._learns and after >= READY and before >= LEARNED:
            self._learn(full)
        listens, self._known = self._learns and before < LEARNED, self._known.settled(after)
        target = self._packed(after)
        if target > packed:
            self._pack(full, packed, target)
        if keys.shape[2] > SHORT_PASS:
            view = self._view(full, packed, after, packed)
            self._retain(full, packed, target)
        else:
            alone, earlier = self._packed(before + 1), None
            if target > alone:
                leaves = target + self.spec.window  # the length at which the last block is packed
                earlier = (leaves - 1 - before, self._view(full, packed, leaves - 1, alone))
            view = replace(self._view(self._retain(full, packed, target), target, after, target), earlier=earlier)
        if target > packed:
            view = replace(view, pending=tuple(self.arrays()))
        if listens:
            view = replace(view, told=partial(self._observe, before, after))
        if self.sequence is not None:
            observer, hear = self.sequence.observer(self.number, before, after), self.sequence.listener(self.number)
            view = replace(view, observer=observer, hear=hear)
        if self.spec.shared:
            self._last = view
        return view

    # Statistics of keys and queries.

    @property
    def _learns(self) -> bool:
        """Keys are to be normalized, and it is not yet known by what: until then nothing is packed."""
        return self.spec.normalize and self._known.scale is None

    def _observe(self, start: int, stop: int, queries: mx.array) -> list[mx.array]:
        """Take in queries [B, Hq, L, Dk] of the last pass, positions [start, stop); returns what follows from them.

        Where a long pass goes beyond READY, that is all that it packs.
        """
        if self._full is None or self.offset != stop or not self._learns:
            return []
        self._known = self._known.observe(queries, self._full[0].shape[1], start)
        if stop >= READY:
            self._learn(self._full)
            self._catch_up(self._full)
        return self.arrays()

    def _learn(self, full: Pair) -> None:
        """Find the weights of keys; all tokens are in the full buffers yet."""
        self._known = self._known.learn(full[0][:, :, :LEARNED], self.spec.key_options.pairs).settled(self.offset)

    def _catch_up(self, full: Pair) -> None:
        """Pack what waited for weights."""
        target = self._packed(self.offset)
        if target > self.spec.sinks:
            self._pack(full, self.spec.sinks, target)
        self._retain(full, self.spec.sinks, target)

    def _normalization(self, packed: int) -> KeyNormalization | None:
        """That of the body's rows when tokens before `packed` are packed."""
        if self._known.means is None or packed == self.spec.sinks:
            return None
        return self._known.normalization(-self._row(self.spec.sinks), self._mean_of_row)

    def _row_index(self) -> mx.array | None:
        """Which mean each row of the body has, int32 [body_tokens], where that does not follow from its number."""
        if not self.spec.normalize or not self.gaps.evicted:
            return None
        blocks = self.gaps.blocks(self.spec.sinks, self._packed(self.offset))
        return mx.array(np.searchsorted(blocks, (self.body_positions - self.spec.sinks) // MEAN_TOKENS), mx.int32)

    # Regions and buffers.

    def arrays(self) -> list[mx.array]:
        """All that is stored; rows that caches share are the same array in each."""
        learned = self._fitted.learned if self._fitted else ()
        arrays = (*(self._full or ()), *(self._slack or ()), *learned, self._health, self._mean_of_row)
        return [*(array for array in arrays if array is not None), *self._body.arrays, *self._known.arrays]

    def _packed(self, length: int) -> int:
        """The position before which tokens are in the body when `length` have been seen."""
        return self._kept if self._learns else max(self.spec.packed_until(length), self._kept)

    def _row(self, position: int) -> int:
        """The row of a packed position, or that of the first position behind the body."""
        return position - self.spec.sinks - self.gaps.evicted

    def _index(self, position: int, tail: int) -> int:
        """Where a position lies in the full buffers when position `tail` follows the sinks."""
        sinks = self.spec.sinks
        return position if position < sinks else sinks + position - tail

    def _layout(self, full: Pair) -> RowLayout:
        return self._fitted or self.spec.layout(full[0].shape[-1], full[1].shape[-1], full[0].dtype)

    def _extend(self, keys: mx.array, values: mx.array) -> Pair:
        """The full buffers with new tokens behind the last; longer than the cache's own where they do not fit."""
        full = self._full or self._lay_out((keys, values), (keys, values), self._kept)
        start = self._index(self.offset, self._packed(self.offset))
        return write_tokens(full, (keys, values), start)

    def _view(self, full: Pair, tail: int, length: int, packed: int) -> StepView:
        """What a token attends to when `length` have been seen and those before `packed` are in the body."""
        sinks = self.spec.sinks
        start, stop = self._index(packed, tail), self._index(length, tail)
        if start == sinks or length <= sinks:
            keys, values, beside = full[0][:], full[1][:], stop
        else:
            keys, values = (mx.concatenate([x[:, :, :sinks], x[:, :, start:stop]], axis=2) for x in full)
            beside = sinks + stop - start
        body, layout, known = self._row(packed), self._layout(full), self._normalization(packed)
        shared, own = self._body.shared(body), self._body.own
        return StepView(Regions(own, body, layout, keys, values, sinks, beside, known, shared))

    def _pack(self, full: Pair, packed: int, target: int) -> None:
        """Encode positions [packed, target) into the body."""
        if packed > self.spec.sinks:
            with suppress(ValueError):  # from mlx inside of `mx.compile`, where nothing has been computed
                self.check_health()  # of earlier blocks, long computed: nothing waits
        else:
            self._fit(full)
        sinks, normalization = self.spec.sinks, None
        keys, values = (x[:, :, sinks : sinks + target - packed] for x in full)
        if self.spec.normalize:
            rotation = self._layout(full).key.rotation
            self._known, normalization, clamped = self._known.extended(
                full[0][:, :, sinks:], packed, target, self.spec, self.gaps, rotation
            )
            self._health = self._health + mx.stack([clamped, mx.array(0, mx.int32)])
        encoded = encode(keys, values, self._layout(full), normalization)
        self._health = self._health + encoded.health
        self._body.write(mx.depends(encoded.rows, self._health), self._row(packed))
        self._mean_of_row = self._row_index()

    def _fit(self, full: Pair) -> None:
        """Let formats learn from sinks and first block: the same tokens, however many arrive at a time."""
        self._fitted = None
        layout, sinks = self._layout(full), self.spec.sinks
        keys, values = (x[:, :, : sinks + BLOCK] for x in full)
        if self.spec.normalize and layout.learned_bytes:
            keys = self._known.centered(keys, full[0][:, :, sinks : sinks + self.spec.mean_tokens])
        fitted = layout.fit(keys, values)
        self._fitted = None if fitted is layout else fitted

    def _retain(self, full: Pair, tail: int, packed: int) -> Pair:
        """Keep what is behind `packed`, and one block before it as slack; returns the buffers."""
        if packed == tail and full is self._full:
            return full
        kept = max(self._kept, self.spec.originals_from(packed))
        start = tail if kept >= tail else self._kept
        originals = self._originals(full, start, tail, self.offset)
        self._kept = kept
        return self._lay_out(full, originals, start)

    def _originals(self, full: Pair, start: int, tail: int, length: int) -> Pair:
        """Tokens [start, length) in the model's type, where those before position `tail` are in the slack."""
        sinks = self.spec.sinks
        keys, values = (x[:, :, sinks : max(sinks, self._index(length, tail))] for x in full)
        if self._slack is None or start == tail:
            return keys, values
        slack_keys, slack_values = (x[:, :, : tail - start] for x in self._slack)
        return mx.concatenate([slack_keys, keys], axis=2), mx.concatenate([slack_values, values], axis=2)

    def _lay_out(self, full: Pair, originals: Pair, start: int) -> Pair:
        """Make the buffers anew: the sinks of `full`; from the originals of [start, offset) the slack and the tail."""
        length = max(self.offset - start, 0)
        packed = min(max(self._packed(self.offset) - start, 0), length)
        kept = min(max(self._kept - start, 0), packed)
        sinks, capacity = self.spec.sinks, self.spec.full_capacity(self._packed(self.offset), self.offset)
        keys, values = (
            buffer([x[:, :, : min(sinks, self.offset)], y[:, :, packed:length]], capacity)
            for x, y in zip(full, originals, strict=True)
        )
        slack_keys, slack_values = (buffer([x[:, :, kept:packed]], 0) for x in originals)
        self._full, self._slack = (keys, values), (slack_keys, slack_values)
        return self._full
