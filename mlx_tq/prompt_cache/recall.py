"""Selects the archived blocks to reload: those that the model's own queries would attend to if they were cached.

A question is run over a copy of the cache, and its queries are captured. A block's score is the largest attention
weight that many heads give one of its tokens for one token of the question, and for that token no other block.
"""

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from mlx_tq.cache.blocks import Block
from mlx_tq.cache.layer import CompressedKVCache
from mlx_tq.config import BLOCK
from mlx_tq.distributed.group import Ranks
from mlx_tq.kernels.recall_score import group_queries, log_sum_exp, recall_score
from mlx_tq.policies.selection import PositionRange
from mlx_tq.prompt_cache.archive import Archive, ArchivedBlock

PassageAt = Callable[[int], PositionRange]  # the text that a position belongs to, such as its sentence

MAX_QUESTION = 256  # last tokens of a question whose queries search the archive
TILE = 2048  # archived tokens scored at a time, per layer: with twice as many, a CPU takes half as long again for each
# A quarter of the layers lists 2048 tokens of a larger archive for the others, or an eighth if that is more.
SHORTLIST = 2048
SAMPLE_WEIGHT = 16  # in the other layers' softmax sums, one block stands for 16 that are not on the list
# A block below this part of the best score is not reloaded: it misleads more often than it helps. Where the best block
# scores below CERTAIN itself, proportionally less is enough.
MIN_SHARE, CERTAIN = 0.6, 0.8
NUM_DECIDING = 8  # best blocks of a question that decide which layers search while its answer is decoded


def single_position(position: int) -> PositionRange:
    """Return the passage of a position whose text is not known."""
    return PositionRange(position, position + 1)


class QueryBuffer:
    """Keeps the latest queries of one layer, as attention had them."""

    def __init__(self) -> None:
        self.passes: deque[mx.array] = deque()  # queries [1, Hq, L, Dk] of each pass, the latest last
        self.scale = 1.0  # of attention scores
        self._tokens = 0

    def append(self, queries: mx.array, scale: float, _sinks: mx.array | None) -> list[mx.array]:
        """Add the queries of a pass, and drop those that are too old for any question."""
        self.passes.append(queries)
        self.scale = scale
        self._tokens += queries.shape[2]
        while self._tokens - self.passes[0].shape[2] >= MAX_QUESTION:
            self._tokens -= self.passes.popleft().shape[2]
        return []

    def last(self, layer: CompressedKVCache, count: int) -> "LayerQueries":
        """Return the last `count` queries, which are those of the last tokens of `layer`."""
        queries = mx.concatenate(list(self.passes), axis=2)[:, :, -count:].astype(mx.float32) * self.scale
        queries, regions = layer.searched(queries)
        return LayerQueries(layer, queries, np.array(log_sum_exp(queries, regions)))


class LayerQueries(NamedTuple):
    """The queries of a question at one layer."""

    layer: CompressedKVCache
    queries: mx.array  # times the scale of scores, fp32 [1, Hq, L, Dk]
    log_sums: np.ndarray  # log-sum-exp of each query's scores on the cached tokens, fp32 [H, G L]


class BlockScore(NamedTuple):
    """An archived block and its score."""

    block: ArchivedBlock
    score: float
    layer: int  # number of the layer whose heads gave it the most weight, among this rank's heads
    leads: bool  # True if a token of the question gives it more weight than any other block, however small


class Selection(NamedTuple):
    """The result of a search: all blocks with their scores, best first, and those to reload."""

    ranked: list[BlockScore]
    blocks: list[ArchivedBlock]
    passages: list[PositionRange]  # that the question needs whole, each around the best token of a block


@dataclass(frozen=True)
class Search:
    """A search of the archive with the queries of a question."""

    queries: dict[int, LayerQueries]  # by the number of the layer that searches
    sinks: int  # tokens before the first block
    archive: Archive
    blocks: Sequence[ArchivedBlock]  # to score; some may be lost
    limit: int  # maximum tokens to reload
    ranks: Ranks  # heads of all processes count
    passage_at: PassageAt  # of a block's best token, what should be reloaded whole
    completes_live: bool  # live passages that are cut come first

    def run(self) -> Selection:
        """Score and select blocks.

        Keys are scored unchecked. If a selected or leading block is damaged, or a score is not a number, all blocks are
        checked and scored again: a damaged one took part in every softmax sum.
        """
        selection = self._score_and_select()
        is_finite = all(math.isfinite(scored.score) for scored in selection.ranked)
        used = dict.fromkeys([*selection.blocks, *(scored.block for scored in selection.ranked if scored.leads)])
        if not any(self.ranks.any([not is_finite, *(self.archive.read(block) is None for block in used)])):
            return selection
        self.archive.delete_damaged(block for block in self.blocks if self.archive.read(block) is None)
        return self._score_and_select()

    def _score_and_select(self) -> Selection:
        ranked = self.score_blocks()
        completing, live = self._complete_live(ranked) if ranked and self.completes_live else ([], [])
        limit = self.limit - sum(len(block.positions) for block in completing)
        tokens = np.cumsum([len(scored.block.positions) for scored in ranked])
        room = int(np.searchsorted(tokens, limit)) + 1
        best = [scored for scored in ranked[:room] if scored.score and scored.score >= min_score(ranked[0].score)]
        peaks = self.best_positions([scored.block for scored in best])
        passages = [self.passage_at(peak) for peak in peaks]
        sides = [
            continuation_sides(peak - self.sinks, passage.start - self.sinks, passage.stop - self.sinks)
            for peak, passage in zip(peaks, passages, strict=True)
        ]
        blocks = list(dict.fromkeys([*completing, *select_blocks(ranked, sides, self.sinks, limit)]))
        selected = [scored.block in blocks for scored in best]
        return Selection(ranked, blocks, [*live, *compress(passages, selected)])

    def _complete_live(self, ranked: Sequence[BlockScore]) -> tuple[list[ArchivedBlock], list[PositionRange]]:
        """Return the archived blocks with the rest of the live passage that the question needs, and that passage.

        An evicted half of a sentence scores low if the question's words are in the half that is live. There are none
        if an archived block scores higher than the passage.
        """
        passage = self._live_passage(ranked[0].score)
        if passage is None:
            return [], []
        blocks, tokens = [], 0
        for block in (scored.block for scored in ranked):
            if np.isin(block.positions, np.arange(*passage)).any() and tokens + len(block.positions) <= self.limit:
                blocks.append(block)
                tokens += len(block.positions)
        return blocks, [passage]

    def _live_passage(self, least: float) -> PositionRange | None:
        """Return the passage of the live token that the question singles out, if its block scores `least` or more."""
        layers = [layer for layer, *_ in self.queries.values()]
        question = layers[0].offset - next(iter(self.queries.values())).queries.shape[2]
        positions = layers[0].packed_positions[: min(layer.num_evictable for layer in layers)]
        positions = positions[positions < question]
        if not len(positions):
            return None
        starts = np.flatnonzero(np.diff((positions - self.sinks) // BLOCK, prepend=-1))
        sizes = np.diff(starts, append=len(positions))
        weights = self._live_log_weights(0, sizes.tolist())
        scores = score_by_specificity(
            self.ranks.mean(sum(np.exp(4 * w).sum(axis=(0, 1)) for w in weights)) * self.ranks.size
        )
        best = int(scores.argmax())
        if scores[best] < least:
            return None
        weights = self._live_log_weights(int(starts[best]), [1] * int(sizes[best]))
        peak = self.ranks.max(np.max([w.max(axis=(0, 1, 2)) for w in weights], axis=0)).argmax()
        return self.passage_at(int(positions[starts[best] + peak]))

    def _live_log_weights(self, start: int, sizes: Sequence[int]) -> Iterator[np.ndarray]:
        """Yield by layer what `_log_weights` does, for blocks of `sizes` live rows from row `start` on."""
        for layer, queries, log_sums in self.queries.values():
            rows, layout, normalization = layer.evictable_rows()
            grouped, maxima, row = group_queries(queries, len(log_sums), layout, normalization), [], start
            for first in range(0, len(sizes), TILE // BLOCK):
                tile = sizes[first : first + TILE // BLOCK]
                keys = layout.keys(rows[:, :, row : row + sum(tile)])
                scores = recall_score(grouped, keys, layout, normalization and normalization.after(row), tile)
                maxima.append(np.array(scores.maxima))
                row += sum(tile)
            weights = np.concatenate(maxima, axis=-1).astype(np.float64) - log_sums[..., None]
            yield weights.reshape(len(log_sums), -1, queries.shape[2], len(sizes))

    def score_blocks(self) -> list[BlockScore]:
        """Score the blocks that all ranks have, best first.

        In a large archive the scout layers score all blocks; the others score the best of these and, for their softmax
        sums, a sample of the rest.
        """
        blocks = sorted(blocks_on_all_ranks(self.blocks, self.ranks), key=lambda block: len(block.positions))
        if not blocks:
            return []
        sizes = np.array([len(block.positions) for block in blocks])
        num_archived = int(sizes.sum())
        room, scouts = shortlist_tokens(num_archived, self.limit), scout_layers(self.queries, num_archived, self.limit)
        others = [number for number in self.queries if number not in scouts]
        powers, largest = self._sum_powers(scouts, blocks, [])
        if room < num_archived:  # on all ranks, even if a layer searches alone
            order = np.argsort(-score_by_specificity(powers), kind="stable")
            count = int(np.searchsorted(np.cumsum(sizes[order]), room, side="right"))
            listed, sample = np.sort(order[:count]), order[count + SAMPLE_WEIGHT // 2 :: SAMPLE_WEIGHT]
            scored = np.concatenate([listed, sample])
            more, more_largest = self._sum_powers(others, [blocks[i] for i in listed], [blocks[i] for i in sample])
            powers[:, scored] += more
            largest = np.pad(largest, [(0, len(others)), (0, 0)])
            largest[len(scouts) :, scored] = more_largest
        scores, leading = score_by_specificity(powers), {*powers.argmax(axis=1).tolist()}
        layers = np.array([*scouts, *others])[largest.argmax(axis=0)]
        order = np.lexsort(([block.positions[0] for block in blocks], -scores))
        return [BlockScore(blocks[i], float(scores[i]), int(layers[i]), i in leading) for i in order]

    def _sum_powers(
        self, layers: Collection[int], blocks: Sequence[ArchivedBlock], sample: Sequence[ArchivedBlock]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Sum the fourth powers of the attention weights of blocks, and of a sample of others, over heads and layers.

        Returns the sums over all ranks [L, N], and by layer the largest for one token, of this rank [layers, N].
        """
        count = next(iter(self.queries.values())).queries.shape[2]
        powers = np.zeros((count, len(blocks) + len(sample)))
        largest = np.zeros((len(layers), len(blocks) + len(sample)))
        for i, log_weights in enumerate(self._log_weights(layers, blocks, sample)):
            layer_powers = np.exp(4 * log_weights).sum(axis=(0, 1))
            powers += layer_powers
            largest[i] = layer_powers.max(axis=0)
        return self.ranks.mean(powers) * self.ranks.size, largest  # CERTAIN does not depend on the number of ranks

    def best_positions(self, blocks: Sequence[ArchivedBlock]) -> list[int]:
        """Return the position of each block's best token.

        Tokens are weighted against these blocks and the cache, not against the whole archive.
        """
        if not blocks:
            return []
        log_weights = self._log_weights(self.queries, blocks, tokens=True)
        weights = self.ranks.max(np.max([layer.max(axis=(0, 1, 2)) for layer in log_weights], axis=0))
        ends = np.cumsum([len(block.positions) for block in blocks])
        peaks = [part.argmax() for part in np.split(weights, ends[:-1])]
        return [int(block.positions[peak]) for block, peak in zip(blocks, peaks, strict=True)]

    def _log_weights(
        self,
        layers: Collection[int],
        blocks: Sequence[ArchivedBlock],
        sample: Sequence[ArchivedBlock] = (),
        *,
        tokens: bool = False,
    ) -> Iterator[np.ndarray]:
        """Yield by layer the logarithm of each block's, or token's, largest weight: float64 [H, G, L, N] of this rank.

        Each block of `sample`, the last of N, counts SAMPLE_WEIGHT times in the softmax sums.
        """
        tiles = [(tile, 0.0) for tile in _tiles(blocks)]
        tiles += [(tile, math.log(SAMPLE_WEIGHT)) for tile in _tiles(sample)]
        for number in layers:
            layer, queries, log_sums = self.queries[number]
            _, layout, normalization = layer.evictable_rows()
            grouped = group_queries(queries, len(log_sums), layout, normalization)
            maxima, sums = [], [log_sums]
            for tile, log_weight in tiles:
                keys, means = self.archive.read_keys(tile, number)
                sizes = [len(block.positions) for block in tile]
                index = mx.array(np.repeat(np.arange(len(tile)), sizes), mx.int32)
                encoded = layout.split_keys(mx.array(keys)[None])
                normalization = layer.archived_normalization(means, index)
                scores = recall_score(grouped, encoded, layout, normalization, [1] * sum(sizes) if tokens else sizes)
                maxima.append(np.array(scores.maxima))
                sums.append(np.array(scores.total) + log_weight)
            with np.errstate(invalid="ignore"):  # a damaged block may hold NaN; see `run`
                total = np.logaddexp.reduce(np.stack(sums).astype(np.float64))
                weights = np.concatenate(maxima, axis=-1) - total[..., None]
            yield weights.reshape(len(log_sums), -1, queries.shape[2], weights.shape[-1])


def _tiles(blocks: Sequence[ArchivedBlock]) -> list[list[ArchivedBlock]]:
    """Group neighboring blocks of up to TILE tokens."""
    ends = np.cumsum([len(block.positions) for block in blocks])
    groups: dict[int, list[ArchivedBlock]] = {}
    for block, end in zip(blocks, ends, strict=True):
        groups.setdefault(int(end - 1) // TILE, []).append(block)
    return list(groups.values())


# Which layers search, and how much they score.


def search_layers(count: int) -> range:
    """Return the numbers of the layers, of `count`, that search: the middle half finds what all layers find."""
    return range(count // 4, -(-3 * count // 4))


def shortlist_tokens(num_archived: int, limit: int) -> int:
    """Return how many archived tokens every layer scores if up to `limit` may be reloaded."""
    return min(num_archived, max(SHORTLIST, num_archived // 8, 2 * limit))


def scout_layers(layers: Collection[int], num_archived: int, limit: int) -> list[int]:
    """Return which of the layers that search score the whole archive: of a large one, a quarter from the middle."""
    if shortlist_tokens(num_archived, limit) == num_archived:
        return [*layers]
    return [*layers][len(layers) // 2 :][: -(-len(layers) // 4)]


def count_scored_tokens(num_archived: int, layers: Collection[int], limit: int) -> int:
    """Return how many tokens a search with these layers scores, summed over the layers."""
    num_scouts, listed = len(scout_layers(layers, num_archived, limit)), shortlist_tokens(num_archived, limit)
    sampled = (num_archived - listed) // SAMPLE_WEIGHT
    return num_scouts * num_archived + (len(layers) - num_scouts) * (listed + sampled)


def deciding_layers(ranked: Sequence[BlockScore]) -> set[int]:
    """Return the layers that decided which blocks are best; a search with these alone costs a fraction."""
    return {scored.layer for scored in ranked[:NUM_DECIDING]}


# Scores and selection.


def score_by_specificity(powers: np.ndarray) -> np.ndarray:
    """Score each block by the token of the question that singles it out most: float64 [N].

    For a token, a block counts by how much its weight, as the fourth power sums it over heads, exceeds its mean weight
    for the other tokens, times its share of the squares of all blocks' weights. "The access code" means every block
    with a code, "of the ivory gate" one; and what nearly every token looks at, such as a document's first lines,
    answers none. `powers` [L, N] are the fourth powers of the largest weights, summed over layers and heads.
    """
    weights = np.sqrt(np.sqrt(powers))
    others = (weights.sum(axis=0) - weights) / max(1, len(weights) - 1)
    squares = np.sum(weights**2, axis=1, keepdims=True)
    shares = np.divide(weights**2, squares, out=np.zeros_like(weights), where=squares != 0)
    scores: np.ndarray = (shares * np.maximum(0, weights - others)).max(axis=0)
    return scores


def min_score(best: float) -> float:
    """Return the score from which a block is reloaded, given the best one."""
    return MIN_SHARE * best * min(1.0, best / CERTAIN)


def continuation_sides(peak: int, start: int, stop: int) -> list[int]:
    """Return on which sides a block continues, -1 before and 1 behind, the more likely one first.

    It does where it cuts the passage [start, stop) around its best token, `peak`; if it cuts none, on the side of the
    half in which that token is. All count from the first block's start.
    """
    block, offset = divmod(peak, BLOCK)
    likely = 1 if offset >= BLOCK // 2 else -1
    is_cut = {-1: start < block * BLOCK, 1: stop > (block + 1) * BLOCK}
    return [side for side in (likely, -likely) if is_cut[side]] or [likely]


def select_blocks(
    ranked: Sequence[BlockScore], sides: Sequence[Sequence[int]], sinks: int, limit: int
) -> list[ArchivedBlock]:
    """Select the best blocks of up to `limit` tokens, each with its neighbors on some sides: -1 before, 1 behind.

    An edge between blocks may cut the evidence in two, and the other half may score low. As many blocks of `ranked` are
    selected as there are `sides`. Several archived blocks may be pieces of one block of positions.
    """
    numbers = [(int(scored.block.positions[0]) - sinks) // BLOCK for scored in ranked]
    pieces: dict[int, list[int]] = {}
    for index, number in enumerate(numbers):
        pieces.setdefault(number, []).append(index)
    selected: dict[int, None] = {}
    tokens = 0
    for best, best_sides in zip(numbers, sides, strict=False):
        for index in (i for side in (0, *best_sides) for i in pieces.get(best + side, ())):
            if index in selected:
                continue
            tokens += len(ranked[index].block.positions)
            if tokens > limit:
                return [ranked[i].block for i in selected]
            selected[index] = None
    return [ranked[i].block for i in selected]


def blocks_of_ranges(
    blocks: Iterable[ArchivedBlock], ranges: Iterable[tuple[int, int]], live: np.ndarray, limit: int
) -> list[ArchivedBlock]:
    """Return the blocks that hold ranges [start, stop) of positions, each range whole or not at all.

    Ranges come the most wanted first; one that would exceed `limit` tokens is skipped. `live` positions are not needed.
    """
    selected: dict[ArchivedBlock, None] = {}
    for start, stop in ranges:
        missing = np.setdiff1d(np.arange(start, stop), live)
        near = (b for b in blocks if not b.lost and b.positions[0] < stop and b.positions[-1] >= start)
        needed = [block for block in near if np.isin(block.positions, missing).any()]
        more = selected | dict.fromkeys(needed)
        is_whole = np.isin(missing, positions_of(needed)).all()
        if is_whole and sum(len(block.positions) for block in more) <= limit:
            selected = more
    return list(selected)


def blocks_on_all_ranks(blocks: Iterable[ArchivedBlock | None], ranks: Ranks) -> list[ArchivedBlock]:
    """Return the blocks that no rank lost; all ranks call this at the same time, with as many blocks."""
    blocks = list(blocks)
    lost = ranks.any([block is None or block.lost for block in blocks])
    return [block for block, is_lost in zip(blocks, lost, strict=True) if block is not None and not is_lost]


def positions_of(blocks: Iterable[ArchivedBlock | Block]) -> np.ndarray:
    """Return all positions of blocks, ascending, int64 [N]."""
    return np.sort(np.concatenate([np.zeros(0, np.int64), *(block.positions for block in blocks)]))
