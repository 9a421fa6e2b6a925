"""`EvictingKVCache`: a compressed cache whose packed body loses its least useful tokens.

Positions are kept: `offset` is the logical position of the next token, which RoPE uses, `size()` counts what is stored.
All layers of a sequence lose the same tokens, in the first `make_mask` of a forward pass, before any layer saw a key.
"""

import json
from dataclasses import asdict, dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_tq.cache.compressed import STEP, CompressedKVCache
from mlx_tq.cache.coordinator import Callback, Coordinator, EvictionPlan, EvictionStats, join
from mlx_tq.cache.spec import CacheSpec
from mlx_tq.cache.view import Regions
from mlx_tq.config import Budget, EvictConfig
from mlx_tq.errors import CacheFormatError
from mlx_tq.evict import taps
from mlx_tq.evict.policy import PackedLayer
from mlx_tq.evict.queries import Calibrator
from mlx_tq.evict.selection import Span
from mlx_tq.kernels.compact import compact


@dataclass(frozen=True)
class _Step:
    """Sees the queries of one forward pass for a calibrator; `start` is the position of the first."""

    calibrator: Calibrator
    start: int
    stop: int

    @property
    def due(self) -> bool:
        return self.calibrator.due(self.stop)

    def observe(self, call: taps.Turned, row: int, count: int) -> list[mx.array]:
        return self.calibrator.observe(call.source[row : row + 1, :, :count], self.start, call.module)


class EvictingKVCache(CompressedKVCache):
    """One layer of a sequence that evicts.

    Attributes:
        number: of the layer among those that evict, from 0.
        coordinator: shared by the layers.
    """

    def __init__(
        self, spec: CacheSpec, number: int, coordinator: Coordinator, calibrator: Calibrator | None = None
    ) -> None:
        super().__init__(spec)
        self.number = number
        self._calibrator = calibrator
        self._evicted = 0  # tokens that left
        self._floor = 0  # positions before this have gaps: the end of the body at the last round
        self._before = np.zeros(0, np.int64)  # those that were kept, from the prefix to the floor
        self.coordinator = coordinator
        coordinator.add(self)

    # What mlx-lm calls.

    def begin(self, count: int) -> bool:
        """A forward pass of `count` tokens begins; the sequence evicts if it is time.

        Raises:
            ConfigError: the pass would exceed the model's positions.
        """
        return self.coordinator.begin(self, count)

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array | str | None:
        """The mask of the next N tokens over those stored; evicts first, if it is time."""
        taps.arm(on=self.begin(N))
        if not self._evicted or (window_size is None and not return_array):
            return super().make_mask(N, return_array, window_size)
        queries = np.arange(self.offset, self.offset + N)[:, None]
        keys = np.concatenate([self.positions, queries[:, 0]])
        visible = keys <= queries
        return mx.array(visible if window_size is None else visible & (keys > queries - window_size))

    def append(self, keys: mx.array, values: mx.array) -> Regions:
        """As `CompressedKVCache.append`; attention on the result also calibrates."""
        start = self.offset
        view = super().append(keys, values)
        if self._calibrator is None or not self._calibrator.due(self.offset):
            return view
        view = replace(view, observer=_Step(self._calibrator, start, self.offset))
        if self.spec.shared:
            self._last = view
        return view

    def size(self) -> int:
        """Tokens stored."""
        return self.offset - self._evicted

    @property
    def positions(self) -> np.ndarray:  # type: ignore[override]
        """Logical positions of the stored tokens, ascending, int64 [size()]."""
        prefix = min(self.spec.prefix, self.offset)
        rest = np.arange(max(self._floor, prefix), self.offset)
        return np.concatenate([np.arange(prefix), self._before, rest])

    def trim(self, n: int) -> int:
        """Drop the last n tokens; returns how many were dropped.

        Raises:
            CacheFormatError: that would lead back past an eviction, to tokens that are gone.
        """
        if self._evicted and self.offset - n < self._floor:
            raise CacheFormatError(
                f"a trim of {n} tokens from {self.offset} leads back past an eviction: some positions before "
                f"{self._floor} are gone. Trim at most {self.offset - self._floor}, or read the text anew."
            )
        return super().trim(n)

    def __deepcopy__(self, memo: object) -> "EvictingKVCache":
        return self.fork()

    @property
    def state(self) -> tuple[Any, ...]:
        """As of `CompressedKVCache`, and what eviction adds."""
        about = {
            "number": self.number,
            "evicted": self._evicted,
            "floor": self._floor,
            "family": self.coordinator.family,
            "plan": asdict(self.coordinator.plan),
            "stats": asdict(self.coordinator.stats),
            "calibrates": self._calibrator is not None,
        }
        calibration = () if self._calibrator is None else self._calibrator.state
        return *super().state, mx.array(self._before, mx.int32), calibration, json.dumps(about)

    @state.setter
    def state(self, state: tuple[Any, ...]) -> None:
        *base, before, calibration, text = state
        CompressedKVCache.state.fset(self, tuple(base))  # type: ignore[attr-defined]
        about = json.loads(text)
        plan = about["plan"]
        plan |= {"config": EvictConfig(**plan["config"]), "budget": Budget(*plan["budget"])}
        self.number, self._evicted, self._floor = about["number"], about["evicted"], about["floor"]
        self._before = np.array(before, np.int64).reshape(-1)
        self._calibrator = None
        if about["calibrates"]:
            self._calibrator = Calibrator(None, plan["config"])
            self._calibrator.restore(calibration)
        self.coordinator = join(self, EvictionPlan(**plan), about["family"], EvictionStats(**about["stats"]))

    # What the rest of mlx_tq calls.

    def subscribe(self, callback: Callback) -> None:
        """Call `callback` after each round of the sequence with the positions that left, ascending, int64 [N].

        Once for all layers. Copies and files do not take callbacks along. In a batch, subscribe at each of its `rows`.
        """
        self.coordinator.subscribe(callback)

    def hold(self, span: Span | None) -> None:
        """Keep the positions of `span` in all layers of the sequence, and do not count them, until told None."""
        self.coordinator.held = span

    @property
    def eviction(self) -> EvictionStats:
        """What was evicted from the sequence."""
        return self.coordinator.stats

    @property
    def calibrator(self) -> Calibrator | None:
        """What gathers the statistics of the layer's queries, where the policy needs them."""
        return self._calibrator

    @property
    def listens(self) -> bool:
        """Calibration goes on."""
        return self._calibrator is not None and self._calibrator.listens

    @property
    def ready(self) -> bool:
        """Nothing stands against a round."""
        return self._calibrator is None or self._calibrator.ready

    @property
    def body_positions(self) -> np.ndarray:
        """Logical positions of the packed tokens, ascending, int64 [body_tokens]."""
        start = min(self.spec.prefix, self.offset)
        return self.positions[start : start + self.body_tokens]

    def packed_layer(self) -> PackedLayer:
        """The body as policies see it.

        Raises:
            CacheFormatError: nothing is packed.
        """
        if self._rows is None or self._full is None:
            raise CacheFormatError("nothing of the cache is packed, so nothing can be evicted.")
        queries = None if self._calibrator is None else self._calibrator.stats
        rope = None if self._calibrator is None else self._calibrator.rope
        return PackedLayer(self._rows, self._layout(self._full), rope, queries)

    def compact(self, kept: np.ndarray, positions: np.ndarray) -> mx.array:
        """Keep these rows of the body, ascending indices, and their positions; returns the new rows."""
        if self._rows is None or self._full is None:
            raise CacheFormatError("nothing of the cache is packed, so nothing can be evicted.")
        packed = self._packed(self.offset)
        self._evicted += self.body_tokens - len(kept)
        self._rows = compact(self._rows, mx.array(kept, mx.int32), max(1, -(-len(kept) // STEP)) * STEP)
        self._before, self._floor = positions, packed
        # Originals of packed tokens would let a trim lead back to rows that are gone.
        self._kept = packed
        self._last = None
        return self._rows

    def fork(self) -> "EvictingKVCache":
        """A copy that shares no change with this one; the copies of a sequence's layers evict together."""
        twin = super().fork()
        twin.coordinator = join(twin, self.coordinator.plan, self.coordinator.family, self.coordinator.stats)
        twin.hold(self.coordinator.held)
        return twin

    def _blank(self) -> "EvictingKVCache":
        twin = EvictingKVCache.__new__(EvictingKVCache)
        CompressedKVCache.__init__(twin, self.spec)
        twin.number, twin._evicted, twin._floor, twin._before = self.number, self._evicted, self._floor, self._before
        twin._calibrator = None if self._calibrator is None else self._calibrator.copy()
        return twin

    def _row(self, position: int) -> int:
        return position - self.spec.prefix - self._evicted
