"""`NgramIndex`: where the last tokens of a text occurred before."""

from collections.abc import Sequence
from typing import NamedTuple

_NGRAM = 3  # tokens that have to agree
_MAX_AGREEMENT = 32  # tokens compared; longer agreements predict no better
_MAX_CANDIDATES = 16  # earlier occurrences compared, the latest first


class Match(NamedTuple):
    """An earlier place whose preceding text agrees with the end of the text."""

    position: int  # of the token that followed there
    agreement: int  # number of preceding tokens that agree


class NgramIndex:
    """A text of tokens that grows, with the positions of its 3-grams."""

    def __init__(self, ids: Sequence[int] = ()) -> None:
        self._ids: list[int] = []
        self._latest: dict[tuple[int, ...], int] = {}  # the position after the last occurrence of a 3-gram
        self._earlier: list[int] = [0]  # by position: the one after the previous occurrence of its 3-gram, or 0
        for token in ids:
            self.append(token)

    def __len__(self) -> int:
        return len(self._ids)

    def append(self, token: int) -> None:
        self._ids.append(token)
        earlier, position = 0, len(self._ids)
        if position >= _NGRAM:
            ngram = tuple(self._ids[-_NGRAM:])
            earlier = self._latest.get(ngram, 0)
            self._latest[ngram] = position
        self._earlier.append(earlier)

    def longest_match(self) -> Match | None:
        """Return the earlier place whose preceding text agrees longest; of equal ones the latest."""
        ids, end = self._ids, len(self._ids)
        best, position = None, self._earlier[end]
        for _ in range(_MAX_CANDIDATES):
            if not position:
                break
            agreement, longest = _NGRAM, min(_MAX_AGREEMENT, position)
            while agreement < longest and ids[position - 1 - agreement] == ids[end - 1 - agreement]:
                agreement += 1
            if best is None or agreement > best.agreement:
                best = Match(position, agreement)
            if agreement == _MAX_AGREEMENT:
                break
            position = self._earlier[position]
        return best

    def following(self, position: int, count: int) -> list[int]:
        """Return `count` tokens from a position on; behind the end, the text since the position repeats."""
        ids = self._ids[position : position + count]
        period = len(ids)
        while len(ids) < count:
            ids.append(ids[-period])
        return ids
