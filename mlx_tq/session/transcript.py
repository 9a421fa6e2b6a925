"""What a session remembers outside of the cache: every token by position, what left, and how to ask for it."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mlx_tq.config import LEAST_QUOTATION, RescueConfig
from mlx_tq.policies.selection import PositionRange
from mlx_tq.rescue import RescueClient
from mlx_tq.rescue.wire import Range
from mlx_tq.session.plain_text import PlainText
from mlx_tq.session.quote import quote
from mlx_tq.session.recall import NOWHERE, Named
from mlx_tq.session.spans import make_spans, runs, widen

_LONG = 400  # characters of a message beyond which only its last question is asked
_SENTENCE_ENDS = ".!?\n"
_MARGIN = 32  # tokens on both sides of a span that are quoted too where its sentence goes on there
_SHARE = 1 / 4  # of the evicted tokens: a quotation of more would undo their eviction
_MOST_TOKENS = 2048  # about the 8,000 characters that a person would quote


@dataclass(frozen=True)
class Rehydration:
    """What came back for a question.

    Attributes:
        ranges: positions [start, stop) of what is quoted, ascending.
        texts: at these positions.
        ids: of the quotation to put before the question; none for no spans.
    """

    ranges: list[Range]
    texts: list[str]
    ids: list[int]

    @property
    def text(self) -> str:
        """The quotation as the turn has it."""
        return quote(self.texts)

    def at(self, start: int) -> PositionRange | None:
        """Where the quotation is if it begins at position `start`; None for none."""
        return PositionRange(start, start + len(self.ids)) if self.ids else None


NOTHING = Rehydration([], [], [])


class Transcript:
    """What was said in one session, token by token.

    The service is believed about where to look, not about what stands there: a span's text is read from the tokens
    that are kept here, so a service that lies, or knows another conversation, cannot put words into this one.

    Args:
        plain: encodes and decodes text.
        client: of the service, or None to remember without rescue.
        config: how to ask.
        session_id: under which the service keeps the spans.
        limit: most tokens of a quotation.

    Attributes:
        told: the service was sent something.
    """

    def __init__(
        self, plain: PlainText, client: RescueClient | None, config: RescueConfig, session_id: str, limit: int
    ) -> None:
        self.ids: list[int] = []
        self.copies: list[Range] = []  # of quotations: what they say is kept where it was first said
        self.told = False
        self._plain, self._client, self._config = plain, client, config
        self.session_id, self._limit = session_id, limit

    def tell(self, positions: np.ndarray) -> None:
        """Tokens at these positions, int64 [N], have left the cache: send their text to the service."""
        if not len(positions) or self._client is None:
            return
        for start, stop in self.copies:
            positions = positions[(positions < start) | (positions >= stop)]
        self._client.write(self.session_id, make_spans(positions, self.ids, self._plain.decode))
        self.told = True

    def find(self, query: str, live: np.ndarray) -> Named:
        """Where that lies which a question needs and which is not live; nowhere where the service does not answer."""
        if self._client is None or not self.told or not query.strip():
            return NOWHERE
        limit = min(self._limit, max(LEAST_QUOTATION, int(_SHARE * (len(self.ids) - len(live)))))
        still = runs(live)
        found = self._client.retrieve(
            self.session_id,
            last_question(query),
            top_k=self._config.top_k,
            score_floor=self._config.score_floor,
            exclude=still,
            timeout=self._config.timeout,
        )
        known = [each for each in found if each.stop <= len(self.ids) and not _within(each.start, each.stop, still)]
        wider = (widen((each.start, each.stop), self.ids, self._plain.decode, _MARGIN) for each in known)
        return Named(tuple(wider), limit)

    def quoted(self, named: Named, live: np.ndarray, less: int = 0) -> Rehydration:
        """What is not live of that which was found, quoted within the limit, `less` tokens of which are taken."""
        still, chosen = runs(live), list[Range]()
        for start, stop in named.ranges:
            gone = not _within(start, stop, still)
            if gone and len(self._quoted([*chosen, (start, stop)]).ids) <= named.limit - less:
                chosen.append((start, stop))
        return self._quoted(chosen)

    def longest_quotation(self, named: Named) -> int:
        """Tokens of a quotation of what was found, at most."""
        return min(named.limit, len(self._quoted(list(named.ranges)).ids))

    def read(self, ids: Sequence[int], quotation: Rehydration = NOTHING, at: int = 0) -> None:
        """The conversation goes on with `ids`, in which a quotation begins at index `at`."""
        if quotation.ids:
            start = len(self.ids) + at
            self.copies.append((start, start + len(quotation.ids)))
        self.ids += ids

    def first_said(self, start: int, stop: int) -> list[int]:
        """The tokens at positions [start, stop) but for quotations."""
        quoted = {position for span in self.copies for position in range(*span)}
        return [self.ids[position] for position in range(start, min(stop, len(self.ids))) if position not in quoted]

    def cut(self, length: int) -> None:
        """The conversation ends at position `length`: what came after was undone."""
        del self.ids[length:]
        self.copies = [(start, min(stop, length)) for start, stop in self.copies if start < length]

    def _quoted(self, ranges: list[Range]) -> Rehydration:
        ordered = runs(position for span in ranges for position in range(*span))
        texts = [self._plain.decode(self.ids[start:stop]) for start, stop in ordered]
        return Rehydration(ordered, texts, self._plain.encode(quote(texts)) if texts else [])


def _within(start: int, stop: int, ranges: Sequence[Range]) -> bool:
    return any(first <= start and stop <= last for first, last in ranges)


def quotation_limit(config: RescueConfig, positions: int | None) -> int:
    """Most tokens of a quotation for a model with so many positions."""
    return config.max_tokens or min(_MOST_TOKENS, (positions or 8 * _MOST_TOKENS) // 8)


def last_question(message: str) -> str:
    """What to look for: a short message itself; of a long one its last question, or else its end."""
    message = message.strip()
    if len(message) <= _LONG:
        return message
    if mark := message.rfind("?") + 1:
        start = 1 + max(message.rfind(end, 0, mark - 1) for end in _SENTENCE_ENDS)
        message = message[start:mark]
    return message.strip()[-_LONG:]
