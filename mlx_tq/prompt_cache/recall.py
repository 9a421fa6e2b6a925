"""A look into the archive: the blocks that the model's own queries would attend to, had they stayed.

A question is read over a copy of the cache, and its queries are kept. Each archived block is scored by the largest
attention weight that many heads would give one of its tokens for one token of the question, and for it no other block.
"""

import math
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from mlx_tq.cache.blocks import Block
from mlx_tq.cache.departures import leaving, normalization_of
from mlx_tq.cache.layer import CompressedKVCache
from mlx_tq.cache.links import Hear
from mlx_tq.config import BLOCK
from mlx_tq.distributed.group import Ranks
from mlx_tq.kernels.recall_score import group_queries, log_sum_exp, recall_score
from mlx_tq.prompt_cache.archive import ArchiveFile, Extent

# The last tokens of a question, whose queries look into the archive.
LONGEST_QUESTION = 256
# Archived tokens scored at a time, a layer: of twice as many a CPU takes half as long again for each.
TILE = 2048
# Of more archived tokens a quarter of the layers lists so many for the others, or an eighth where that is more.
SHORTLIST = 2048
# In the others' sums of all weights one block stands for so many that are not on the list.
STANDS_FOR = 16
# What is worth less than this part of the best block does not come back: it misleads more often than it helps.
# Where the best block is worth less than CERTAIN itself, so much smaller a part is enough.
SURE, CERTAIN = 0.6, 0.8
# While an answer is made, the layers look that gave so many of its question's best blocks their scores.
DECIDED = 8


def looking(count: int) -> range:
    """Numbers of the layers, of so many, whose queries look into the archive: the middle half finds what all find."""
    return range(count // 4, -(-3 * count // 4))


def shortlist(archived: int, most: int) -> int:
    """How many of so many archived tokens all layers weigh that look, where up to `most` may come back."""
    return min(archived, max(SHORTLIST, archived // 8, 2 * most))


def scouts(numbers: Collection[int], archived: int, most: int) -> list[int]:
    """Of the layers that look, those that weigh all that is archived: where it is much, a quarter from the middle."""
    if shortlist(archived, most) == archived:
        return [*numbers]
    return [*numbers][len(numbers) // 2 :][: -(-len(numbers) // 4)]


def weighed(archived: int, numbers: Collection[int], most: int) -> int:
    """Tokens that a look of these layers weighs, of all layers together."""
    first, listed = len(scouts(numbers, archived, most)), shortlist(archived, most)
    return first * archived + (len(numbers) - first) * (listed + (archived - listed) // STANDS_FOR)


@dataclass
class Listener:
    """Keeps what one layer's attention was last asked with.

    Attributes:
        heard: queries [1, Hq, L, Dk] of each pass, the latest last.
        scale: of scores.
    """

    heard: deque[mx.array] = field(default_factory=deque)
    scale: float = 1.0
    _tokens: int = 0

    def in_pass(self) -> Hear:
        """What hears one pass: its first queries, which are the layer's own; later layers may share its keys."""
        first = True

        def hear(queries: mx.array, scale: float) -> None:
            nonlocal first
            if first:
                self.hear(queries, scale)
            first = False

        return hear

    def hear(self, queries: mx.array, scale: float) -> None:
        """Attention is asked with queries [1, Hq, L, Dk]; earlier passes go that no question needs any more."""
        self.heard.append(queries)
        self.scale = scale
        self._tokens += queries.shape[2]
        while self._tokens - self.heard[0].shape[2] >= LONGEST_QUESTION:
            self._tokens -= self.heard.popleft().shape[2]

    def asked(self, layer: CompressedKVCache, count: int) -> "Asked":
        """The last `count` queries, of a layer whose last tokens they are."""
        queries = mx.concatenate(list(self.heard), axis=2)[:, :, -count:].astype(mx.float32) * self.scale
        regions = layer.keys_and_values()[0].view.undivided()  # type: ignore[attr-defined]
        return Asked(layer, queries, np.array(log_sum_exp(queries, regions)))


class Asked(NamedTuple):
    """What one layer asks.

    Attributes:
        layer: which has read the question.
        queries: times the scale, fp32 [1, Hq, L, Dk].
        live: the log-sum-exp of what each of them sees of the layer's cache, fp32 [H, G L].
    """

    layer: CompressedKVCache
    queries: mx.array
    live: np.ndarray


class Scored(NamedTuple):
    """A block, and how much one token of a question makes of it and of no other.

    layer: whose heads made the most of it, by number; with several ranks, of this one's. leads: a token of the question
    makes more of it than of any other, whatever it is worth.
    """

    extent: Extent
    score: float
    layer: int
    leads: bool


class Question(NamedTuple):
    """Who asks what of an archive.

    Attributes:
        asked: by the layers that look, by their number.
        sinks: tokens before the first block.
        archive: that holds the blocks.
        extents: the blocks, some of which may be lost.
        most: tokens of the best blocks and their neighbors that may come back.
    """

    asked: dict[int, Asked]
    sinks: int
    archive: ArchiveFile
    extents: Sequence[Extent]
    most: int


class Look(NamedTuple):
    """What a look found.

    ranked: the archived blocks, best first. chosen: of these the ones that should be back, all of them whole.
    """

    ranked: list[Scored]
    chosen: list[Extent]


def look(question: Question, ranks: Ranks) -> Look:
    """The blocks by `rank`, and those that should be back.

    Keys are scored unchecked. If one of the chosen blocks is damaged, or one that outweighs all others for a token, or
    what it holds gave no number, all blocks are checked and scored once more: in the sums of all weights it took part.
    """
    archive = question.archive

    def found() -> Look:
        ranked = rank(question, ranks)
        tokens = np.cumsum([len(piece.extent.positions) for piece in ranked])
        room = int(np.searchsorted(tokens, question.most)) + 1  # and for no more
        best = [piece for piece in ranked[:room] if piece.score and piece.score >= enough(ranked[0].score)]
        beside = [(side,) for side in goes_on(question, [piece.extent for piece in best], ranks)]
        return Look(ranked, choose(ranked, beside, question.sinks, question.most))

    first = found()
    numbers = all(math.isfinite(piece.score) for piece in first.ranked)
    decided = dict.fromkeys([*first.chosen, *(piece.extent for piece in first.ranked if piece.leads)])
    if not any(ranks.any([not numbers, *(archive.undamaged(extent) is None for extent in decided)])):
        return first
    archive.drop(extent for extent in question.extents if archive.undamaged(extent) is None)
    return found()


def rank(question: Question, ranks: Ranks) -> list[Scored]:
    """Blocks by what the last tokens that were read would make of them, best first; those on all ranks.

    Of much the `scouts` weigh all blocks, the other layers the best of these and, for their sums, some of the rest.

    Args:
        question: that was read.
        ranks: whose heads have a say.
    """
    there = sorted(kept_by_all(question.extents, ranks), key=lambda extent: len(extent.positions))  # one size together
    if not there:
        return []
    sizes = np.array([len(extent.positions) for extent in there])
    archived = int(sizes.sum())
    room, first = shortlist(archived, question.most), scouts(question.asked, archived, question.most)
    others = [number for number in question.asked if number not in first]
    powers, most = _powers(question, first, there, [], ranks)
    if room < archived:  # on all ranks, also where a layer looks alone
        best = np.argsort(-singled_out(powers), kind="stable")
        count = int(np.searchsorted(np.cumsum(sizes[best]), room, side="right"))
        listed, some = np.sort(best[:count]), best[count + STANDS_FOR // 2 :: STANDS_FOR]
        more, most_more = _powers(question, others, [there[i] for i in listed], [there[i] for i in some], ranks)
        weighed_by_all = np.concatenate([listed, some])
        powers[:, weighed_by_all] += more
        most = np.pad(most, [(0, len(others)), (0, 0)])
        most[len(first) :, weighed_by_all] = most_more
    scores, leading = singled_out(powers), {*powers.argmax(axis=1).tolist()}
    deciders = np.array([*first, *others])[most.argmax(axis=0)]
    order = np.lexsort(([extent.positions[0] for extent in there], -scores))
    return [Scored(there[i], float(scores[i]), int(deciders[i]), i in leading) for i in order]


def _powers(
    question: Question, numbers: Collection[int], extents: Sequence[Extent], some: Sequence[Extent], ranks: Ranks
) -> tuple[np.ndarray, np.ndarray]:
    """Fourth powers of the weights that heads of these layers give blocks, and some of the rest, beside what is live.

    Returns:
        Added up over all ranks' heads [L, N], and the largest of one token by layer, of this rank's [layers, N].
    """
    asked = {number: question.asked[number] for number in numbers}
    count = next(iter(question.asked.values())).queries.shape[2]
    powers, most = np.zeros((count, len(extents) + len(some))), np.zeros((len(asked), len(extents) + len(some)))
    for i, found in enumerate(_log_weights(question._replace(asked=asked, extents=extents), some)):
        own = np.exp(4 * found).sum(axis=(0, 1))
        powers += own
        most[i] = own.max(axis=0)
    return ranks.mean(powers) * ranks.size, most  # what is certain does not depend on ranks


def kept_by_all(extents: Iterable[Extent | None], ranks: Ranks) -> list[Extent]:
    """Of these, the blocks that no rank lost; all ranks ask at the same time, of as many."""
    asked = list(extents)
    lost = ranks.any([extent is None or extent.lost for extent in asked])
    return [extent for extent, gone in zip(asked, lost, strict=True) if extent is not None and not gone]


def singled_out(powers: np.ndarray) -> np.ndarray:
    """What each block is worth to the token of a question that has the most use for it: float64 [N].

    To a token a block is worth what its weight under many heads, as the fourth power counts them, exceeds the other
    tokens' by, times its share of the squares of all blocks' weights. "The access code" means every block with a code,
    "of the ivory gate" one; and what nearly every token looks at, as at a document's first lines, answers none.

    Args:
        powers: fourth powers of the largest weights, summed over layers and heads [L, N].
    """
    weights = np.sqrt(np.sqrt(powers))
    others = (weights.sum(axis=0) - weights) / max(1, len(weights) - 1)
    squares = np.sum(weights**2, axis=1, keepdims=True)
    shares = np.divide(weights**2, squares, out=np.zeros_like(weights), where=squares != 0)
    best: np.ndarray = (shares * np.maximum(0, weights - others)).max(axis=0)
    return best


def enough(best: float) -> float:
    """What a block has to be worth to come back, by what the best one is worth."""
    return SURE * best * min(1.0, best / CERTAIN)


def deciding(ranked: Sequence[Scored]) -> set[int]:
    """Numbers of the layers that decided which blocks are best; a look of these alone costs a fraction."""
    return {piece.layer for piece in ranked[:DECIDED]}


def goes_on(question: Question, extents: Sequence[Extent], ranks: Ranks) -> list[int]:
    """On which side of its block what each of these holds goes on, -1 before and 1 behind: where its best token is.

    Tokens are weighed beside these blocks and what is live, not beside all that is archived.

    Args:
        question: that was read.
        extents: pieces of blocks of BLOCK positions behind the sinks, on all ranks.
        ranks: whose heads have a say.
    """
    if not extents:
        return []
    layers = [found.max(axis=(0, 1, 2)) for found in _log_weights(question._replace(extents=extents), tokens=True)]
    weights = ranks.max(np.max(layers, axis=0))
    ends = np.cumsum([len(extent.positions) for extent in extents])
    peaks = [piece.argmax() for piece in np.split(weights, ends[:-1])]
    places = [extent.positions[peak] - question.sinks for extent, peak in zip(extents, peaks, strict=True)]
    return [1 if place % BLOCK >= BLOCK // 2 else -1 for place in places]


def _log_weights(question: Question, some: Sequence[Extent] = (), *, tokens: bool = False) -> Iterator[np.ndarray]:
    """Logarithms of the largest weight of each block, or token, by layer: float64 [H, G, L, N] of this rank's heads.

    Args:
        question: that was read.
        some: of other blocks, each of which counts for STANDS_FOR in sums; they are the last of N.
        tokens: one by one.
    """
    tiles = [(tile, 0.0) for tile in _tiles(question.extents)]
    tiles += [(tile, math.log(STANDS_FOR)) for tile in _tiles(some)]
    for number, (layer, queries, live) in question.asked.items():
        _, layout, known = leaving(layer)
        asking = group_queries(queries, len(live), layout, known)
        maxima, totals = [], [live]
        for tile, times in tiles:
            keys, means = question.archive.keys(tile, number)
            sizes = [len(extent.positions) for extent in tile]
            which = mx.array(np.repeat(np.arange(len(tile)), sizes), mx.int32)
            normalization = normalization_of(layer, means, which)
            encoded = layout.split_keys(mx.array(keys)[None])
            found = recall_score(asking, encoded, layout, normalization, [1] * sum(sizes) if tokens else sizes)
            maxima.append(np.array(found.maxima))
            totals.append(np.array(found.total) + times)
        with np.errstate(invalid="ignore"):  # a damaged block may hold what is no number: see `look`
            total = np.logaddexp.reduce(np.stack(totals).astype(np.float64))
            weights = np.concatenate(maxima, axis=-1) - total[..., None]
        yield weights.reshape(len(live), -1, queries.shape[2], weights.shape[-1])


def _tiles(extents: Sequence[Extent]) -> list[list[Extent]]:
    """Neighboring blocks of up to TILE tokens together."""
    ends = np.cumsum([len(extent.positions) for extent in extents])
    groups: dict[int, list[Extent]] = {}
    for extent, end in zip(extents, ends, strict=True):
        groups.setdefault(int(end - 1) // TILE, []).append(extent)
    return list(groups.values())


def choose(ranked: Sequence[Scored], beside: Sequence[Sequence[int]], sinks: int, most: int) -> list[Extent]:
    """The best blocks and their neighbors, of up to `most` tokens: best first, each with what lies beside it.

    A block's edge may cut the evidence in two, and the other half may score little.

    Args:
        ranked: pieces of blocks of BLOCK positions behind the sinks, best first.
        beside: of these, or as many as there is room for: on which sides neighbors come too, -1 before and 1 behind.
        sinks: tokens of it.
        most: tokens to choose.
    """
    numbers = [(int(piece.extent.positions[0]) - sinks) // BLOCK for piece in ranked]
    places: dict[int, list[int]] = {}
    for place, number in enumerate(numbers):
        places.setdefault(number, []).append(place)
    chosen: dict[int, None] = {}
    tokens = 0
    for best, sides in zip(numbers, beside, strict=False):
        for number in (best, *(best + side for side in sides)):
            for place in places.get(number, ()):
                if place in chosen:
                    continue
                tokens += len(ranked[place].extent.positions)
                if tokens > most:
                    return [ranked[each].extent for each in chosen]
                chosen[place] = None
    return [ranked[each].extent for each in chosen]


def holding(extents: Iterable[Extent], ranges: Iterable[tuple[int, int]], live: np.ndarray, most: int) -> list[Extent]:
    """The blocks that hold what is not live of ranges of positions: each range whole, or not at all.

    Args:
        extents: of the archive.
        ranges: [start, stop), the most wanted first.
        live: positions that need not come back.
        most: tokens of blocks; a range that would need more is passed over.
    """
    chosen: dict[Extent, None] = {}
    for start, stop in ranges:
        missing = np.setdiff1d(np.arange(start, stop), live)
        near = (e for e in extents if not e.lost and e.positions[0] < stop and e.positions[-1] >= start)
        blocks = [extent for extent in near if np.isin(extent.positions, missing).any()]
        more = chosen | dict.fromkeys(blocks)
        whole = np.isin(missing, positions_of(blocks)).all()
        if whole and sum(len(extent.positions) for extent in more) <= most:
            chosen = more
    return list(chosen)


def positions_of(extents: Iterable[Extent | Block]) -> np.ndarray:
    """All positions of blocks, ascending, int64 [N]."""
    return np.sort(np.concatenate([np.zeros(0, np.int64), *(extent.positions for extent in extents)]))
