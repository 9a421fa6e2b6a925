"""The ways in which a question may get what it needs from an archive, and what each is worth.

full: a cache that lost nothing. evicted: nothing comes back. quoted: the text of the blocks that a search of words
finds stands before the question. words: those blocks return as rows. queries: what the model's own queries find does.
meaning: blocks whose text MiniLM finds like the question. both: what the queries find, and the spans that MiniLM names
of text that left, as a session with rescue has it. random: other blocks. oracle: those of the evidence, and no others.
"""

import copy
import random
import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from benchmarks.recall.bench_recall import BLOCK, STEP, read
from mlx_tq.config import LEAST_QUOTATION, RescueConfig
from mlx_tq.prompt_cache.archive import ArchivedBlock
from mlx_tq.prompt_cache.layer_group import evicting_layers, layer_group_of
from mlx_tq.prompt_cache.recall import BlockScore, blocks_of_ranges, deciding_layers, positions_of, select_blocks
from mlx_tq.session.restore import evict_before_question, recall_rows
from mlx_tq.session.transcript import extend_to_sentences, format_quotation, make_spans

Span = tuple[int, int]
# Of a session: spans asked for, and tokens beside them with which their sentences end.
TOP_K, MARGIN = RescueConfig().top_k, 32


def words_order(texts: Sequence[str], question: str, rng: random.Random) -> list[int]:
    """Numbers of texts by BM25, as the rescue service searches words; those without any come last, by chance."""
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
    """The cosine of each text's vector and the question's [n]."""
    vectors = embedder.embed([question, *texts])
    return np.array(vectors[1:] @ vectors[0])


def named(
    embedder: Any,
    question: str,
    ids: Sequence[int],
    blocks: Sequence[ArchivedBlock],
    decode: Callable[[Sequence[int]], str],
) -> list[ArchivedBlock]:
    """The blocks of the spans that a rescue service with this embedder would name, as a session would take them."""
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
    """The first blocks with the neighbors on both sides: their text does not say where what it tells goes on."""
    return select_blocks([BlockScore(block, 0.0, 0, False) for block in order], [(-1, 1)] * len(order), sinks, most)


def _words(text: str) -> list[str]:
    return "".join(c if c.isalnum() else " " for c in text.lower()).split()


def places(order: Sequence[ArchivedBlock], spans: Sequence[Span]) -> list[int | None]:
    """Of each span how many blocks without any evidence rank before its best block; None where none is archived."""
    holds = [[inside(block.positions, span) > 0 for span in spans] for block in order]
    strange = np.cumsum([0, *(not any(each) for each in holds)])
    best = [next((i for i, each in enumerate(holds) if each[part]), None) for part in range(len(spans))]
    return [None if i is None else int(strange[i]) for i in best]


def inside(positions: np.ndarray, span: Span) -> int:
    """How many of these positions lie in a span."""
    return int(((positions >= span[0]) & (positions < span[1])).sum())


def is_cut(span: Span) -> bool:
    """Whether a block's edge goes through a span; the sinks is a whole block."""
    return span[0] // BLOCK != (span[1] - 1) // BLOCK


@dataclass(frozen=True)
class Asked:
    """A question in tokens, and what of an answer is judged.

    Attributes:
        ids: of the question.
        opening: tokens that stand before the answer whose log-probability is taken.
        answer: tokens of that answer.
        answers: what a free answer has to hold.
        most: tokens of a free answer; 0 where none is made.
    """

    ids: list[int]
    opening: list[int]
    answer: list[int]
    answers: tuple[str, ...]
    most: int


def answer(model: Any, tokenizer: Any, caches: list[Any], asked: Asked) -> tuple[bool | None, float]:
    """Whether a free answer holds all that is right, None where none is made; the right one's log-probability."""
    first = read(model, caches, asked.ids)
    told = copy.deepcopy(caches)
    right = free_answer(model, tokenizer, caches, asked, first) if asked.most else None
    ids = [*asked.opening, *asked.answer]
    rows = mx.concatenate([first[None], model(mx.array(ids)[None], cache=told)[0]])[len(asked.opening) : len(ids)]
    chances = rows.astype(mx.float32)
    chances = chances - mx.logsumexp(chances, axis=-1, keepdims=True)
    return right, float(mx.take_along_axis(chances, mx.array(asked.answer)[:, None], axis=-1).sum())


def free_answer(model: Any, tokenizer: Any, caches: list[Any], asked: Asked, logits: mx.array) -> bool:
    """Whether what the likeliest tokens after the question say holds all that is right."""
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


def quoted(tokenizer: Any, ids: Sequence[int], blocks: Sequence[ArchivedBlock]) -> str:
    """Text of blocks as text rescue quotes it, neighbors as one."""
    positions = np.unique(np.concatenate([np.zeros(0, np.int64), *(block.positions for block in blocks)]))
    runs = np.split(positions, np.flatnonzero(np.diff(positions) > 1) + 1) if len(positions) else []
    return format_quotation([tokenizer.decode([ids[p] for p in run]) for run in runs])


@dataclass
class Recalls:
    """One reading that lost tokens, and a question of it: what each arm brings back.

    Attributes:
        caches: of the reading, with the round held that the question makes due.
        tokens: that may come back.
        orders: the archived blocks, best first, by arm.
        found: those that come back, by arm.
        seconds: of the queries' look.
        deciding: layers that decided it.
    """

    caches: list[Any]
    tokens: int
    orders: dict[str, list[ArchivedBlock]]
    found: dict[str, list[ArchivedBlock]]
    seconds: float
    deciding_layers: int

    def with_rows(self, arm: str) -> list[Any]:
        """A copy of the caches in which an arm's blocks are back."""
        caches = copy.deepcopy(self.caches)
        sequence = layer_group_of(caches)
        if sequence is not None and self.found.get(arm):
            sequence.recall(evicting_layers(caches), self.found[arm])
        return caches

    def back(self, arm: str, spans: Sequence[Span]) -> list[float]:
        """Share of each span that an arm brings back."""
        positions = np.concatenate([np.zeros(0, np.int64), *(block.positions for block in self.found[arm])])
        return [inside(positions, span) / (span[1] - span[0]) for span in spans]


def recalls(
    model: Any,
    caches: list[Any],
    question: Sequence[int],
    spans: Sequence[Span],
    search: Callable[[list[ArchivedBlock]], dict[str, list[ArchivedBlock]]],
    rng: random.Random,
    name: Callable[[list[ArchivedBlock]], list[ArchivedBlock]] | None = None,
) -> Recalls:
    """Ask an archive in every way.

    Args:
        model: of the caches.
        caches: that read the text; they are left as they are.
        question: in tokens.
        spans: of the evidence.
        search: orders blocks by their text, in one way or more.
        rng: of random blocks.
        name: blocks that come beside what the queries find.
    """
    caches = copy.deepcopy(caches)
    evict_before_question(caches, len(question))
    layer, sequence = evicting_layers(caches)[0], layer_group_of(caches)
    assert sequence is not None
    most = sequence.plan.max_recalled(len(question) + layer.offset)
    asked = copy.deepcopy(caches)
    found = recall_rows(model, asked, list(question), STEP, most)
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
