"""`Ranks`: what the processes that run one model add up, agree on and tell each other.

Each rank runs the same program on its own KV heads, so all ranks come to the same calls in the same order. What a rank
decides by is what it got from such a call, which is the same bits on every rank: mlx's ring and JACCL backends hand the
same sum to all. Each call waits for the slowest rank.
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
# Between two looks of ranks that wait for the first.
_NAP_S = 0.05
# What `tell` sends where there is nothing to tell.
_NOTHING = b"[null, null]"


class Ranks:
    """One process among the ranks; alone, every call returns what it was given and costs nothing.

    Attributes:
        rank: the number of this process, from 0.
        size: how many there are.
        calls, nbytes: collective calls so far, and bytes that this rank put into them.
    """

    def __init__(self, group: mx.distributed.Group | None = None) -> None:
        """Alone without a group."""
        self.group = group
        self.rank, self.size = (0, 1) if group is None else (group.rank(), group.size())
        self.calls = self.nbytes = 0
        self._samplers: MutableMapping[int, Sampler] = weakref.WeakValueDictionary()
        self._chosen: mx.array | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "Ranks":
        """A copy of a cache is on the same rank."""
        return self

    @property
    def is_alone(self) -> bool:
        """There is no other rank."""
        return self.size == 1

    @property
    def is_first(self) -> bool:
        """Whether it talks to the user, to the rescue service and to files, for all."""
        return self.rank == 0

    def mean(self, values: np.ndarray) -> np.ndarray:
        """The mean of all ranks' values, float64, of the same shape."""
        return values if self.is_alone else self._all(mx.distributed.all_sum, values) / self.size

    def most(self, values: np.ndarray) -> np.ndarray:
        """The largest of all ranks' values, float64, of the same shape."""
        return values if self.is_alone else self._all(mx.distributed.all_max, values)

    def least(self, number: int) -> int:
        """The least of all ranks' numbers."""
        return -int(self.most(np.array([-number]))[0])

    def common(self, find: Callable[[int], int], most: int) -> int:
        """The largest number that all ranks have.

        Args:
            find: the largest one up to a bound that this rank has; all have 0.
            most: the first bound.
        """
        own = find(most)
        while not self.is_alone:
            greatest, least = self.most(np.array([own, -own]))
            if greatest == -least:
                break
            own = find(-int(least))
        return own

    def any(self, flags: list[bool]) -> list[bool]:
        """Which flags are set on any rank."""
        if self.is_alone or not flags:
            return flags
        found: list[bool] = (self._all(mx.distributed.all_max, np.array(flags, np.uint8), mx.uint8) > 0).tolist()
        return found

    def stacked(self, values: np.ndarray) -> np.ndarray:
        """All ranks' float32 values one behind the other along the first axis, in the order of the ranks."""
        return values if self.is_alone else self._all(mx.distributed.all_gather, values, mx.float32)

    def first(self, chosen: mx.array) -> mx.array:
        """The tokens that the first rank chose; computed with the pass, which waits for nothing."""
        if self.is_alone:
            return chosen
        own = chosen.astype(mx.uint32) if self.is_first else mx.zeros(chosen.shape, mx.uint32)
        if self._chosen is not None:  # of two rows of a pass that are chosen apart, one comes first on all ranks
            (own,) = mx.depends([own], [self._chosen])
        self._count(own.nbytes)
        self._chosen = mx.distributed.all_sum(own, group=self.group)
        return self._chosen

    def choosing(self, sampler: Sampler) -> Sampler:
        """A sampler of mlx-lm's that samples what the first rank's does; the same one of the same, while it is used."""
        if self.is_alone:
            return sampler
        found = self._samplers.get(id(sampler))
        if found is None:
            found = self._samplers[id(sampler)] = lambda logprobs: self.first(sampler(logprobs))
        return found

    def check(self, what: str, *parts: np.ndarray) -> None:
        """See that all ranks have the same arrays.

        Args:
            what: they are, for people.
            parts: the arrays.

        Raises:
            RankError: a rank has others; on all ranks alike.
        """
        if self.is_alone:
            return
        digest = hashlib.blake2b(digest_size=8)
        for part in parts:
            digest.update(f"{part.dtype} {part.shape}".encode())
            digest.update(np.ascontiguousarray(part).tobytes())
        own = np.frombuffer(digest.digest(), np.uint64)
        each = self._all(mx.distributed.all_gather, own, mx.uint64).tolist()
        usual = max(each, key=each.count)
        if odd := [rank for rank, found in enumerate(each) if found != usual]:
            raise RankError(
                f"the {self.size} ranks disagree on {what}: {_named(odd)} not as the others. All must run the "
                "same version of mlx_tq and of mlx, the same flags and the same model.",
                everywhere=True,
            )

    def tell(self, make: Callable[[], T]) -> T:
        """What `make` returns on the first rank, as JSON has it, or raises there; on the others it is not called.

        Raises:
            MlxTqError: as `make`, on all ranks alike.
        """
        if self.is_alone:
            return make()
        if not self.is_first:
            value, failed = json.loads(self._sent(b"") or _NOTHING)
            if failed is not None:
                raise RankError(failed, everywhere=True)
            return value  # type: ignore[no-any-return]
        try:
            value = make()
        except MlxTqError as error:
            self._sent(json.dumps([None, str(error)]).encode())
            raise
        self._sent(b" " if value is None else json.dumps([value, None]).encode())
        return value

    def first_alone(self, make: Callable[[], T]) -> T | None:
        """What `make` returns on the first rank, or raises there and on all; None on the others, which do not call it.

        Raises:
            MlxTqError: as `make`, on all ranks alike.
        """
        made: list[T] = []
        self.tell(lambda: made.append(make()))
        return made[0] if made else None

    def wait_for(self, make: Callable[[], T]) -> T:
        """As `tell`, where `make` may take its time: the others sleep meanwhile, instead of asking the network."""
        if self.is_alone or not self.is_first:
            return self.tell(make)
        ended = threading.Event()
        ticking = threading.Thread(target=self._tick, args=[ended], name="ticking", daemon=True)
        ticking.start()
        try:
            value = make()
        finally:
            ended.set()
            ticking.join()
        return self.tell(lambda: value)

    def _tick(self, ended: threading.Event) -> None:
        """Tell the others, every so often, that there is nothing yet."""
        try:
            with suppress(RuntimeError):  # a rank is gone, which ends this one too
                while not ended.wait(_NAP_S):
                    self._size(0)
        finally:
            mx.clear_streams()  # a join returns before a thread's streams are gone, which a program's end cannot bear

    def collect(self, value: T) -> list[T]:
        """Every rank's value, as JSON has it, in the order of the ranks."""
        if self.is_alone:
            return [value]
        data = json.dumps(value).encode()
        sizes = self._all(mx.distributed.all_gather, np.array([len(data)]), mx.uint32).tolist()
        padded = np.frombuffer(data.ljust(max(sizes)), np.uint8)
        rows = self._all(mx.distributed.all_gather, padded, mx.uint8).reshape(self.size, -1)
        return [json.loads(row.tobytes()) for row in rows]

    def settle(self) -> None:
        """Wait for a pass that mlx-lm began ahead of need: its sums must not mix with those of another thread."""
        if not self.is_alone:
            mx.synchronize(_stream())

    def _sent(self, data: bytes) -> bytes:
        """The first rank's bytes."""
        while not (size := self._size(len(data))):
            time.sleep(_NAP_S)
        self._count(mx.uint32.size)
        if size == 1:  # of no JSON that `tell` sends: there is nothing to say, for which one call is enough
            return b""
        own = np.frombuffer(data or bytes(size), np.uint8)
        return self._all(mx.distributed.all_sum, own, mx.uint8).tobytes()

    def _size(self, own: int) -> int:
        """How many bytes the first rank is about to send; 0 for none yet."""
        with mx.stream(_stream()):
            return int(np.array(mx.distributed.all_sum(mx.array([own], mx.uint32), group=self.group))[0])

    def _all(self, collective: Callable[..., mx.array], values: np.ndarray, dtype: mx.Dtype = mx.float64) -> np.ndarray:
        """The result of a collective call, in the stream of mlx-lm's passes, so that these come before or after it."""
        with mx.stream(_stream()):
            own = mx.array(values, dtype)
            self._count(own.nbytes)
            return np.array(collective(own, group=self.group))

    def _count(self, nbytes: int) -> None:
        self.calls += 1
        self.nbytes += nbytes


def _stream() -> Any:
    from mlx_lm.generate import generation_stream  # transformers comes with it: a second

    return generation_stream


def _named(numbers: list[int]) -> str:
    return f"rank{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"


ALONE = Ranks()


def join() -> Ranks:
    """The ranks that `mlx.launch` started; waits until all are there.

    Raises:
        RankError: the others cannot be reached.
    """
    try:
        group = mx.distributed.init(strict=True)
    except RuntimeError as error:
        raise RankError(
            f"the other ranks cannot be reached: {error}. Check the hosts of mlx.launch, and that mlx_tq starts on "
            "each of them."
        ) from error
    return ALONE if group.size() == 1 else Ranks(group)
