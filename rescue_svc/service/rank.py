"""Pure functions of retrieval: merge ranges, fuse two rankings, join adjacent spans."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rescue_svc.schemas import RetrievedChunk
from rescue_svc.store import Span


class Scored(NamedTuple):
    """A span id with its scores: `dense` is a cosine, `bm25` is relative to the best hit; None if there is none."""

    id: int
    fused: float
    dense: float | None
    bm25: float | None

    @property
    def similarity(self) -> float:
        """The value that a score floor applies to: the cosine, or BM25 if there is none."""
        return self.dense if self.dense is not None else self.bm25 or 0.0


def merge_ranges(ranges: Iterable[Sequence[int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for start, stop in sorted((r[0], r[1]) for r in ranges if r[0] < r[1]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged


def fuse(dense: dict[int, float], bm25: dict[int, float], alpha: float) -> list[Scored]:
    """Return all candidates, best first.

    The score is `alpha` times the cosine scaled to [0, 1] plus `1 - alpha` times BM25 relative to the best hit. A span
    without a vector yet is ranked by BM25 alone. One that shares no word with the query and has no positive cosine is
    not a candidate. Scaling and default alpha were best of those measured in benchmarks/rescue.
    """
    low, high = min(dense.values(), default=0.0), max(dense.values(), default=0.0)
    best = max(bm25.values(), default=1.0)
    scored = []
    for span in dense.keys() | bm25.keys():
        cosine = dense.get(span)
        relative_bm25 = bm25[span] / best if span in bm25 else None
        if relative_bm25 is None and cosine is not None and cosine <= 0:
            continue
        sparse = relative_bm25 or 0.0
        scaled = sparse if cosine is None else (cosine - low) / (high - low) if high > low else 1.0
        scored.append(Scored(span, alpha * scaled + (1 - alpha) * sparse, cosine, relative_bm25))
    return sorted(scored, key=lambda s: (-s.fused, s.id))


def to_chunks(spans: Sequence[Span], scores: Sequence[Scored], *, join: bool) -> list[RetrievedChunk]:
    """Return the chunks of ranked spans, best first; with `join`, adjacent spans of one layer are one chunk."""
    runs: list[list[int]] = []
    for place in sorted(range(len(spans)), key=lambda i: (spans[i].layer, spans[i].start, spans[i].stop)):
        last = spans[runs[-1][-1]] if runs else None
        if join and last and (last.layer, last.stop) == (spans[place].layer, spans[place].start):
            runs[-1].append(place)
        else:
            runs.append([place])
    return [
        RetrievedChunk(
            text="".join(spans[i].text for i in run),
            token_range=[spans[run[0]].start, spans[run[-1]].stop],
            layer=spans[run[0]].layer,
            score=max(spans[i].score for i in run),
            similarity=max(scores[i].similarity for i in run),
            dense=max((s for i in run if (s := scores[i].dense) is not None), default=None),
            bm25=max((s for i in run if (s := scores[i].bm25) is not None), default=None),
        )
        for run in sorted(runs, key=min)
    ]
