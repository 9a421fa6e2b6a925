"""Pure functions of retrieval: which spans are out, how two rankings become one, and how neighbours join."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rescue_svc.store import Span


class Scored(NamedTuple):
    """A span id with its scores; `dense` is a cosine, `bm25` is over the best hit, each None where there is none."""

    id: int
    fused: float
    dense: float | None
    bm25: float | None

    @property
    def similarity(self) -> float:
        """What a score floor is held against: the cosine, or BM25 where there is none."""
        return self.dense if self.dense is not None else self.bm25 or 0.0


@dataclass(frozen=True)
class Found:
    """One stretch of text with the best scores of the spans it was joined from."""

    span: Span
    similarity: float
    dense: float | None
    bm25: float | None


def merge_ranges(ranges: Iterable[Sequence[int]]) -> list[tuple[int, int]]:
    """Return the union of [start, end) ranges as disjoint ranges in order; empty ones vanish."""
    merged: list[tuple[int, int]] = []
    for start, stop in sorted((r[0], r[1]) for r in ranges if r[0] < r[1]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged


def fuse(dense: dict[int, float], bm25: dict[int, float], alpha: float) -> list[Scored]:
    """Return all candidates, best first.

    The score is alpha parts of the cosine, from 0 at its worst to 1 at its best, and the rest BM25 over its best.
    A span without a vector yet is ranked by BM25 alone, so that waiting for the embedder does not hide it. One that
    shares no word with the question and has no positive cosine is no candidate. The scaling and the default of alpha
    did best of those measured in benchmarks/rescue.
    """
    low, high = min(dense.values(), default=0.0), max(dense.values(), default=0.0)
    best = max(bm25.values(), default=1.0)
    scored = []
    for span in dense.keys() | bm25.keys():
        cosine = dense.get(span)
        words = bm25[span] / best if span in bm25 else None
        if words is None and cosine is not None and cosine <= 0:
            continue
        by_words = words or 0.0
        by_meaning = by_words if cosine is None else (cosine - low) / (high - low) if high > low else 1.0
        scored.append(Scored(span, alpha * by_meaning + (1 - alpha) * by_words, cosine, words))
    return sorted(scored, key=lambda s: (-s.fused, s.id))


def each_alone(spans: Sequence[Span], scores: Sequence[Scored]) -> list[Found]:
    """Return each span as a stretch of its own, in the order given."""
    return [Found(span, s.similarity, s.dense, s.bm25) for span, s in zip(spans, scores, strict=True)]


def join_neighbours(spans: Sequence[Span], scores: Sequence[Scored]) -> list[Found]:
    """Join spans of one layer where one ends as the next begins; return the stretches, best first."""
    best = {span.id: place for place, span in enumerate(spans)}
    runs: list[list[int]] = []
    for place in sorted(range(len(spans)), key=lambda i: (spans[i].layer, spans[i].start, spans[i].stop)):
        last = spans[runs[-1][-1]] if runs else None
        if last and (last.layer, last.stop) == (spans[place].layer, spans[place].start):
            runs[-1].append(place)
        else:
            runs.append([place])
    found = [(min(best[spans[i].id] for i in run), _joined(spans, scores, run)) for run in runs]
    return [stretch for _, stretch in sorted(found, key=lambda pair: pair[0])]


def _joined(spans: Sequence[Span], scores: Sequence[Scored], run: Sequence[int]) -> Found:
    first, last = spans[run[0]], spans[run[-1]]
    text = "".join(spans[i].text for i in run)
    score = max(spans[i].score for i in run)
    span = Span(first.start, last.stop, first.layer, score, text, first.id)
    dense = [s for i in run if (s := scores[i].dense) is not None]
    bm25 = [s for i in run if (s := scores[i].bm25) is not None]
    return Found(span, max(scores[i].similarity for i in run), max(dense, default=None), max(bm25, default=None))
