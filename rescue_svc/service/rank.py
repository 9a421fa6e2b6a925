"""Pure functions of retrieval: which spans are out, how two rankings become one, and how neighbours join."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rescue_svc.store import Span


@dataclass(frozen=True)
class Scored:
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
    """Return all candidates, best first: alpha parts of the cosine and the rest BM25, each scaled from 0 to 1.

    A span without a vector yet is ranked by BM25 alone, so that waiting for the embedder does not hide it. One that
    shares no word with the question and has no positive cosine is no candidate. The scaling and the default of alpha
    did best of those measured in benchmarks/rescue.
    """
    by_meaning, by_words = _scaled(dense), _scaled(bm25)
    best_words = max(bm25.values(), default=1.0)
    scored = []
    for span in dense.keys() | bm25.keys():
        cosine = dense.get(span)
        if span not in bm25 and cosine is not None and cosine <= 0:
            continue
        words = by_words.get(span, 0.0)
        fused = alpha * by_meaning.get(span, words) + (1 - alpha) * words
        scored.append(Scored(span, fused, cosine, bm25[span] / best_words if span in bm25 else None))
    return sorted(scored, key=lambda s: (-s.fused, s.id))


def _scaled(scores: dict[int, float]) -> dict[int, float]:
    low, high = min(scores.values(), default=0.0), max(scores.values(), default=0.0)
    return {span: (score - low) / (high - low) if high > low else 1.0 for span, score in scores.items()}


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
