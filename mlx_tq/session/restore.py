"""Recall of evicted context: for a question before its prefill, and for an answer while it is decoded."""

import copy
import re
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.generate import generation_stream

from mlx_tq.policies.selection import PositionRange
from mlx_tq.prompt_cache.archive import ArchivedBlock
from mlx_tq.prompt_cache.compressed import compressed_attention
from mlx_tq.prompt_cache.layer_group import LayerGroup, compressed_caches, evicting_layers, layer_group_of
from mlx_tq.prompt_cache.recall import (
    MAX_QUESTION,
    BlockScore,
    PassageAt,
    blocks_of_ranges,
    count_scored_tokens,
    deciding_layers,
    positions_of,
    search_layers,
    single_position,
)
from mlx_tq.rescue.wire import Range
from mlx_tq.session.transcript import NO_HITS, NO_QUOTATION, Quotation, SearchHits

SHORTEST_QUESTION = 32  # tokens

# Archived tokens that all layers may score for each decoded token, so that a search costs a twentieth of the steps
# before it (docs/measurements/eviction.md). Counted and not timed: tokens must not depend on how busy the machine is.
_SCORED_PER_TOKEN = 25
_EMPTY_LINE, _EMPTY_LINE_TOKENS = re.compile(r"\n\s*\n[^\S\n]*$"), 6

ProgressCallback = Callable[[int, int], None]  # the number of tokens prefilled, and the total


@dataclass(frozen=True)
class RecallResult:
    """The rows that were reloaded for a question and its answer."""

    by_attention: tuple[int, ...] = ()  # positions that the model's own queries selected, ascending
    by_search: tuple[int, ...] = ()  # those that the rescue service's search selected; some may be in both
    ranked: tuple[BlockScore, ...] = ()  # the archived blocks by their latest scores, best first
    search_blocks: tuple[ArchivedBlock, ...] = ()  # the blocks of `by_search`; they stay until the answer is complete
    seconds: float = 0.0  # time that scoring and reloading took
    is_partial: bool = False  # a sentence that attention selected is not whole in the cache

    @property
    def positions(self) -> list[int]:
        return sorted({*self.by_attention, *self.by_search})

    @property
    def archived(self) -> int:
        """Return how many tokens were archived, recalled ones included."""
        return sum(len(block.block.positions) for block in self.ranked)


def split_question(tokenizer: Any, ids: list[int]) -> tuple[list[int], list[int]]:
    """Split a prompt into its document and its question: the last paragraph, of 32 to 256 tokens.

    Without an empty line that near to the end, the question is the last line. It includes what a chat template adds.
    """
    line = None
    for count in range(SHORTEST_QUESTION, min(MAX_QUESTION, len(ids))):
        if "\n" in tokenizer.decode(ids[-count - 1 : -count]):
            if _EMPTY_LINE.search(tokenizer.decode(ids[-count - _EMPTY_LINE_TOKENS : -count])):
                return ids[:-count], ids[-count:]
            line = line or count
    count = line or max(1, min(SHORTEST_QUESTION, len(ids) - 1))
    return ids[: len(ids) - count], ids[len(ids) - count :]


def prefill(
    model: Any, caches: list[Any], ids: list[int], step: int, progress: ProgressCallback = lambda *_: None
) -> None:
    """Run tokens through the model as mlx-lm does, `step` at a time."""
    for start in range(0, len(ids), step):
        with mx.stream(generation_stream):
            model(mx.array(ids[start : start + step])[None], cache=caches)
            mx.eval([cache.state for cache in caches])
        mx.clear_cache()
        progress(min(start + step, len(ids)), len(ids))


def live_positions(caches: list[Any], tokens: int) -> np.ndarray:
    """Return the positions that some layer's heads hold in caches of `tokens` tokens, ascending int64 [N]."""
    layers = compressed_caches(caches)
    if not layers:
        return np.arange(tokens)
    held = np.zeros(max(layer.offset for layer in layers), bool)
    for layer in layers:
        positions = layer.positions
        for of_head in positions if isinstance(positions, list) else [positions]:
            held[of_head] = True
        if held.all():
            break
    return np.flatnonzero(held)


def evict_before_question(caches: list[Any], count: int) -> bool:
    """Run the eviction round that a question of `count` tokens would trigger; return whether anything is archived.

    During the question's own pass it would be too late to recall what it evicts. It runs without an archive too, so
    that a failing archive changes no token.
    """
    sequence = layer_group_of(caches)
    if sequence is None:
        return False
    sequence.evict_if_due(evicting_layers(caches), count)
    return bool(sequence.archived)


def is_cut(passages: Sequence[PositionRange], caches: list[Any]) -> bool:
    """Return whether a passage of prefilled tokens is not whole in the caches."""
    live, tokens = live_positions(caches, 0), max((layer.offset for layer in evicting_layers(caches)), default=0)
    return any(not np.isin(np.arange(start, min(stop, tokens)), live).all() for start, stop in passages)


def recall_rows(
    model: Any,
    caches: list[Any],
    ids: list[int],
    step: int,
    limit: int | None = None,
    hits: SearchHits = NO_HITS,
    passage_at: PassageAt = single_position,
) -> RecallResult:
    """Reload the archived blocks that a question needs; `release` drops them again.

    The question is run over a copy of the caches, and its queries score the archive. Only the last 256 tokens of a
    longer message are run. `limit` bounds the tokens that the queries select; by default the configuration says it. A
    block that cuts the passage of its best token comes with its neighbors, as far as `limit` allows.
    """
    began = time.perf_counter()
    sequence, question = layer_group_of(caches), ids[-MAX_QUESTION:]
    if sequence is None or not evict_before_question(caches, len(question)):
        return RecallResult()
    if limit is None:
        limit = sequence.plan.max_recalled(len(ids) + evicting_layers(caches)[0].offset)
    fork = copy.deepcopy(caches)
    layers, forked = evicting_layers(fork), layer_group_of(fork)
    assert forked is not None  # noqa: S101 - tells the type checker: a copy evicts like its original
    forked.capture_queries(search_layers(len(layers)), rounds=False)
    with compressed_attention(model):
        prefill(model, fork, question, step)
    ranked, by_attention, passages = forked.search_archive(layers, len(question), limit, passage_at=passage_at)
    by_search: list[ArchivedBlock] = []
    if hits.ranges:
        sequence.forget_lost_blocks()
        by_search = blocks_of_ranges(sequence.archived, hits.ranges, live_positions(caches, 0), hits.limit)
    if by_attention or by_search:
        sequence.recall(evicting_layers(caches), dict.fromkeys([*by_attention, *by_search]))
    positions = (np.intersect1d(positions_of(blocks), sequence.recalled) for blocks in (by_attention, by_search))
    attention, search = (tuple(selected.tolist()) for selected in positions)
    seconds, is_partial = time.perf_counter() - began, is_cut(passages, caches)
    return RecallResult(attention, search, tuple(ranked), tuple(by_search), seconds, is_partial)


def restore_context(
    model: Any,
    caches: list[Any],
    question: list[int],
    step: int,
    *,
    hits: SearchHits,
    quote: Callable[[np.ndarray, int], Quotation] | None,
    prefilled: int,
    quote_at: int,
    passage_at: PassageAt,
) -> tuple[RecallResult, Quotation]:
    """Recall rows and quote text for a question, before its prefill; the quotation is pinned until `release`.

    `caches` hold the `prefilled` tokens before the question. Hits that are archived are reloaded. `quote` gets the live
    positions and the number of reloaded hit tokens, and quotes the others, at index `quote_at` of the question.
    """
    recalled = recall_rows(model, caches, question, step, hits=hits, passage_at=passage_at)
    if quote is None:
        return recalled, NO_QUOTATION
    quotation = quote(live_positions(caches, prefilled), len(recalled.by_search))
    sequence, start = layer_group_of(caches), prefilled + quote_at
    if sequence is not None:
        sequence.pinned = PositionRange(start, start + len(quotation.ids)) if quotation.ids else None
    return recalled, quotation


def release(caches: list[Any]) -> None:
    """Drop recalled rows from the caches, and unpin the quotation."""
    sequence = layer_group_of(caches)
    if sequence is not None:
        sequence.pinned = None
        sequence.drop_recalled(evicting_layers(caches))


def take_archive_warning(caches: list[Any]) -> str | None:
    """Return the archive's pending warning and clear it."""
    sequence = layer_group_of(caches)
    return None if sequence is None or sequence.archive is None else sequence.archive.take_warning()


class RecallDuringDecode:
    """Searches the archive again while an answer is decoded, with the answer's own queries.

    Each search replaces what the previous one recalled. Blocks of the rescue service's search stay, and blocks that lie
    whole in a quotation are not reloaded. The layers that decided the question's best blocks search; without any, all
    that search for a question.
    """

    def __init__(
        self,
        caches: list[Any],
        recalled: RecallResult,
        quoted: Sequence[Range] = (),
        passage_at: PassageAt = single_position,
    ) -> None:
        self._caches, self._recalled, self._quoted, self._passage_at = caches, recalled, quoted, passage_at
        self._is_partial = recalled.is_partial
        self._tokens, self._next_search = 0, 0
        self.positions: list[int] = []  # that were recalled, in the order in which they were reloaded
        self.searches, self.seconds = 0, 0.0  # so far
        self._sequence: LayerGroup | None = None
        self._numbers: Collection[int] = ()  # of the layers that search
        self._ranked: Sequence[BlockScore] = recalled.ranked

    def start(self) -> None:
        """Capture queries from now on; eviction rounds go on meanwhile."""
        sequence = layer_group_of(self._caches)
        if sequence is not None and sequence.plan.config.recalls:
            self._sequence = sequence
            self._numbers = deciding_layers(self._recalled.ranked) or search_layers(len(evicting_layers(self._caches)))
            sequence.capture_queries(self._numbers, rounds=True)
            self._next_search = self._tokens_to_next_search(sequence)

    def count_token(self) -> None:
        """Count a decoded token, and search if it is time."""
        self._tokens += 1
        sequence = self._sequence
        if sequence is None or self._tokens < self._next_search or not sequence.archived:
            return
        began = time.perf_counter()
        layers = evicting_layers(self._caches)
        latest = min(sequence.plan.config.recall_every, MAX_QUESTION)
        count = max(1, min(latest, layers[0].spec.window))  # the window has to hold all of them
        limit = sequence.plan.max_recalled(layers[0].offset)
        selection = sequence.search_archive(layers, count, limit, include_recalled=True, passage_at=self._passage_at)
        self._ranked = selection.ranked
        blocks = list(self._recalled.search_blocks)
        blocks += [block for block in selection.blocks if not self._is_quoted(block.positions[0], block.positions[-1])]
        self.positions += sequence.replace_recalled(layers, list(dict.fromkeys(blocks))).tolist()
        passages = [passage for passage in selection.passages if not self._is_quoted(passage.start, passage.stop - 1)]
        self._is_partial |= is_cut(passages, self._caches)
        self.searches, self.seconds = self.searches + 1, self.seconds + time.perf_counter() - began
        self._next_search, self._tokens = self._tokens_to_next_search(sequence), 0

    def stop(self) -> None:
        if self._sequence is not None:
            self._sequence.capture_queries([], rounds=True)

    def result(self) -> RecallResult:
        """Return what was recalled for the question and while decoding."""
        recalled, seconds = self._recalled, self._recalled.seconds + self.seconds
        by_attention = tuple(sorted({*recalled.by_attention, *self.positions}))
        ranked, is_partial = tuple(self._ranked), self._is_partial
        return replace(recalled, by_attention=by_attention, ranked=ranked, seconds=seconds, is_partial=is_partial)

    def _is_quoted(self, first: int, last: int) -> bool:
        return any(start <= first and last < stop for start, stop in self._quoted)

    def _tokens_to_next_search(self, sequence: LayerGroup) -> int:
        layers, archived = evicting_layers(self._caches), len(positions_of(sequence.archived))
        scored = count_scored_tokens(archived, self._numbers, sequence.plan.max_recalled(layers[0].offset))
        tokens = sequence.ranks.max(
            np.array([scored / len(layers) / _SCORED_PER_TOKEN])
        )  # all ranks search at the same time
        return max(sequence.plan.config.recall_every, int(tokens[0]))
