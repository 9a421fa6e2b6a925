"""One sequence's evicting caches, which lose the same tokens at the same time: between two forward passes."""

import threading
import time
import uuid
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import mlx.core as mx
import numpy as np

from mlx_tq.cache.spec import CacheSpec
from mlx_tq.config import Budget, EvictConfig
from mlx_tq.errors import CacheFormatError, ConfigError
from mlx_tq.evict.policy import Body, PackedLayer, get_policy
from mlx_tq.evict.selection import Span, select

Callback = Callable[[np.ndarray], None]


class Member(Protocol):
    """The cache of one layer; see `evicting.EvictingKVCache`."""

    number: int
    offset: int
    spec: CacheSpec

    @property
    def listens(self) -> bool:
        """Calibration goes on."""
        ...

    @property
    def ready(self) -> bool:
        """Nothing stands against a round."""
        ...

    @property
    def body_positions(self) -> np.ndarray:
        """Of the packed tokens, ascending, int64 [S]."""
        ...

    def size(self) -> int:
        """Tokens stored."""
        ...

    def packed_layer(self) -> PackedLayer:
        """The body as policies see it."""
        ...

    def compact(self, kept: np.ndarray, positions: np.ndarray) -> mx.array:
        """Keep these rows of the body and their positions; returns the new rows."""
        ...


@dataclass(frozen=True)
class EvictionPlan:
    """What the caches of a model agree on.

    Attributes:
        config: as asked for.
        budget: in tokens or as a share of those seen; bytes have become tokens.
        layers: evicting caches of a sequence.
        positions: that the model allows, or None where it does not say.
        source: where the queries' statistics come from, for people.
    """

    config: EvictConfig
    budget: Budget
    layers: int
    positions: int | None = None
    source: str = ""

    def allowed(self, seen: int) -> int:
        """Tokens that may stay when `seen` have been seen."""
        return self.budget.tokens if self.budget.tokens is not None else int((self.budget.share or 1.0) * seen)

    def most(self, seen: int, window: int) -> int:
        """Tokens that are left at most between two forward passes when `seen` have been seen."""
        return min(seen, max(self.allowed(seen), window + 1) + self.config.trigger)


@dataclass(frozen=True)
class EvictionStats:
    """What was evicted from a sequence.

    Attributes:
        rounds: of eviction.
        tokens: that left.
        seconds: which scoring, selection and compaction took.
    """

    rounds: int = 0
    tokens: int = 0
    seconds: float = 0.0


class Coordinator:
    """Evicts from the caches of one sequence.

    Holds no cache alive: a cycle would keep the memory of dropped caches.

    Attributes:
        plan: what the caches agree on.
        stats: of the rounds so far.
        family: name by which the layers of one copy find each other.
        held: positions that stay whatever they are worth, and do not count; None for no such. Of a text that a question
            needs now: the round that makes room for it must not take it, or the rest of the cache, away.
    """

    def __init__(self, plan: EvictionPlan, family: str | None = None, stats: EvictionStats | None = None) -> None:
        self.plan = plan
        self.policy = get_policy(plan.config)
        self.stats = stats or EvictionStats()
        self.family = family or uuid.uuid4().hex
        self.held: Span | None = None
        self._members: dict[int, weakref.ref[Member]] = {}
        self._callbacks: list[Callback] = []

    def add(self, cache: Member) -> None:
        """Take in the cache of one layer."""
        self._members[cache.number] = weakref.ref(cache)

    def lacks(self, number: int) -> bool:
        """No cache of this layer has come yet."""
        return number not in self._members

    def fits(self, cache: Member) -> bool:
        """The caches that have come are as long as this one."""
        return all(member.offset == cache.offset for member in self.members())

    def members(self) -> list[Member]:
        """The caches that are alive, in the order of layers."""
        alive = [member for reference in self._members.values() if (member := reference()) is not None]
        return sorted(alive, key=lambda member: member.number)

    @property
    def complete(self) -> bool:
        """All layers have come."""
        return len(self._members) == self.plan.layers

    def subscribe(self, callback: Callback) -> None:
        """Call `callback` after each round with the positions that left, ascending, int64 [N]."""
        self._callbacks.append(callback)

    def begin(self, cache: Member, count: int) -> bool:
        """A forward pass of `count` tokens begins at `cache`, or another of its layers; evicts if it is time.

        Returns:
            Whether a layer has to see the queries of the pass.

        Raises:
            ConfigError: the pass would exceed the model's positions.
            CacheFormatError: caches of other layers are gone.
        """
        limit = self.plan.positions
        if limit is not None and cache.offset + count > limit:
            raise ConfigError(
                f"the conversation has {cache.offset:,} tokens and {count:,} more would exceed the model's {limit:,} "
                "positions; evicted tokens keep theirs. Start a new conversation, or take a model with more positions."
            )
        members = self.members()
        if any(member.offset != cache.offset for member in members):
            return any(member.listens for member in members)  # in the middle of a pass
        allowed = max(self.plan.allowed(cache.offset), cache.spec.window + 1)
        size = cache.size() - self._held_before(cache.offset - cache.spec.window)
        if size > allowed + self.plan.config.trigger and all(member.ready for member in members):
            if len(members) < self.plan.layers:
                raise CacheFormatError(
                    f"{len(members)} of the {self.plan.layers} caches of a sequence are left; all layers evict "
                    "together. Copy, keep and drop a prompt cache as a whole."
                )
            self._evict(members, size - allowed)
        return any(member.listens for member in members)

    def _held_before(self, stop: int) -> int:
        return 0 if self.held is None else max(0, min(self.held.stop, stop) - self.held.start)

    def _evict(self, members: list[Member], count: int) -> None:
        started = time.perf_counter()
        first, config = members[0], self.plan.config
        positions = first.body_positions
        if not len(positions):  # prefix and tail alone are above the budget
            return
        body = Body([member.packed_layer() for member in members], positions, first.offset, self.stats.rounds)
        worth = self.policy.score(body)
        if config.evict == "highest":
            worth = -worth
        if not self.policy.segmented:
            config = replace(config, mode="v1")
        span = Span(first.spec.prefix if config.mode == "v3" else 0, first.offset - first.spec.window)
        free = np.arange(len(positions))
        if self.held is not None:  # blocks leave whole, so they are held whole
            blocks, g = positions // config.granularity, config.granularity
            free = np.flatnonzero((blocks < self.held.start // g) | (blocks >= -(-self.held.stop // g)))
        gone = free[select(worth[free], positions[free], count, span, config)]
        if not len(gone):
            return
        kept = np.delete(np.arange(len(positions)), gone)
        left = positions[kept]  # one array for all layers
        mx.eval([member.compact(kept, left) for member in members])
        self.stats = EvictionStats(
            rounds=self.stats.rounds + 1,
            tokens=self.stats.tokens + len(gone),
            seconds=self.stats.seconds + time.perf_counter() - started,
        )
        for callback in self._callbacks:
            callback(positions[gone])


_lock = threading.Lock()
_open: dict[str, list["weakref.ref[Coordinator]"]] = {}


def join(cache: Member, plan: EvictionPlan, family: str, stats: EvictionStats) -> Coordinator:
    """The coordinator of a copy of a cache, shared with the copies of the sequence's other layers.

    mlx-lm copies and loads a prompt cache layer by layer. Copies of a `family` that are made in turn belong together:
    each joins the oldest coordinator that has yet no cache of its layer and whose caches are as long.
    """
    with _lock:
        waiting = [found for reference in _open.pop(family, []) if (found := reference()) and not found.complete]
        joined = next((c for c in waiting if c.lacks(cache.number) and c.fits(cache)), None)
        if joined is None:
            joined = Coordinator(plan, stats=stats)
            waiting.append(joined)
        joined.add(cache)
        still = [weakref.ref(coordinator) for coordinator in waiting if not coordinator.complete]
        if still:
            _open[family] = still
    return joined
