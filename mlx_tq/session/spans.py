"""From evicted positions to spans of text for the rescue service.

Tokens that were evicted side by side are cut at the ends of sentences: a sentence is the least text that says
something, and what else stands in a longer span hides it from a search. Each token is in one span, so a text is stored
once.
"""

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from mlx_tq.rescue.wire import MAX_TEXT, Range, TextSpan

SHORTEST, LONGEST = 16, 64  # tokens of a span; shorter sentences stand together, longer ones are cut
# The end of a line, too; after the full stops of Chinese and Japanese no space needs to follow.
_END = re.compile(r"""[.!?][)\]"'\u2019\u201d]*(?=\s|$)|[\u3002\uff01\uff1f]|\n""")

Decode = Callable[[Sequence[int]], str]


def runs(positions: Iterable[int]) -> list[Range]:
    """Maximal runs [start, stop) of adjacent positions, ascending; a position that comes twice counts once."""
    found = np.unique(np.fromiter(positions, np.int64))
    if not found.size:
        return []
    breaks = np.flatnonzero(np.diff(found) > 1)
    starts = found[np.concatenate([[0], breaks + 1])]
    stops = found[np.concatenate([breaks, [found.size - 1]])] + 1
    return [(int(start), int(stop)) for start, stop in zip(starts, stops, strict=True)]


def make_spans(positions: Iterable[int], ids: Sequence[int], decode: Decode) -> list[TextSpan]:
    """The text of evicted tokens.

    Args:
        positions: that were evicted.
        ids: of all tokens of the conversation, by position.
        decode: text of ids.
    """
    spans = []
    for start, stop in runs(positions):
        while start < stop:
            end = start + _first_sentence(ids[start : min(stop, start + LONGEST)], decode)
            end = stop if stop - end < SHORTEST else end
            spans += _spans_of(start, end, ids, decode)
            start = end
    return spans


def widen(span: Range, ids: Sequence[int], decode: Decode, most: int) -> Range:
    """`span` with the rest of the sentences in which it begins and ends: up to `most` tokens more on either side."""
    start, stop = span
    before, after = ids[max(0, start - most) : start], ids[stop - 1 : stop + most]
    begin = max(_sentence_ends(before, decode), default=0)
    end = next(_sentence_ends(after, decode), len(after))
    return start - len(before) + begin, stop - 1 + end


def _first_sentence(ids: Sequence[int], decode: Decode) -> int:
    """How many of the tokens are the first sentences that make a span; all where none ends."""
    return next((count for count in _sentence_ends(ids, decode) if count >= SHORTEST), len(ids))


def _sentence_ends(ids: Sequence[int], decode: Decode) -> Iterator[int]:
    """The numbers of tokens after which a sentence ends."""
    counts = range(len(ids) + 1)
    for match in _END.finditer(decode(ids)):
        yield bisect_left(counts, match.end(), key=lambda count: len(decode(ids[:count])))


def _spans_of(start: int, stop: int, ids: Sequence[int], decode: Decode) -> list[TextSpan]:
    """One span, or more where the text of its tokens is longer than the service takes."""
    text = decode(ids[start:stop])
    if len(text) > MAX_TEXT and stop - start > 1:
        middle = (start + stop) // 2
        return _spans_of(start, middle, ids, decode) + _spans_of(middle, stop, ids, decode)
    return [TextSpan(start, stop, text)] if text.strip() else []
