"""`LayerGroup`: the layers of one sequence, which evict the same tokens at the same time, between two forward passes.

A round of eviction, on the positions of one layer (budget B tokens, trigger T):

    | sinks |  packed region: scored, and evicted from | window |
            |   [pinned]    [recalled]                 |
    `-------------------- size --------------------------------'

    counted = size - pinned - recalled       a round is due if  counted > max(B, protected + 1) + T
    num_evicted = counted - max(B, protected + 1)

Sinks and window are never evicted. Pinned positions (a quotation that a question needs) and recalled ones are exempt
for as long as they are needed, and do not count.

The group holds no layer: `begin_pass` gets the caches of a forward pass. mlx-lm copies, saves and batches layer by
layer, so a layer takes its part of the group along, and `layer_group_of` joins the parts before the next pass.
"""

import json
import time
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from mlx_tq.cache.batch import BatchCompressedKVCache
from mlx_tq.cache.blocks import Block, from_bytes
from mlx_tq.cache.layer import CompressedKVCache, cache_parts
from mlx_tq.cache.region_map import RegionSizes
from mlx_tq.cache.view import QueryListener
from mlx_tq.config import BLOCK, Budget, EvictConfig, KVConfig
from mlx_tq.distributed.group import ALONE, Ranks
from mlx_tq.errors import CacheFormatError, ConfigError
from mlx_tq.files import cache_folder
from mlx_tq.policies.calibration import Calibrator
from mlx_tq.policies.options import check_options
from mlx_tq.policies.policy import CalibratedPolicy, PackedLayer, PackedTokens
from mlx_tq.policies.rope import Rope
from mlx_tq.policies.selection import PositionRange, select
from mlx_tq.prompt_cache.archive import Archive, ArchivedBlock, default_limit
from mlx_tq.prompt_cache.recall import (
    PassageAt,
    QueryBuffer,
    Search,
    Selection,
    blocks_on_all_ranks,
    positions_of,
    single_position,
)

_TOGETHER = "All layers evict together: copy, keep and drop a prompt cache as a whole."
_NO_POSITIONS = np.zeros(0, np.int64)
_RECALL_SHARE, _MIN_RECALL = 10, 128  # recall "auto": a tenth of the budget, and at least 128 tokens


@dataclass(frozen=True)
class EvictionPlan:
    """The eviction of one sequence, which is the same in all of its layers."""

    config: EvictConfig
    budget: Budget  # in tokens or as a share of those seen; bytes have been converted to tokens
    layers: int  # that evict together
    positions: int | None = None  # that the model allows, if known
    source: str = ""  # where the queries' statistics come from, for people
    retrieval_heads: int = 0  # of all layers together

    @property
    def archive_limit(self) -> int:
        """Most bytes of the archive; by default the free disk decides."""
        limit = self.config.archive_limit
        return default_limit(cache_folder()) if limit is None else limit

    def allowed(self, seen: int) -> int:
        """Return the budget after `seen` tokens."""
        return self.budget.tokens if self.budget.tokens is not None else int((self.budget.share or 1.0) * seen)

    def max_recalled(self, seen: int) -> int:
        """Return how many archived tokens may be recalled for one question after `seen` tokens."""
        recall = self.config.recall
        if isinstance(recall, int):
            return recall
        return max(self.allowed(seen) // _RECALL_SHARE, _MIN_RECALL) if recall == "auto" else 0

    def max_live(self, seen: int, config: KVConfig) -> int:
        """Return the upper bound on the tokens stored before a forward pass, after `seen` tokens.

        A round evicts whole blocks of the policy, all of whose tokens are packed:

            | sinks, and the block that they end in | evictable blocks | a block in part | latest, and not yet packed |
        """
        size, recent = self.config.policy.granularity, config.num_protected - config.window
        sizes = RegionSizes(sinks=config.sinks, window=max(config.window, 1), normalize=config.normalize)
        end = sizes.packed_until(seen) - recent
        evictable = max(0, end // size * size - -(-config.sinks // size) * size)
        most = max(self.allowed(seen), sizes.window + recent + 1) + self.config.policy.trigger
        return min(seen, max(most, seen - evictable))


@dataclass(frozen=True)
class EvictionStats:
    """Counts of the evictions of a sequence."""

    rounds: int = 0
    tokens: int = 0
    seconds: float = 0.0  # that scoring, selection and compaction took


class LayerGroup:
    """The state that all layers of an evicting sequence share."""

    def __init__(
        self,
        plan: EvictionPlan,
        calibrators: dict[int, Calibrator],
        stats: EvictionStats | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        self.plan = plan
        self.calibrators = calibrators  # by layer number, if the policy needs the queries of layers
        self.stats = stats or EvictionStats()
        self.ranks = ranks  # processes that have parts of the model; all evict the same tokens
        self.pinned: PositionRange | None = None  # positions exempt from eviction and from the budget
        self.archive: Archive | None = None  # where evicted rows are; None if they are dropped
        self.archived: tuple[ArchivedBlock, ...] = ()  # its blocks, by their positions
        self.recalled = _NO_POSITIONS  # positions reloaded from it, ascending, int64 [N]; exempt like pinned ones
        self.evicted = _NO_POSITIONS  # all evicted positions, recalled ones included, likewise; replaced as a whole
        self._saved_recalls: dict[int, int] = {}  # how often the blocks of a file were recalled, by their number there
        self._buffers: dict[int, QueryBuffer] = {}  # of layers whose queries are captured
        self._is_paused = False  # no rounds while a question is run over a copy
        self._reloaded: list[Block] = []  # by trims since the last pass, for the layers that are not trimmed yet
        self.announced = 0  # position up to which passes were announced

    # Eviction rounds.

    def begin_pass(self, layers: list[CompressedKVCache], count: int) -> bool:
        """Begin a forward pass of `count` tokens with a round, if one is due.

        `layers` are all of the sequence, by number. Returns whether the pass has to capture queries before RoPE.
        """
        first, limit = layers[0], self.plan.positions
        if limit is not None and first.offset + count > limit:
            raise ConfigError(
                f"the conversation has {first.offset:,} tokens and {count:,} more would exceed the model's {limit:,} "
                "positions; evicted tokens keep theirs. Start a new conversation, or use a model with more positions."
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
        self._reloaded = []
        self.evict_if_due(layers, 0)
        self.announced = first.offset + count
        return any(calibrator.is_gathering for calibrator in self.calibrators.values())

    def evict_if_due(self, layers: list[CompressedKVCache], count: int) -> None:
        """Run the eviction round that `count` more tokens make due.

        Before a question (`count` > 0), incomplete query statistics have to do: a round that waited for more would
        run after the search of the archive, too late to recall what it evicts.
        """
        first = layers[0]
        protected, window_start = self._num_protected(layers), first.offset - first.spec.window
        allowed = max(self.plan.allowed(first.offset + count), protected + 1)
        pinned = self.pinned or PositionRange(0, 0)
        num_pinned = max(0, min(pinned.stop, window_start) - pinned.start)
        counted = first.regions.stored + count - num_pinned - len(self.recalled)
        is_due = counted > allowed + self.plan.config.policy.trigger and not self._is_paused
        if is_due and all(c.can_score if count else c.ready for c in self.calibrators.values()):
            self._evict(layers, counted - allowed)

    def _evict(self, layers: list[CompressedKVCache], count: int) -> None:
        started = time.perf_counter()
        first, policy, recalls = layers[0], self.plan.config.policy, self.plan.config.recalls
        positions = first.packed_positions
        if not len(positions):  # sinks and window alone exceed the budget
            return
        packed = [self._packed_layer(layer) for layer in layers]
        scores = self.ranks.mean(policy.score(PackedTokens(packed, positions, first.offset, self.stats.rounds)))
        candidates = self._candidates(positions)
        eligible = PositionRange(first.spec.sinks, self._eligible_end(layers, positions))
        evicted = candidates[select(scores[candidates], positions[candidates], count, eligible, policy)]
        self.ranks.check_equal("the evicted tokens", positions, evicted)
        if not len(evicted):
            return
        if recalls:
            self._archive_rows(layers, evicted)
        _drop_rows(layers, evicted)
        self.evicted = np.union1d(self.evicted, positions[evicted])
        self.stats = EvictionStats(
            rounds=self.stats.rounds + 1,
            tokens=self.stats.tokens + len(evicted),
            seconds=self.stats.seconds + time.perf_counter() - started,
        )

    def _packed_layer(self, layer: CompressedKVCache) -> PackedLayer:
        calibrator = self.calibrators.get(layer.number)
        rope, queries = (calibrator.rope, calibrator.current_stats) if calibrator else (None, None)
        return PackedLayer(*layer.packed_rows(), rope, queries)

    def _candidates(self, positions: np.ndarray) -> np.ndarray:
        """Return the indices of packed positions that are neither pinned nor recalled."""
        candidates = np.arange(len(positions))
        if self.pinned is not None:  # the policy evicts whole blocks, so whole blocks are pinned
            size = self.plan.config.policy.granularity
            blocks = positions // size
            is_free = (blocks < self.pinned.start // size) | (blocks >= -(-self.pinned.stop // size))
            candidates = np.flatnonzero(is_free)
        return candidates[~np.isin(positions[candidates], self.recalled)]

    def _num_protected(self, layers: list[CompressedKVCache]) -> int:
        """Return the number of last tokens that are never evicted; see `KVConfig.num_protected`."""
        recent = max(layer.spec.recent for layer in layers) if self.plan.config.recalls else 0
        return layers[0].spec.window + (recent + BLOCK if recent else 0)

    def _eligible_end(self, layers: list[CompressedKVCache], positions: np.ndarray) -> int:
        """Return the position before which packed tokens may be evicted."""
        end = layers[0].offset - layers[0].spec.window
        count = min(layer.num_evictable for layer in layers)
        return min(end, int(positions[count])) if self.plan.config.recalls and count < len(positions) else end

    # Archive and recall.

    def _archive_rows(self, layers: list[CompressedKVCache], index: np.ndarray) -> None:
        """Archive the packed rows with these indices."""
        archive, positions = self._open_archive(layers), layers[0].packed_positions[index]
        pieces = [layer.split_into_blocks(index) for layer in layers]
        blocks = []
        for i, (start, rows) in enumerate(pieces[0]):
            block_positions = positions[start : start + rows.keys.shape[1]]
            blocks.append(archive.put(Block(block_positions, [layer_pieces[i][1] for layer_pieces in pieces])))
        archived = blocks_on_all_ranks((*self.archived, *blocks), self.ranks)
        self.archived = tuple(sorted(archived, key=lambda block: int(block.positions[0])))

    def _open_archive(self, layers: list[CompressedKVCache]) -> Archive:
        if self.archive is None:
            shapes, limit = [layer.row_shape() for layer in layers], self.plan.config.archive_limit
            self.archive = Archive(shapes, cache_folder(), limit)
        return self.archive

    @property
    def lost(self) -> np.ndarray:
        """All positions that no head holds for good, ascending int64 [N]."""
        return _NO_POSITIONS if self.plan.retrieval_heads else self.evicted

    def forget_lost_blocks(self) -> None:
        """Forget the blocks that a rank lost since the last call; all ranks call this at the same time."""
        self.archived = tuple(blocks_on_all_ranks(self.archived, self.ranks))

    def capture_queries(self, numbers: Iterable[int], *, rounds: bool) -> None:
        """Keep the queries of these layers in later passes, for a search; without layers, stop.

        `rounds` says whether eviction rounds run meanwhile.
        """
        self._buffers = {number: QueryBuffer() for number in numbers}
        self._is_paused = not rounds

    def search_archive(
        self,
        layers: list[CompressedKVCache],
        count: int,
        limit: int,
        *,
        include_recalled: bool = False,
        passage_at: PassageAt = single_position,
    ) -> Selection:
        """Score the archived blocks by the last `count` queries, and select up to `limit` tokens of them.

        `layers` have run these tokens since `capture_queries`, and have all of them in the window. Recalled blocks
        count twice in the softmax sums, for all blocks alike. A block that cuts the passage of its best token comes
        with its neighbors.
        """
        blocks = [b for b in self.archived if include_recalled or b.positions[0] not in self.recalled]
        if self.archive is None or not blocks:
            return Selection([], [], [])
        queries = {number: buffer.last(layers[number], count) for number, buffer in self._buffers.items()}
        sinks = layers[0].spec.sinks
        completes_live = passage_at is not single_position and not include_recalled
        return Search(queries, sinks, self.archive, blocks, limit, self.ranks, passage_at, completes_live).run()

    def replace_recalled(self, layers: list[CompressedKVCache], blocks: list[ArchivedBlock]) -> np.ndarray:
        """Recall these blocks and no others; return the positions that were reloaded, ascending int64 [N]."""
        before = self.recalled
        selected = np.concatenate([_NO_POSITIONS, *(block.positions for block in blocks)])
        self._evict_recalled(layers, np.setdiff1d(before, selected))
        new = [block for block in blocks if block.positions[0] not in before]
        if new:
            self.recall(layers, new)
        return np.setdiff1d(self.recalled, before)

    def recall(self, layers: list[CompressedKVCache], blocks: Iterable[ArchivedBlock]) -> int:
        """Reload blocks that are not recalled yet; return the number of their tokens.

        A block that is lost or damaged on any rank is skipped, and forgotten.
        """
        loaded = self._read(list(blocks))
        if not loaded:
            return 0
        for number, layer in enumerate(layers):
            mx.eval(layer.reload([(block.positions, block.layers[number]) for block in loaded]))
        positions = np.concatenate([block.positions for block in loaded])
        self.recalled = np.union1d(self.recalled, positions)
        self.ranks.check_equal("the recalled tokens", self.recalled, layers[0].regions.positions)
        return len(positions)

    def _read(self, blocks: list[ArchivedBlock]) -> list[Block]:
        """Read the blocks that all ranks have undamaged; delete and forget the others."""
        assert self.archive is not None  # noqa: S101 - tells the type checker: there are blocks
        contents = [self.archive.read(block) for block in blocks]
        self.archive.delete_damaged(block for block, data in zip(blocks, contents, strict=True) if data is None)
        is_missing = self.ranks.any([data is None for data in contents])
        missing = [block for block, flag in zip(blocks, is_missing, strict=True) if flag]
        self.archived = tuple(block for block in self.archived if block not in missing)
        loaded = []
        for block, data in zip(blocks, contents, strict=True):
            if data is not None and block not in missing:
                loaded.append(data)
                block.recalls += 1
        return loaded

    def drop_recalled(self, layers: list[CompressedKVCache]) -> None:
        """Evict all recalled positions again."""
        self._evict_recalled(layers, self.recalled)

    def _evict_recalled(self, layers: list[CompressedKVCache], evicted: np.ndarray) -> None:
        """Evict recalled positions again, and archive those whose blocks were deleted meanwhile."""
        if not len(evicted):
            return
        self.forget_lost_blocks()
        positions = layers[0].packed_positions
        missing = np.setdiff1d(evicted, positions_of(self.archived))
        if len(missing):
            self._archive_rows(layers, np.flatnonzero(np.isin(positions, missing)))
            for block in self.archived:
                block.recalls += int(block.positions[0] in missing)
        _drop_rows(layers, np.flatnonzero(np.isin(positions, evicted)))
        self.recalled = np.setdiff1d(self.recalled, evicted)

    def archived_bytes(self) -> tuple[list[int], Iterable[bytes]]:
        """Return the sizes of the archived blocks, and their bytes, which are read one by one, for a file."""
        if self.archive is None:
            return [], ()
        self.archive.settle()
        blocks = [block for block in self.archived if not block.lost]
        return [block.nbytes for block in blocks], map(self.archive.read_raw, blocks)

    def restore_archive(self, layers: list[CompressedKVCache], blocks: Iterable[bytes]) -> None:
        """Archive the blocks of `archived_bytes`; the archive warns of damaged ones and of those that do not fit."""
        num_damaged, restored = 0, []
        for number, data in enumerate(blocks):
            archive = self._open_archive(layers)
            try:
                block = from_bytes(data, archive.shapes)
                self._check_evicted(block.positions, layers[0].spec.sinks)
            except CacheFormatError:
                num_damaged += 1
                continue
            archive.wait_for_queue()
            archived = archive.put(block)
            if archived is not None:
                archived.recalls = self._saved_recalls.get(number, 0)
                restored.append(archived)
        self.archived = tuple(block for block in restored if not block.lost)
        if self.archive is not None:
            self.archive.warn_of_damage(num_damaged)

    def _check_evicted(self, positions: np.ndarray, sinks: int) -> None:
        """Raise CacheFormatError unless these are evicted positions of one block, ascending."""
        blocks = (positions - sinks) // BLOCK
        is_one = len(positions) > 0 and (np.diff(positions) > 0).all() and blocks[0] == blocks[-1]
        if not is_one or not np.isin(positions, self.evicted).all():
            raise CacheFormatError("a block has other positions than those that were evicted")

    # What a layer knows of its group; see `cache.layer.Group`.

    def listeners(self, number: int, start: int, stop: int) -> tuple[QueryListener, ...]:
        """Return the listeners to the queries of layer `number` at positions [start, stop)."""
        listeners = []
        calibrator, buffer = self.calibrators.get(number), self._buffers.get(number)
        if calibrator is not None and calibrator.due(stop):
            rope = calibrator.rope
            if rope is not None and rope.is_fused:
                listeners.append(
                    QueryListener(lambda q, *_: calibrator.observe(rope.unrotate(q, start), start, rope.module))
                )
            else:
                listeners.append(QueryListener(lambda q, rope: calibrator.observe(q, start, rope), before_rope=True))
        if buffer is not None:
            listeners.append(QueryListener(buffer.append))
        return tuple(listeners)

    def rewind(self, layer: CompressedKVCache, length: int) -> bool:
        """Reload, for good, the evicted positions that the window of a layer needs after a trim to `length`.

        Blocks behind the new end are forgotten; those before the window stay archived. Layers are trimmed one after the
        other: blocks that the first one reads are kept for the others until the next pass, which must be announced
        again. Returns False, with nothing changed, if a position cannot be reloaded.
        """
        self.announced = 0
        start = layer.spec.needed_from(length)
        needed = layer.regions.missing(start, length)
        if len(needed):
            missing = np.setdiff1d(needed, positions_of(self._reloaded))
            near = blocks_on_all_ranks((b for b in self.archived if b.positions[0] in missing), self.ranks)
            self._reloaded += self._read(near) if np.isin(missing, positions_of(near)).all() else []
            blocks = [block for block in self._reloaded if block.positions[0] in needed]
            if not np.isin(needed, positions_of(blocks)).all():
                return False
            mx.eval(layer.reload([(block.positions, block.layers[layer.number]) for block in blocks]))
        self.archived = self.archived[: bisect_left(self.archived, start, key=lambda block: block.positions[0])]
        self.recalled = self.recalled[self.recalled < start]
        self.evicted = np.union1d(layer.regions.trimmed_to(length).missing(layer.spec.sinks, length), self.recalled)
        self.stats = replace(self.stats, tokens=len(self.evicted))
        return True

    def __deepcopy__(self, memo: object) -> "LayerGroup":
        return self.part(*self.calibrators)

    def part(self, *numbers: int) -> "LayerGroup":
        """Return a copy with the calibrators of these layers alone, for copies of these."""
        calibrators = {number: self.calibrators[number].copy() for number in numbers if number in self.calibrators}
        part = LayerGroup(self.plan, calibrators, self.stats, self.ranks)
        part.pinned, part.announced, part.archive = self.pinned, self.announced, self.archive
        part.archived, part.recalled, part.evicted = self.archived, self.recalled, self.evicted
        return part

    def part_state(self, number: int) -> dict[str, Any]:
        """Return the part of layer `number` as arrays and text, without the archive."""
        calibrator = self.calibrators.get(number)
        recalls = [block.recalls for block in self.archived if not block.lost]
        header = {
            "plan": asdict(self.plan) | {"config": self.plan.config.to_dict()},
            "stats": asdict(self.stats),
            "recalls": {index: count for index, count in enumerate(recalls) if count},
            "recalled": self.recalled.tolist(),
        }
        return {"header": json.dumps(header)} | ({"calibrator": calibrator.state} if calibrator else {})

    @classmethod
    def from_part_state(cls, number: int, state: dict[str, Any]) -> "LayerGroup":
        """Return the part of layer `number` that `part_state` wrote."""
        header = json.loads(state["header"])
        config = EvictConfig.from_dict(header["plan"]["config"])
        plan = EvictionPlan(**{**header["plan"], "config": config, "budget": Budget(*header["plan"]["budget"])})
        stats, recalled = EvictionStats(**header["stats"]), np.array(header["recalled"], np.int64)
        check_options(plan)
        check_options(stats)
        is_budget = type(plan.budget.tokens) is int if plan.budget.share is None else type(plan.budget.share) is float
        if not is_budget or recalled.ndim != 1 or (np.diff(recalled, prepend=-1) <= 0).any():
            raise CacheFormatError("the state of an eviction contradicts itself")
        calibrators = {}
        if "calibrator" in state and isinstance(config.policy, CalibratedPolicy):
            calibrators[number] = config.policy.make_calibrator()
            calibrators[number].restore(state["calibrator"])
        group = cls(plan, calibrators, stats)
        group._saved_recalls = {int(index): count for index, count in header["recalls"].items()}
        group.recalled = recalled
        return group

    def set_ropes(self, ropes: Iterable[Rope | None]) -> None:
        """Set the RoPE of each layer, which files do not store; raise CacheFormatError if they have other layers."""
        if not isinstance(self.plan.config.policy, CalibratedPolicy):
            return
        by_layer = dict(enumerate(ropes))
        if self.calibrators.keys() != by_layer.keys():
            raise CacheFormatError(f"it has calibrations of layers {[*self.calibrators]}, not of {[*by_layer]}")
        for number, rope in by_layer.items():
            self.calibrators[number].set_rope(rope)


def _drop_rows(layers: list[CompressedKVCache], index: np.ndarray) -> None:
    """Drop packed rows, by their ascending indices, from every layer."""
    positions = layers[0].packed_positions
    remaining = np.delete(np.arange(len(positions)), index)
    remaining_positions = positions[remaining]  # one array for all layers
    mx.eval([layer.compact(remaining, remaining_positions) for layer in layers])


# From the caches of a forward pass to their groups.


def cache_offsets(caches: Sequence[Any]) -> list[int]:
    """Return the tokens that each cache has seen, of those that count them."""
    return [part.offset for part in cache_parts(caches) if hasattr(part, "offset")]


def cache_arrays(cache: Any) -> list[mx.array]:
    leaves: list[tuple[str, Any]] = tree_flatten(cache.state)  # type: ignore[assignment]
    return [leaf for _, leaf in leaves if isinstance(leaf, mx.array)]


def compressed_caches(caches: Sequence[Any]) -> list[CompressedKVCache]:
    """Return the compressed caches of a prompt cache, including those inside a CacheList."""
    return [part for part in cache_parts(caches) if isinstance(part, CompressedKVCache)]


def evicting_layers(caches: Sequence[Any]) -> list[CompressedKVCache]:
    """Return the evicting layers of a prompt cache, by their number."""
    return sorted((c for c in compressed_caches(caches) if c.evicts), key=lambda layer: layer.number)


def batch_row(caches: Sequence[Any], number: int) -> list[CompressedKVCache]:
    """Return the compressed caches of one row of a batch, or of caches that are no batch; themselves and no copies."""
    rows = [part.rows[number] for part in cache_parts(caches) if isinstance(part, BatchCompressedKVCache)]
    return rows or compressed_caches(caches)


def begin_pass(caches: Sequence[Any], count: int) -> bool:
    """Let each group of a prompt cache, or of a batch, do what is due before a pass of `count` tokens.

    Returns whether the pass has to capture queries before RoPE.
    """
    sequences = [(list[Any](compressed_caches(caches)), count)]
    batches = [part for part in cache_parts(caches) if isinstance(part, BatchCompressedKVCache)]
    if batches:
        counts = batches[0].counts(count)
        sequences += [([batch.rows[i] for batch in batches], row_count) for i, row_count in enumerate(counts)]
    captures = False
    for layers, row_count in sequences:
        group = layer_group_of(layers)
        if group is not None:
            captures |= group.begin_pass(evicting_layers(layers), row_count)
    return captures


def layer_group_of(caches: Sequence[Any]) -> LayerGroup | None:
    """Return the group of a prompt cache's layers, or None if they keep all tokens.

    The parts that copied or loaded layers carry are joined first.
    """
    layers = [cache for cache in compressed_caches(caches) if cache.evicts]
    if not layers:
        return None
    group = layers[0].group
    if isinstance(group, LayerGroup) and all(layer.group is group for layer in layers):
        return group
    parts = {layer.number: _part_of(layer) for layer in layers}
    first = next(iter(parts.values()))
    shortest = min(layer.regions.stored for layer in layers)  # longer ones have a part of an interrupted pass
    if (
        len(parts) < len(layers)
        or any((part.plan, part.stats.tokens) != (first.plan, first.stats.tokens) for part in parts.values())
        or len({layer.regions.positions[:shortest].tobytes() for layer in layers}) > 1
    ):
        raise CacheFormatError(f"the layers of a prompt cache belong to different sequences. {_TOGETHER}")
    for number, part in parts.items():
        if number in part.calibrators:
            first.calibrators[number] = part.calibrators[number]
    regions = layers[0].regions
    first.evicted = np.union1d(regions.missing(regions.sizes.sinks, regions.length), first.recalled)
    for layer in layers:
        layer.join_group(first)
    return first


def _part_of(layer: CompressedKVCache) -> LayerGroup:
    if layer.saved_part is not None:
        return LayerGroup.from_part_state(layer.number, layer.saved_part)
    assert isinstance(layer.group, LayerGroup)  # noqa: S101 - tells the type checker: there is no other class
    return layer.group
