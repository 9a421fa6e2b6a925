"""`LayerGroup`: one conversation's compressed layers, which lose the same tokens at the same time, between two passes.

The door to the model's forward pass (`seam.forward`) hands it all layers before a pass, so it holds none of them. A
layer that is copied or saved by itself takes its part of the sequence along (`cache.links`); `sequence_of` puts parts
together again.
"""

import json
import time
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_tq.cache.blocks import Block, from_bytes
from mlx_tq.cache.departures import departing, leaving_tokens, returning, row_shape
from mlx_tq.cache.files import Blocks
from mlx_tq.cache.layer import CompressedKVCache
from mlx_tq.cache.links import Hear, Observer, SavedPart, went_around
from mlx_tq.config import BLOCK, Budget, EvictConfig
from mlx_tq.distributed.group import ALONE, Ranks
from mlx_tq.errors import CacheFormatError, ConfigError
from mlx_tq.files import cache_folder
from mlx_tq.policies.calibration import Calibrator, QueryStats
from mlx_tq.policies.policy import CalibratedPolicy, PackedLayer, PackedTokens
from mlx_tq.policies.rope import Rope
from mlx_tq.policies.selection import PositionRange, select
from mlx_tq.prompt_cache.archive import ArchiveFile, Extent
from mlx_tq.prompt_cache.eviction import EvictionPlan, EvictionStats
from mlx_tq.prompt_cache.recall import Listener, Look, Question, kept_by_all, look, positions_of

_TOGETHER = "All layers evict together: copy, keep and drop a prompt cache as a whole."


_NONE = np.zeros(0, np.int64)


@dataclass(frozen=True)
class _Watch:
    """Sees the queries of one pass for a calibrator; `start` and `stop` are the pass's positions."""

    calibrator: Calibrator
    start: int
    stop: int

    @property
    def due(self) -> bool:
        return self.calibrator.due(self.stop)

    def observe(self, queries: mx.array, rope: Any) -> list[mx.array]:
        return self.calibrator.observe(queries, self.start, rope)


class LayerGroup:
    """What all layers of an evicting sequence share.

    Attributes:
        plan: what the layers agree on.
        calibrators: of the layers by number, where the policy needs their queries.
        stats: of the rounds so far.
        ranks: that have parts of the model; all lose the same tokens.
        held: positions that stay whatever their scores, and do not count; None for no such. Of a text that a question
            needs now: the round that makes room for it must not take it, or the rest of the cache, away.
        archive: where rows go that leave, or None where they are gone for good.
        archived: the blocks in it, by their positions.
        recalled: positions that are back from it, ascending, int64 [N]; they are held like `held`.
    """

    def __init__(
        self,
        plan: EvictionPlan,
        calibrators: dict[int, Calibrator],
        stats: EvictionStats | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        self.plan = plan
        self.calibrators = calibrators
        self.stats = stats or EvictionStats()
        self.ranks = ranks
        self.held: PositionRange | None = None
        self.archive: ArchiveFile | None = None
        self.archived: tuple[Extent, ...] = ()
        self.recalled = _NONE
        self._recalls: dict[int, int] = {}  # how often the blocks of a file were recalled, by their number there
        self._listeners: dict[int, Listener] = {}
        self._asking = False  # a question is read over a copy, in which no round is held
        self._departed: list[np.ndarray] = []
        self._returning: list[Block] = []  # by trims since the last pass, to layers that were not trimmed yet
        self._admitted = 0  # the position up to which passes were announced

    # Before a pass.

    def before(self, layers: list[CompressedKVCache], count: int) -> bool:
        """A forward pass of `count` tokens begins; a round is held if it is time.

        Args:
            layers: all of the sequence, by number.
            count: tokens of the pass.

        Returns:
            Whether a layer has to see the queries of the pass.

        Raises:
            ConfigError: the pass would exceed the model's positions.
            CacheFormatError: layers are missing, or of different lengths.
        """
        first, limit = layers[0], self.plan.positions
        if limit is not None and first.offset + count > limit:
            raise ConfigError(
                f"the conversation has {first.offset:,} tokens and {count:,} more would exceed the model's {limit:,} "
                "positions; evicted tokens keep theirs. Start a new conversation, or take a model with more positions."
            )
        if len(layers) < self.plan.layers:
            raise CacheFormatError(
                f"{len(layers)} of the {self.plan.layers} caches of a sequence are left. {_TOGETHER}"
            )
        if any(layer.offset != first.offset for layer in layers):
            lengths = sorted({layer.offset for layer in layers})
            raise CacheFormatError(
                f"the layers of a sequence hold {lengths} tokens: a pass was interrupted. Trim all to the least."
            )
        self._returning = []
        self.make_room(layers, 0)
        self._admitted = first.offset + count
        return any(calibrator.is_gathering for calibrator in self.calibrators.values())

    def make_room(self, layers: list[CompressedKVCache], count: int) -> None:
        """Hold the round that would be due once `count` more tokens were read, if it is time.

        Before a question, of which there is at least a token, less than a window of statistics has to do: a round that
        waited for the rest would be held after it was asked, too late for what leaves then to come back.
        """
        first = layers[0]
        allowed = max(self.plan.allowed(first.offset + count), self._latest(layers) + 1)
        size = first.size() + count - self._held_before(first.offset - first.spec.window) - len(self.recalled)
        due = size > allowed + self.plan.config.policy.trigger and not self._asking
        if due and all(c.can_score if count else c.ready for c in self.calibrators.values()):
            self._evict(layers, size - allowed)

    def take_departed(self) -> np.ndarray:
        """Positions that left since this was last asked, ascending, int64 [N]. Files do not keep them."""
        departed, self._departed = self._departed, []
        return np.sort(np.concatenate([_NONE, *departed]))

    def _held_before(self, stop: int) -> int:
        return 0 if self.held is None else max(0, min(self.held.stop, stop) - self.held.start)

    def _evict(self, layers: list[CompressedKVCache], count: int) -> None:
        started = time.perf_counter()
        first, policy = layers[0], self.plan.config.policy
        positions = first.body_positions
        if not len(positions):  # sinks and tail alone are above the budget
            return
        body = PackedTokens([self._packed(layer) for layer in layers], positions, first.offset, self.stats.rounds)
        scores = self.ranks.mean(policy.score(body))
        eligible = PositionRange(first.spec.sinks, self._end(layers, positions))
        free = np.arange(len(positions))
        if self.held is not None:  # blocks leave whole, so they are held whole
            blocks, g = positions // policy.granularity, policy.granularity
            free = np.flatnonzero((blocks < self.held.start // g) | (blocks >= -(-self.held.stop // g)))
        free = free[~np.isin(positions[free], self.recalled)]
        gone = free[select(scores[free], positions[free], count, eligible, policy)]
        self.ranks.check_equal("which tokens leave", positions, gone)
        if not len(gone):
            return
        if self.plan.config.recalls:
            self._keep(layers, gone)
        _drop(layers, gone)
        self._departed.append(positions[gone])
        self.stats = EvictionStats(
            rounds=self.stats.rounds + 1,
            tokens=self.stats.tokens + len(gone),
            seconds=self.stats.seconds + time.perf_counter() - started,
        )

    def _latest(self, layers: list[CompressedKVCache]) -> int:
        """See `KVConfig.latest`."""
        recent = max(layer.spec.recent for layer in layers) if self.plan.config.recalls else 0
        return layers[0].spec.window + (recent + BLOCK if recent else 0)

    def _end(self, layers: list[CompressedKVCache], positions: np.ndarray) -> int:
        """The position before which tokens of the body may leave."""
        end = layers[0].offset - layers[0].spec.window
        count = min(map(leaving_tokens, layers))
        return min(end, int(positions[count])) if self.plan.config.recalls and count < len(positions) else end

    # What left, and comes back.

    def _keep(self, layers: list[CompressedKVCache], gone: np.ndarray) -> None:
        """Archive the rows of the body with these indices."""
        archive, positions = self._opened(layers), layers[0].body_positions[gone]
        parts = [departing(layer, gone) for layer in layers]
        found = []
        for i, (start, rows) in enumerate(parts[0]):
            at = positions[start : start + rows.keys.shape[1]]
            found.append(archive.put(Block(at, [part[i][1] for part in parts])))
        kept = kept_by_all((*self.archived, *found), self.ranks)
        self.archived = tuple(sorted(kept, key=lambda extent: int(extent.positions[0])))

    def agree(self) -> None:
        """Let go of the blocks that a rank lost since this was last asked; all ranks call it at the same time."""
        self.archived = tuple(kept_by_all(self.archived, self.ranks))

    def _opened(self, layers: list[CompressedKVCache]) -> ArchiveFile:
        """The archive, made where there is none yet."""
        if self.archive is None:
            shapes, limit = [row_shape(layer) for layer in layers], self.plan.config.archive_limit
            self.archive = ArchiveFile(shapes, cache_folder(), limit)
        return self.archive

    def listen(self, numbers: Iterable[int], *, rounds: bool) -> None:
        """Keep the queries of these layers in the passes that follow, for `look`; of none: no more.

        Args:
            numbers: of the layers.
            rounds: are held meanwhile; else they wait.
        """
        self._listeners = {number: Listener() for number in numbers}
        self._asking = not rounds

    def listener(self, number: int) -> Hear | None:
        """What hears the queries of layer `number` in its next pass, or None."""
        found = self._listeners.get(number)
        return None if found is None else found.in_pass()

    def look(self, layers: list[CompressedKVCache], count: int, most: int, *, back: bool = False) -> Look:
        """The archived blocks by what the last `count` tokens would make of them, and the best of them.

        Args:
            layers: all of the sequence, by number; they have read these tokens since `listen`.
            count: tokens of the question, all of them in the window.
            most: tokens of the best blocks and their neighbors.
            back: also those that are back, which count twice in the sum of all weights, for all blocks alike.
        """
        extents = [extent for extent in self.archived if back or extent.positions[0] not in self.recalled]
        if self.archive is None or not extents:
            return Look([], [])
        asked = {number: listener.asked(layers[number], count) for number, listener in self._listeners.items()}
        return look(Question(asked, layers[0].spec.sinks, self.archive, extents, most), self.ranks)

    def exchange(self, layers: list[CompressedKVCache], extents: list[Extent]) -> np.ndarray:
        """Have these blocks back and no others; returns the positions that came, ascending int64 [N].

        Args:
            layers: all of the sequence, by number.
            extents: blocks of the archive.
        """
        before = self.recalled
        wanted = np.concatenate([_NONE, *(extent.positions for extent in extents)])
        self._leave_again(layers, np.setdiff1d(before, wanted))
        coming = [extent for extent in extents if extent.positions[0] not in before]
        if coming:
            self.recall(layers, coming)
        return np.setdiff1d(self.recalled, before)

    def recall(self, layers: list[CompressedKVCache], extents: Iterable[Extent]) -> int:
        """Put blocks back at their positions; returns their tokens. A damaged one is left out, for good.

        One that left the archive is left out too; on all ranks what is missing on one.

        Args:
            layers: all of the sequence, by number.
            extents: blocks of the archive that are not back.
        """
        blocks = self._read(list(extents))
        if not blocks:
            return 0
        for number, layer in enumerate(layers):
            mx.eval(returning(layer, [(block.positions, block.layers[number]) for block in blocks]))
        back = np.concatenate([block.positions for block in blocks])
        self.recalled = np.union1d(self.recalled, back)
        self.ranks.check_equal("what comes back", self.recalled, layers[0].positions)
        return len(back)

    def _read(self, wanted: list[Extent]) -> list[Block]:
        """Of these blocks those that all ranks have undamaged; the others leave the archive."""
        assert self.archive is not None  # noqa: S101 - tells the type checker: there are extents
        found = [self.archive.undamaged(extent) for extent in wanted]
        self.archive.drop(extent for extent, block in zip(wanted, found, strict=True) if block is None)
        missing = self.ranks.any([block is None for block in found])
        gone = [extent for extent, is_missing in zip(wanted, missing, strict=True) if is_missing]
        self.archived = tuple(extent for extent in self.archived if extent not in gone)
        blocks = []
        for extent, block in zip(wanted, found, strict=True):
            if block is not None and extent not in gone:
                blocks.append(block)
                extent.recalls += 1
        return blocks

    def release(self, layers: list[CompressedKVCache]) -> None:
        """Let what was recalled leave again."""
        self._leave_again(layers, self.recalled)

    def _leave_again(self, layers: list[CompressedKVCache], leaving: np.ndarray) -> None:
        """Recalled positions leave again; blocks that made room for others meanwhile are archived once more."""
        if not len(leaving):
            return
        self.agree()
        positions, there = layers[0].body_positions, positions_of(self.archived)
        missing = np.setdiff1d(leaving, there)
        if len(missing):
            self._keep(layers, np.flatnonzero(np.isin(positions, missing)))
            for extent in self.archived:
                extent.recalls += int(extent.positions[0] in missing)
        _drop(layers, np.flatnonzero(np.isin(positions, leaving)))
        self.recalled = np.setdiff1d(self.recalled, leaving)

    def archived_blocks(self) -> Blocks:
        """What the archive holds, for a file."""
        if self.archive is None:
            return Blocks([], ())
        self.archive.settle()
        extents = [extent for extent in self.archived if not extent.lost]
        return Blocks([extent.size for extent in extents], map(self.archive.raw, extents))

    def take_archive(self, layers: list[CompressedKVCache], blocks: Iterable[bytes]) -> None:
        """Archive the blocks of a file; what is damaged or finds no place is lost, which the archive says.

        Args:
            layers: all of the sequence, by number.
            blocks: as `archived_blocks` gave them.
        """
        damaged, found = 0, []
        for number, data in enumerate(blocks):
            archive = self._opened(layers)
            try:
                block = from_bytes(data, archive.shapes)
            except CacheFormatError:
                damaged += 1
                continue
            archive.make_room()
            extent = archive.put(block)
            if extent is not None:
                extent.recalls = self._recalls.get(number, 0)
                found.append(extent)
        self.archived = tuple(extent for extent in found if not extent.lost)
        if self.archive is not None:
            self.archive.say_damaged(damaged)

    def _packed(self, layer: CompressedKVCache) -> PackedLayer:
        calibrator = self.calibrators.get(layer.number)
        rope, queries = (calibrator.rope, calibrator.current_stats) if calibrator else (None, None)
        return PackedLayer(*layer.body(), rope, queries)

    # What a layer knows of its sequence; see `cache.links.SequencePart`.

    def admit(self, stop: int) -> None:
        """Raise unless a forward pass up to position `stop` was announced by `before`.

        Raises:
            CacheFormatError: none was.
        """
        if stop > self._admitted:
            raise went_around()

    def rewind(self, layer: CompressedKVCache, length: int) -> bool:
        """A layer is about to be trimmed: what left, but its window then needs, comes back, for good.

        Rows behind the new end leave the archive; what left before the window stays in it. Layers are trimmed one after
        the other: what the first had read is kept for the others until the next pass, which has to be announced anew.

        Args:
            layer: of the sequence.
            length: tokens of it that will stay.

        Returns:
            Whether the layer has all that its window then needs; if not, nothing was changed.
        """
        self._admitted = 0
        since = layer.spec.needed_from(length)
        needed = layer.gaps.missing(since, length)
        if len(needed):
            missing = np.setdiff1d(needed, positions_of(self._returning))
            near = kept_by_all((extent for extent in self.archived if extent.positions[0] in missing), self.ranks)
            self._returning += self._read(near) if np.isin(missing, positions_of(near)).all() else []
            coming = [block for block in self._returning if block.positions[0] in needed]
            if not np.isin(needed, positions_of(coming)).all():
                return False
            mx.eval(returning(layer, [(block.positions, block.layers[layer.number]) for block in coming]))
        self.archived = self.archived[: bisect_left(self.archived, since, key=lambda extent: extent.positions[0])]
        self.recalled = self.recalled[self.recalled < since]
        self._departed = [positions[positions < since] for positions in self._departed]
        evicted = layer.gaps.before(length, layer.spec.sinks).evicted
        self.stats = replace(self.stats, tokens=evicted + len(self.recalled))
        return True

    def observer(self, number: int, start: int, stop: int) -> Observer | None:
        """What wants to see the queries of layer `number` at positions [start, stop), or None."""
        calibrator = self.calibrators.get(number)
        return _Watch(calibrator, start, stop) if calibrator and calibrator.due(stop) else None

    def part(self, number: int) -> "LayerGroup":
        """What a copy of layer `number` takes along."""
        own = self.calibrators.get(number)
        twin = LayerGroup(self.plan, {number: own.copy()} if own else {}, self.stats, self.ranks)
        twin.held, twin._departed, twin._admitted = self.held, list(self._departed), self._admitted
        twin.archive, twin.archived, twin.recalled = self.archive, self.archived, self.recalled
        return twin

    def part_state(self, number: int) -> tuple[Any, ...]:
        """The same as arrays and text."""
        own = self.calibrators.get(number)
        plan = asdict(self.plan) | {"config": self.plan.config.to_dict()}
        kept = [extent.recalls for extent in self.archived if not extent.lost]
        recalls = {place: count for place, count in enumerate(kept) if count}
        about = {"plan": plan, "stats": asdict(self.stats), "calibrates": own is not None, "recalls": recalls}
        about |= {"recalled": self.recalled.tolist()}
        return json.dumps(about), own.state if own else ()

    @classmethod
    def restored(cls, number: int, state: tuple[Any, ...]) -> "LayerGroup":
        """The part of layer `number` from its state."""
        text, *calibration = state
        about = json.loads(text)
        plan = about["plan"]
        plan |= {"config": EvictConfig.from_dict(plan["config"]), "budget": Budget(*plan["budget"])}
        calibrators = {}
        policy = plan["config"].policy
        if about["calibrates"] and isinstance(policy, CalibratedPolicy):
            calibrators[number] = policy.make_calibrator()
            calibrators[number].restore(calibration[0])
        made = cls(EvictionPlan(**plan), calibrators, EvictionStats(**about["stats"]))
        made._recalls = {int(place): count for place, count in about.get("recalls", {}).items()}
        made.recalled = np.array(about.get("recalled", []), np.int64)
        return made

    def learn(self, ropes: Iterable[Rope | None]) -> None:
        """Take the RoPE of each layer, which no file has."""
        for number, rope in enumerate(ropes):
            if number in self.calibrators:
                self.calibrators[number].rope = rope

    # Other plans for the same tokens.

    def replan(self, plan: EvictionPlan, queries: Iterable[QueryStats | None]) -> None:
        """Evict by another plan from now on, with the statistics of a file where there are any, one for each layer."""
        self.plan = plan
        for number, stats in enumerate(queries):
            if stats is not None and number in self.calibrators:
                self.calibrators[number].stats = stats


def _drop(layers: list[CompressedKVCache], gone: np.ndarray) -> None:
    """Take rows of the body, by ascending indices, out of every layer."""
    positions = layers[0].body_positions
    kept = np.delete(np.arange(len(positions)), gone)
    left = positions[kept]  # one array for all layers
    mx.eval([layer.compact(kept, left) for layer in layers])


def sequence_of(layers: list[CompressedKVCache]) -> LayerGroup | None:
    """The sequence that layers belong to, made of the parts that they carry where they were copied or loaded.

    Args:
        layers: compressed caches of one conversation, in any order.

    Raises:
        CacheFormatError: they belong to different ones.
    """
    evicting = [layer for layer in layers if layer.sequence is not None]
    if not evicting:
        return None
    found = evicting[0].sequence
    if isinstance(found, LayerGroup) and all(layer.sequence is found for layer in evicting):
        return found
    parts = {layer.number: _restored(layer) for layer in evicting}
    first = next(iter(parts.values()))
    shortest = min(layer.size() for layer in evicting)  # longer ones read a part of an interrupted pass
    if (
        len(parts) < len(evicting)
        or any((part.plan, part.stats.tokens) != (first.plan, first.stats.tokens) for part in parts.values())
        or len({layer.positions[:shortest].tobytes() for layer in evicting}) > 1
    ):
        raise CacheFormatError(f"the layers of a prompt cache belong to different sequences. {_TOGETHER}")
    for number, part in parts.items():
        if number in part.calibrators:
            first.calibrators[number] = part.calibrators[number]
    for layer in evicting:
        layer.sequence = first
    return first


def _restored(layer: CompressedKVCache) -> LayerGroup:
    part = layer.sequence
    if isinstance(part, SavedPart):
        return LayerGroup.restored(layer.number, part.state)
    assert isinstance(part, LayerGroup)  # noqa: S101 - tells the type checker: there is no third kind
    return part
