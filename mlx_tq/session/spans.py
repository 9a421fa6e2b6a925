"""From evicted positions to spans of text for the rescue service.

Tokens that were evicted side by side are one span, so a text is stored once and reads as it was written. Spans are cut
at 256 tokens, about what an embedder of sentences takes in.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

import numpy as np

from mlx_tq.rescue.wire import MAX_TEXT, Range, Span

MAX_TOKENS = 256


def runs(positions: Iterable[int]) -> list[Range]:
    """Maximal runs [start, stop) of adjacent positions, ascending; a position that comes twice counts once."""
    found = np.unique(np.fromiter(positions, np.int64))
    if not found.size:
        return []
    breaks = np.flatnonzero(np.diff(found) > 1)
    starts = found[np.concatenate([[0], breaks + 1])]
    stops = found[np.concatenate([breaks, [found.size - 1]])] + 1
    return [(int(start), int(stop)) for start, stop in zip(starts, stops, strict=True)]


def make_spans(
    positions: Iterable[int], ids: Sequence[int], decode: Callable[[Sequence[int]], str], limit: int = MAX_TOKENS
) -> list[Span]:
    """The text of evicted tokens.

    Args:
        positions: that were evicted.
        ids: of all tokens of the conversation, by position.
        decode: text of ids.
        limit: most tokens of a span; longer runs are cut into equal parts.
    """
    spans = []
    for start, stop in runs(positions):
        parts = -(-(stop - start) // limit)
        cuts = [start + (stop - start) * part // parts for part in range(parts + 1)]
        for first, last in pairwise(cuts):
            spans += _spans_of(first, last, ids, decode)
    return spans


def _spans_of(start: int, stop: int, ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> list[Span]:
    """One span, or more where the text of its tokens is longer than the service takes."""
    text = decode(ids[start:stop])
    if len(text) > MAX_TEXT and stop - start > 1:
        middle = (start + stop) // 2
        return _spans_of(start, middle, ids, decode) + _spans_of(middle, stop, ids, decode)
    return [Span(start, stop, text)] if text.strip() else []
