"""The arms of the recall grid: how a question gets evidence from the archive.

full: nothing was evicted. evicted: nothing is recalled. quoted: the text of blocks found by keywords, in the prompt.
words: these blocks as rows. queries: blocks found by the model's queries. meaning: blocks whose text MiniLM finds
similar. both: `queries` and the spans that a rescue service with MiniLM names. random: other blocks. oracle: exactly
the blocks of the evidence.
"""

import copy
import random
import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from benchmarks.recall.scenes import STEP, read
from mlx_tq.config import BLOCK, LEAST_QUOTATION, RescueConfig
from mlx_tq.prompt_cache.archive import ArchivedBlock
from mlx_tq.prompt_cache.layer_group import evicting_layers, layer_group_of
from mlx_tq.prompt_cache.recall import (
    BlockScore,
    PassageAt,
    blocks_of_ranges,
    deciding_layers,
    positions_of,
    select_blocks,
)
from mlx_tq.session.restore import evict_before_question, recall_rows
from mlx_tq.session.transcript import extend_to_sentences, format_quotation, make_spans

Span = tuple[int, int]
# Of a session: spans asked for, and tokens beside them with which their sentences end.
TOP_K, MARGIN = RescueConfig().top_k, 32


def words_order(texts: Sequence[str], question: str, rng: random.Random) -> list[int]:
    """Return the order of texts by BM25, as the rescue service searches; those without a hit come last, by chance."""
    base = sqlite3.connect(":memory:")
    base.execute("CREATE VIRTUAL TABLE t USING fts5(text, tokenize='porter unicode61 remove_diacritics 2')")
    base.executemany("INSERT INTO t(rowid, text) VALUES (?, ?)", enumerate(texts))
    asked = " OR ".join(f'"{word}"' for word in dict.fromkeys(_words(question)))
    found = [row for (row,) in base.execute("SELECT rowid FROM t WHERE t MATCH ? ORDER BY bm25(t), rowid", (asked,))]
    base.close()
    rest = sorted(set(range(len(texts))) - set(found))
    rng.shuffle(rest)
    return found + rest


def likeness(embedder: Any, question: str, texts: Sequence[str]) -> np.ndarray:
    vectors = embedder.embed([question, *texts])
    return np.array(vectors[1:] @ vectors[0])


def named(
    embedder: Any,
    question: str,
    ids: Sequence[int],
    blocks: Sequence[ArchivedBlock],
    decode: Callable[[Sequence[int]], str],
) -> list[ArchivedBlock]:
    """Return the blocks of the spans that a rescue service with this embedder would name, as a session takes them."""
    gone = positions_of(blocks)
    spans = make_spans(gone, ids, decode)
    if not spans:
        return []
    alike = likeness(embedder, question, [span.text for span in spans])
    best = [spans[i] for i in np.argsort(-alike, kind="stable")[:TOP_K] if alike[i] >= (embedder.floor or -1)]
    ranges = [extend_to_sentences((span.start, span.stop), ids, decode, MARGIN) for span in best]
    live = np.setdiff1d(np.arange(len(ids)), gone)
    return blocks_of_ranges(blocks, ranges, live, max(LEAST_QUOTATION, len(gone) // 4))


def by_rank(order: Sequence[ArchivedBlock], sinks: int, most: int) -> list[ArchivedBlock]:
    """Return the first blocks with the neighbors on both sides: their text does not say where a fact continues."""
    return select_blocks([BlockScore(extent, 0.0, 0, False) for extent in order], [(-1, 1)] * len(order), sinks, most)


def _words(text: str) -> list[str]:
    return "".join(c if c.isalnum() else " " for c in text.lower()).split()


def places(order: Sequence[ArchivedBlock], spans: Sequence[Span]) -> list[int | None]:
    """Return for each span how many blocks without evidence rank before its best block; None if none is archived."""
    holds = [[inside(extent.positions, span) > 0 for span in spans] for extent in order]
    strange = np.cumsum([0, *(not any(each) for each in holds)])
    best = [next((i for i, each in enumerate(holds) if each[part]), None) for part in range(len(spans))]
    return [None if i is None else int(strange[i]) for i in best]


def inside(positions: np.ndarray, span: Span) -> int:
    return int(((positions >= span[0]) & (positions < span[1])).sum())


def is_cut(span: Span) -> bool:
    """Return True if a block's edge goes through a span; the sinks are a whole block."""
    return span[0] // BLOCK != (span[1] - 1) // BLOCK


@dataclass(frozen=True)
class Asked:
    """A question in tokens, and what of an answer is judged."""

    ids: list[int]
    opening: list[int]  # before the answer whose log-probability is taken
    answer: list[int]  # that answer
    answers: tuple[str, ...]  # what a free answer has to hold
    most: int  # tokens of a free answer; 0 for none


def answer(model: Any, tokenizer: Any, caches: list[Any], asked: Asked) -> tuple[bool | None, float]:
    """Return whether a free answer is right (None if none is made), and the log-probability of the right one."""
    first = read(model, caches, asked.ids)
    told = copy.deepcopy(caches)
    right = free_answer(model, tokenizer, caches, asked, first) if asked.most else None
    ids = [*asked.opening, *asked.answer]
    rows = mx.concatenate([first[None], model(mx.array(ids)[None], cache=told)[0]])[len(asked.opening) : len(ids)]
    chances = rows.astype(mx.float32)
    chances = chances - mx.logsumexp(chances, axis=-1, keepdims=True)
    return right, float(mx.take_along_axis(chances, mx.array(asked.answer)[:, None], axis=-1).sum())


def free_answer(model: Any, tokenizer: Any, caches: list[Any], asked: Asked, logits: mx.array) -> bool:
    said: list[int] = []
    while (token := int(logits.argmax())) != tokenizer.eos_token_id:
        said.append(token)
        text = tokenizer.decode(said)
        if all(each in text for each in asked.answers):
            return True
        if len(said) == asked.most:
            return False
        logits = read(model, caches, [token])
    return False


def quoted(tokenizer: Any, ids: Sequence[int], extents: Sequence[ArchivedBlock]) -> str:
    positions = np.unique(np.concatenate([np.zeros(0, np.int64), *(extent.positions for extent in extents)]))
    runs = np.split(positions, np.flatnonzero(np.diff(positions) > 1) + 1) if len(positions) else []
    return format_quotation([tokenizer.decode([ids[p] for p in run]) for run in runs])


@dataclass
class Recalls:
    """What each arm recalls for one question, after a prefill that evicted tokens."""

    caches: list[Any]  # after the eviction round of the question
    tokens: int  # that may be recalled
    orders: dict[str, list[ArchivedBlock]]  # the archived blocks, best first, by arm
    found: dict[str, list[ArchivedBlock]]  # those that are recalled, by arm
    seconds: float  # of the search by queries
    deciding_layers: int  # layers that decided it

    def with_rows(self, arm: str) -> list[Any]:
        caches = copy.deepcopy(self.caches)
        sequence = layer_group_of(caches)
        if sequence is not None and self.found.get(arm):
            sequence.recall(evicting_layers(caches), self.found[arm])
        return caches

    def back(self, arm: str, spans: Sequence[Span]) -> list[float]:
        positions = np.concatenate([np.zeros(0, np.int64), *(extent.positions for extent in self.found[arm])])
        return [inside(positions, span) / (span[1] - span[0]) for span in spans]


def recalls(
    model: Any,
    caches: list[Any],
    question: Sequence[int],
    spans: Sequence[Span],
    sentences: PassageAt,
    search: Callable[[list[ArchivedBlock]], dict[str, list[ArchivedBlock]]],
    rng: random.Random,
    name: Callable[[list[ArchivedBlock]], list[ArchivedBlock]] | None = None,
) -> Recalls:
    """Ask an archive in every way: `search` orders blocks by text, `name` adds blocks to what the queries find."""
    caches = copy.deepcopy(caches)
    evict_before_question(caches, len(question))
    layer, sequence = evicting_layers(caches)[0], layer_group_of(caches)
    assert sequence is not None
    most = sequence.plan.max_recalled(len(question) + layer.offset)
    asked = copy.deepcopy(caches)
    found = recall_rows(model, asked, list(question), STEP, most, passage_at=sentences)
    blocks = sorted((piece.block for piece in found.ranked), key=lambda block: int(block.positions[0]))
    orders = {
        "queries": [piece.block for piece in found.ranked],
        **search(blocks),
        "random": rng.sample(blocks, len(blocks)),
    }
    others = {arm: by_rank(order, layer.spec.sinks, most) for arm, order in orders.items() if arm != "queries"}
    back = set(found.positions)
    chosen = {"queries": [block for block in orders["queries"] if block.positions[0] in back], **others}
    chosen["oracle"] = [e for e in blocks if any(inside(e.positions, span) for span in spans)]
    if name is not None:
        chosen["both"] = list(dict.fromkeys([*chosen["queries"], *name(blocks)]))
    return Recalls(caches, most, orders, chosen, found.seconds, len(deciding_layers(found.ranked)))
