"""`CompressedKVCache`: one layer's keys and values as `prefix | packed body | tail`.

A token enters in the model's type. Once it is older than the window, it moves to the body in a block of 32, encoded;
its original stays in the slack for one block more. So where a token is depends on the length alone, not on how the
tokens arrived, and a trim of up to 32 tokens leads back to exactly the cache that never saw them.
"""

import json
from contextlib import suppress
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import _BaseCache
from mlx_lm.models.cache import create_attention_mask as make_causal_mask

from mlx_tq.cache.spec import CacheSpec
from mlx_tq.cache.view import Handle, Regions, check_seam, handles
from mlx_tq.codec.rows import RowLayout
from mlx_tq.config import BLOCK
from mlx_tq.errors import CacheFormatError, ConfigError, NonFiniteError
from mlx_tq.kernels import phases
from mlx_tq.kernels.encode import encode

# Rows by which the body's buffer grows.
STEP = 256
# Bytes of a cache's two counters.
HEALTH = 8

Pair = tuple[mx.array, mx.array]


class CompressedKVCache(_BaseCache):  # type: ignore[misc]
    """A drop-in for mlx-lm's `KVCache`.

    Attributes:
        spec: formats and sizes.
        offset: tokens seen; the logical position of the next one.
    """

    def __init__(self, spec: CacheSpec) -> None:
        self.spec = spec
        self.offset = 0
        # Positions [0, prefix) and [packed, offset) lie side by side in the model's type, in a pair of buffers
        # [B, H, full_capacity, Dk] and [B, H, full_capacity, Dv]. Those in [prefix, packed) lie in the body; the slack
        # [B, H, BLOCK, D] holds the originals of [kept, packed).
        self._kept = spec.prefix
        self._full: Pair | None = None
        self._slack: Pair | None = None
        self._rows: mx.array | None = None  # uint32 [B, H, capacity, W]
        self._fitted: RowLayout | None = None  # the layout of the body, where a format learns from the first tokens
        self._health = mx.zeros(2, mx.int32)  # vectors clamped, vectors not finite
        self._last: Regions | None = None  # what the last step attended to, where later layers share it

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
        """The mask of the next N tokens, as mlx-lm's own cache makes it."""
        return make_causal_mask(N, self.offset, return_array, window_size)  # type: ignore[no-any-return]

    def begin(self, count: int) -> bool:
        """A forward pass of `count` tokens begins; returns whether the cache has to see its queries."""
        return False

    def size(self) -> int:
        """Tokens stored."""
        return self.offset

    def empty(self) -> bool:
        """Nothing has been stored."""
        return self._full is None

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays, unused capacity included."""
        return sum(array.nbytes for array in self._arrays())

    @property
    def positions(self) -> range:
        """Logical positions of the stored tokens."""
        return range(self.offset)

    def is_trimmable(self) -> bool:
        """Always."""
        return True

    def trim(self, n: int) -> int:
        """Drop the last n tokens; returns how many were dropped.

        Up to 32 tokens back from the longest length, this leads to exactly the cache that never saw them. Deeper,
        tokens that were packed stay packed.

        Raises:
            ConfigError: n is no whole number from 0 on.
        """
        if not isinstance(n, int) or n < 0:
            raise ConfigError(f"a trim of {n!r} tokens; it must be a whole number from 0 on.")
        n = min(self.offset, n)
        start, packed, length = self._kept, self._packed(self.offset), self.offset
        self.offset -= n
        self._last = None
        self._kept = max(self.spec.prefix, min(start, self.offset))
        if self._full is not None and self._packed(self.offset) < packed:
            self._lay_out(self._full, self._originals(self._full, start, packed, length), start)
        return n

    @classmethod
    def merge(cls, caches: list["CompressedKVCache"]) -> Any:
        """A batch of copies of `caches`."""
        from mlx_tq.cache.batch import BatchCompressedKVCache  # a batch is made of these

        return BatchCompressedKVCache.merge(caches)

    @property
    def state(self) -> tuple[Any, ...]:
        """Arrays without their spare capacity, ints and a string, from which `from_state` makes an equal cache."""
        full: tuple[mx.array | None, ...] = (None, None)
        if self._full is not None:
            originals = self._originals(self._full, self._kept, self._packed(self.offset), self.offset)
            prefix = (x[:, :, : min(self.offset, self.spec.prefix)] for x in self._full)
            full = tuple(mx.concatenate([x, y], axis=2) for x, y in zip(prefix, originals, strict=True))
        rows = self._body()
        learned = (None, None) if self._fitted is None else self._fitted.learned
        return *full, rows, self._health, *learned, self.offset, self._kept, json.dumps(self.spec.to_dict())

    @state.setter
    def state(self, state: tuple[Any, ...]) -> None:
        keys, values, self._rows, self._health, *learned, self.offset, self._kept, spec = state
        self.spec = CacheSpec.from_dict(json.loads(spec))
        self._full = self._slack = self._fitted = self._last = None
        if keys is not None:
            full, prefix = (keys, values), self.spec.prefix
            self._lay_out(full, (keys[:, :, prefix:], values[:, :, prefix:]), self._kept)
            if any(part is not None for part in learned):
                self._fitted = self._layout(full).restore(*learned)

    # What the rest of mlx_tq calls.

    @property
    def body_tokens(self) -> int:
        """Tokens that attention reads packed."""
        return self._row(self._packed(self.offset))

    @property
    def body_nbytes(self) -> int:
        """Bytes of the packed tokens, without spare capacity."""
        rows = self._body()
        return 0 if rows is None else rows.nbytes

    def _body(self) -> mx.array | None:
        """The body's rows without spare capacity."""
        return None if self._rows is None else self._rows[:, :, : self._row(self._packed(self.offset))]

    @property
    def clamped(self) -> int:
        """Vectors whose norm or components exceeded fp16 and were clamped to it. Waits for the arrays."""
        return self._counts()[0]

    def check_health(self) -> None:
        """Raise if a packed vector was not finite. Waits for the arrays.

        Raises:
            NonFiniteError: the model produced NaN or infinite keys or values.
        """
        broken = self._counts()[1]
        if broken:
            raise NonFiniteError(
                f"{broken} key or value vectors before position {self.offset} are NaN or infinite; only finite values "
                "can be cached. Check the model's weights, or load it in bfloat16 or float32."
            )

    def fork(self) -> "CompressedKVCache":
        """A copy that shares no change with this one; buffers are copied only when either is written to."""
        twin = self._blank()
        twin.offset, twin._kept = self.offset, self._kept
        twin._full = None if self._full is None else (self._full[0][:], self._full[1][:])
        twin._slack = self._slack  # never written to
        twin._rows = None if self._rows is None else self._rows[:]
        twin._fitted = self._fitted
        twin._health = self._health[:]
        return twin

    def append(self, keys: mx.array, values: mx.array) -> Regions:
        """Store L tokens, pack those that leave the window, and return what the L attend to.

        A few tokens see each what it would have seen had it come alone. Many (a prefill) see one another, and what was
        not packed before them, in the model's type.
        """
        self._last = None
        before, after = self.offset, self.offset + keys.shape[2]
        full = self._extend(keys, values)
        self.offset = after
        packed, target = self._packed(before), self._packed(after)
        if target > packed:
            self._pack(full, packed, target)
        if keys.shape[2] > phases.current().few:
            view = self._view(full, packed, after, packed)
            self._retain(full, packed, target)
        else:
            alone, earlier = self._packed(before + 1), None
            if target > alone:
                leaves = target + self.spec.window  # the length at which the last block is packed
                earlier = (leaves - 1 - before, self._view(full, packed, leaves - 1, alone))
            view = replace(self._view(self._retain(full, packed, target), target, after, target), earlier=earlier)
        if target > packed:
            view = replace(view, pending=tuple(self._arrays()))
        if self.spec.shared:
            self._last = view
        return view

    # Regions and buffers.

    def _blank(self) -> "CompressedKVCache":
        """An empty cache of the same kind."""
        return CompressedKVCache(self.spec)

    def _counts(self) -> list[int]:
        return [int(count) for count in np.array(self._health)]

    def _arrays(self) -> list[mx.array]:
        learned = self._fitted.learned if self._fitted else ()
        arrays = (*(self._full or ()), *(self._slack or ()), self._rows, *learned, self._health)
        return [array for array in arrays if array is not None]

    def _packed(self, length: int) -> int:
        """The position before which tokens are in the body when `length` have been seen."""
        return max(self.spec.packed_until(length), self._kept)

    def _row(self, position: int) -> int:
        """The row of a packed position, or that of the first position behind the body."""
        return position - self.spec.prefix

    def _index(self, position: int, tail: int) -> int:
        """Where a position lies in the full buffers when position `tail` follows the prefix."""
        prefix = self.spec.prefix
        return position if position < prefix else prefix + position - tail

    def _layout(self, full: Pair) -> RowLayout:
        return self._fitted or self.spec.layout(full[0].shape[-1], full[1].shape[-1], full[0].dtype)

    def _extend(self, keys: mx.array, values: mx.array) -> Pair:
        """The full buffers with new tokens behind the last; longer than the cache's own where they do not fit."""
        capacity = self.spec.full_capacity
        full = self._full or self._lay_out((keys, values), (keys, values), self._kept)
        start, count = self._index(self.offset, self._packed(self.offset)), keys.shape[2]
        if start + count > capacity:
            old_keys, old_values = (x[:, :, :start] for x in full)
            return mx.concatenate([old_keys, keys], axis=2), mx.concatenate([old_values, values], axis=2)
        for buffer, new in zip(full, (keys, values), strict=True):
            buffer[:, :, start : start + count] = new
        return full

    def _view(self, full: Pair, tail: int, length: int, packed: int) -> Regions:
        """What a token attends to when `length` have been seen and those before `packed` are in the body."""
        prefix = self.spec.prefix
        start, stop = self._index(packed, tail), self._index(length, tail)
        if start == prefix or length <= prefix:
            keys, values = (x[:, :, :stop] for x in full)
        else:
            keys, values = (mx.concatenate([x[:, :, :prefix], x[:, :, start:stop]], axis=2) for x in full)
        rows = None if self._rows is None else self._rows[:]  # what is written later does not reach the view
        return Regions(rows, self._row(packed), self._layout(full), keys, values, prefix)

    def _pack(self, full: Pair, packed: int, target: int) -> None:
        """Encode positions [packed, target) into the body."""
        if packed > self.spec.prefix:
            with suppress(ValueError):  # from mlx inside of `mx.compile`, where nothing has been computed
                self.check_health()  # of earlier blocks, long computed: nothing waits
        else:
            self._fit(full)
        prefix = self.spec.prefix
        keys, values = (x[:, :, prefix : prefix + target - packed] for x in full)
        encoded = encode(keys, values, self._layout(full))
        self._health = self._health + encoded.health
        rows = mx.depends(encoded.rows, self._health)
        start, stop = self._row(packed), self._row(target)
        old = rows[:, :, :0] if self._rows is None else self._rows
        if self._rows is None or stop > old.shape[2]:
            self._rows = buffer([old], -(-stop // STEP) * STEP)
        self._rows[:, :, start:stop] = rows

    def _fit(self, full: Pair) -> None:
        """Let formats learn from prefix and first block: the same tokens, however many arrive at a time."""
        self._fitted = None
        layout = self._layout(full)
        fitted = layout.fit(*(x[:, :, : self.spec.prefix + BLOCK] for x in full))
        self._fitted = None if fitted is layout else fitted

    def _retain(self, full: Pair, tail: int, packed: int) -> Pair:
        """Keep what is behind `packed`, and one block before it as slack; returns the buffers."""
        if packed == tail and full is self._full:
            return full
        start = tail if packed - tail >= BLOCK else self._kept
        originals = self._originals(full, start, tail, self.offset)
        self._kept = max(start, packed - BLOCK)
        return self._lay_out(full, originals, start)

    def _originals(self, full: Pair, start: int, tail: int, length: int) -> Pair:
        """Tokens [start, length) in the model's type, where those before position `tail` are in the slack."""
        prefix = self.spec.prefix
        keys, values = (x[:, :, prefix : max(prefix, self._index(length, tail))] for x in full)
        if self._slack is None or start == tail:
            return keys, values
        slack_keys, slack_values = (x[:, :, : tail - start] for x in self._slack)
        return mx.concatenate([slack_keys, keys], axis=2), mx.concatenate([slack_values, values], axis=2)

    def _lay_out(self, full: Pair, originals: Pair, start: int) -> Pair:
        """Make the buffers anew: the prefix of `full`; from the originals of [start, offset) the slack and the tail."""
        length = max(self.offset - start, 0)
        packed = min(max(self._packed(self.offset) - start, 0), length)
        kept = min(max(self._kept - start, 0), packed)
        prefix, capacity = self.spec.prefix, self.spec.full_capacity
        keys, values = (
            buffer([x[:, :, : min(prefix, self.offset)], y[:, :, packed:length]], capacity)
            for x, y in zip(full, originals, strict=True)
        )
        slack_keys, slack_values = (buffer([x[:, :, kept:packed]], BLOCK) for x in originals)
        self._full, self._slack = (keys, values), (slack_keys, slack_values)
        return self._full


def buffer(parts: list[mx.array], capacity: int) -> mx.array:
    """Parts [B, H, n, D] side by side in a buffer of `capacity` tokens."""
    shape = parts[0].shape
    rest = capacity - sum(part.shape[2] for part in parts)
    return mx.concatenate([*parts, mx.zeros((*shape[:2], rest, shape[3]), parts[0].dtype)], axis=2)
