"""Collectives between the processes (ranks) that run one model together.

Each rank runs the same program on its own KV heads, so all ranks make the same calls in the same order. A rank decides
by what such a call returned, which is the same bits on every rank: mlx's ring and JACCL backends return one sum to all.
Each call waits for the slowest rank.
"""

import hashlib
import json
import threading
import time
import weakref
from collections.abc import Callable, MutableMapping
from contextlib import suppress
from typing import Any, TypeVar

import mlx.core as mx
import numpy as np

from mlx_tq.errors import MlxTqError, RankError

T = TypeVar("T")
Sampler = Callable[[mx.array], mx.array]
_POLL_S = 0.05  # between two polls of ranks that wait for the first
_NULL = b"[null, null]"  # the message of a broadcast None


class Ranks:
    """One process of those that run a model; if it is the only one, every method returns its argument at no cost.

    The first rank talks to the user, the rescue service and files. `calls` and `nbytes` count collectives and the
    bytes that this rank sent. Numeric collectives keep the shape of their arrays; `mean` and `max` return float64.
    """

    def __init__(self, group: mx.distributed.Group | None = None) -> None:
        self.group = group
        self.rank, self.size = (0, 1) if group is None else (group.rank(), group.size())
        self.calls = self.nbytes = 0
        self._samplers: MutableMapping[int, Sampler] = weakref.WeakValueDictionary()
        self._last_tokens: mx.array | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "Ranks":
        return self

    @property
    def is_alone(self) -> bool:
        return self.size == 1

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def mean(self, values: np.ndarray) -> np.ndarray:
        return values if self.is_alone else self._call(mx.distributed.all_sum, values) / self.size

    def max(self, values: np.ndarray) -> np.ndarray:
        return values if self.is_alone else self._call(mx.distributed.all_max, values)

    def min(self, number: int) -> int:
        return -int(self.max(np.array([-number]))[0])

    def largest_common(self, find_largest: Callable[[int], int], limit: int) -> int:
        """Return the largest number that all ranks have; `find_largest(limit)` is this rank's, and all have 0."""
        number = find_largest(limit)
        while not self.is_alone:
            highest, negative_lowest = self.max(np.array([number, -number]))
            if highest == -negative_lowest:
                break
            number = find_largest(-int(negative_lowest))
        return number

    def any(self, flags: list[bool]) -> list[bool]:
        if self.is_alone or not flags:
            return flags
        counts = self._call(mx.distributed.all_max, np.array(flags, np.uint8), mx.uint8)
        return [bool(count) for count in counts]

    def gather(self, values: np.ndarray) -> np.ndarray:
        """Return the float32 values of all ranks, concatenated along the first axis in the order of ranks."""
        return values if self.is_alone else self._call(mx.distributed.all_gather, values, mx.float32)

    def gather_json(self, value: T) -> list[T]:
        """Return the JSON value of every rank, in the order of ranks."""
        if self.is_alone:
            return [value]
        data = json.dumps(value).encode()
        sizes = self._call(mx.distributed.all_gather, np.array([len(data)]), mx.uint32).tolist()
        padded = np.frombuffer(data.ljust(max(sizes)), np.uint8)
        rows = self._call(mx.distributed.all_gather, padded, mx.uint8).reshape(self.size, -1)
        return [json.loads(row.tobytes()) for row in rows]

    def check_equal(self, what: str, *arrays: np.ndarray) -> None:
        """Raise RankError on all ranks if one has other arrays than the rest; `what` names them in the message."""
        if self.is_alone:
            return
        hasher = hashlib.blake2b(digest_size=8)
        for array in arrays:
            hasher.update(f"{array.dtype} {array.shape}".encode())
            hasher.update(np.ascontiguousarray(array).tobytes())
        digest = np.frombuffer(hasher.digest(), np.uint64)
        digests = self._call(mx.distributed.all_gather, digest, mx.uint64).tolist()
        majority = max(digests, key=digests.count)
        if differing := [str(rank) for rank, digest in enumerate(digests) if digest != majority]:
            names = f"rank {differing[0]} differs" if len(differing) == 1 else f"ranks {', '.join(differing)} differ"
            raise RankError(
                f"the {self.size} ranks disagree on {what}: {names} from the others. All must run the same version of "
                "mlx_tq and of mlx, the same flags and the same model.",
                on_all_ranks=True,
            )

    def broadcast_tokens(self, tokens: mx.array) -> mx.array:
        """Return the first rank's tokens, lazily, so that the forward pass is not synchronized."""
        if self.is_alone:
            return tokens
        summand = tokens.astype(mx.uint32) if self.is_first else mx.zeros(tokens.shape, mx.uint32)
        if self._last_tokens is not None:  # two rows of a pass are sampled apart: all ranks need one order of calls
            (summand,) = mx.depends([summand], [self._last_tokens])
        self._count(summand.nbytes)
        self._last_tokens = mx.distributed.all_sum(summand, group=self.group)
        return self._last_tokens

    def share_sampler(self, sampler: Sampler) -> Sampler:
        """Return a sampler for mlx-lm that returns the first rank's samples; equal arguments give the same object."""
        if self.is_alone:
            return sampler
        shared = self._samplers.get(id(sampler))
        if shared is None:
            shared = self._samplers[id(sampler)] = lambda logprobs: self.broadcast_tokens(sampler(logprobs))
        return shared

    # Broadcasts of JSON: the first rank sends a size, then the bytes. Size 0 means "nothing yet", 1 means None.

    def broadcast(self, make: Callable[[], T]) -> T:
        """Return on all ranks the JSON value that `make`, called on the first, returns there; share its MlxTqErrors."""
        if self.is_alone:
            return make()
        if not self.is_first:
            value, error_message = json.loads(self._exchange(b"") or _NULL)
            if error_message is not None:
                raise RankError(error_message, on_all_ranks=True)
            return value  # type: ignore[no-any-return]
        try:
            value = make()
        except MlxTqError as error:
            self._exchange(json.dumps([None, str(error)]).encode())
            raise
        self._exchange(b" " if value is None else json.dumps([value, None]).encode())
        return value

    def run_on_first(self, make: Callable[[], T]) -> T | None:
        """Return what `make` returns on the first rank, and None on the others; its errors are raised on all ranks."""
        results: list[T] = []
        self.broadcast(lambda: results.append(make()))
        return results[0] if results else None

    def broadcast_when_ready(self, make: Callable[[], T]) -> T:
        """Broadcast as `broadcast` does, but let the other ranks sleep while a slow `make` runs."""
        if self.is_alone or not self.is_first:
            return self.broadcast(make)
        is_made = threading.Event()

        def send_nothing() -> None:
            try:
                with suppress(RuntimeError):  # a rank is gone, which ends this one too
                    while not is_made.wait(_POLL_S):
                        self._exchange_size(0)
            finally:
                mx.clear_streams()  # which a join does not wait for: an exiting program would crash

        thread = threading.Thread(target=send_nothing, name="ranks-wait", daemon=True)
        thread.start()

        def make_and_join() -> T:
            try:
                return make()
            finally:
                is_made.set()
                thread.join()

        return self.broadcast(make_and_join)

    def _exchange(self, data: bytes) -> bytes:
        """Return the first rank's data, or b"" if it is one byte, for which no second call is made."""
        while not (size := self._exchange_size(len(data))):
            time.sleep(_POLL_S)
        self._count(mx.uint32.size)
        if size == 1:
            return b""
        summand = np.frombuffer(data or bytes(size), np.uint8)
        return self._call(mx.distributed.all_sum, summand, mx.uint8).tobytes()

    def _exchange_size(self, size: int) -> int:
        with mx.stream(_generation_stream()):
            return int(np.array(mx.distributed.all_sum(mx.array([size], mx.uint32), group=self.group))[0])

    def synchronize(self) -> None:
        """Wait for a pass that mlx-lm started ahead: its sums must not mix with those of another thread."""
        if not self.is_alone:
            mx.synchronize(_generation_stream())

    def _call(
        self, collective: Callable[..., mx.array], values: np.ndarray, dtype: mx.Dtype = mx.float64
    ) -> np.ndarray:
        """Return the result of a collective in the stream of mlx-lm's passes, which orders it with their sums."""
        with mx.stream(_generation_stream()):
            array = mx.array(values, dtype)
            self._count(array.nbytes)
            return np.array(collective(array, group=self.group))

    def _count(self, nbytes: int) -> None:
        self.calls += 1
        self.nbytes += nbytes


def _generation_stream() -> Any:
    from mlx_lm.generate import generation_stream  # imports transformers, which takes a second

    return generation_stream


ALONE = Ranks()


def join() -> Ranks:
    """Return the ranks that `mlx.launch` started, once all are connected."""
    try:
        group = mx.distributed.init(strict=True)
    except RuntimeError as error:
        raise RankError(
            f"the other ranks cannot be reached: {error}. Check the hosts of mlx.launch, and that mlx_tq starts on "
            "each of them."
        ) from error
    return ALONE if group.size() == 1 else Ranks(group)
