"""What a question needs of that which left: rows where the archive has them, and text where it has not."""

import time
from collections.abc import Callable
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np

from mlx_tq.models import ranks_of
from mlx_tq.policies.selection import PositionRange
from mlx_tq.prompt_cache.passes import sequence_in
from mlx_tq.prompt_cache.recall import LONGEST_QUESTION
from mlx_tq.session.recall import Named, Recalled, live_positions, read, ready_to_recall, recall
from mlx_tq.session.transcript import NOTHING, Rehydration, Transcript


@dataclass(frozen=True)
class Brought:
    """What came back for a question.

    Attributes:
        recalled: as rows.
        rehydration: as text, to be read before the question.
        rescue_seconds: that it took to ask the service.
    """

    recalled: Recalled
    rehydration: Rehydration
    rescue_seconds: float


def read_document(
    model: Any,
    caches: list[Any],
    transcript: Transcript,
    document: list[int],
    known: int,
    step: int,
    progress: Callable[[int, int], None],
) -> None:
    """Read what comes before a question, of which the caches hold the first `known` tokens; the service is told.

    Args:
        model: of the caches.
        caches: of all tokens of the transcript, and of those that are known.
        transcript: of the conversation, which goes on with the document.
        document: its tokens.
        known: of them.
        step: tokens read at a time.
        progress: told of the others, those read so far and all.
    """
    transcript.read(document)

    def told(done: int, total: int) -> None:
        tell_departed(transcript, caches)
        progress(done, total)

    read(model, caches, document[known:], step, told)


def bring_back(
    model: Any, caches: list[Any], transcript: Transcript, text: str, ids: list[int], step: int, room: int
) -> Brought:
    """Bring back what a question needs before it is read. `release` lets the rows leave again.

    Args:
        model: of the caches.
        caches: of all tokens of the transcript, and no more.
        transcript: of the conversation.
        text: what is asked.
        ids: of the question, with what the template has around it.
        step: tokens read at a time.
        room: positions that are left behind the question.
    """
    ready_to_recall(caches, min(len(ids), LONGEST_QUESTION))
    tell_departed(transcript, caches)
    asked = time.perf_counter()
    named = find(model, transcript, text, live_positions(caches, len(transcript.ids)))
    rescue_seconds = time.perf_counter() - asked
    recalled = recall(model, caches, ids, step, named=named)
    live = live_positions(caches, len(transcript.ids))
    rehydration = transcript.quoted(named, live, less=len(recalled.meaning))
    return Brought(recalled, rehydration if len(rehydration.ids) < room else NOTHING, rescue_seconds)


def find(model: Any, transcript: Transcript, text: str, live: np.ndarray) -> Named:
    """Where that lies which a question needs and which is not live; of several ranks the first asks for all."""
    ranges, limit = ranks_of(model).broadcast(lambda: astuple(transcript.find(text, live)))
    return Named(tuple((start, stop) for start, stop in ranges), limit)


def tell_departed(transcript: Transcript, caches: list[Any]) -> None:
    """Send the text of what has left the caches to the service."""
    sequence = sequence_in(caches)
    if sequence is not None:
        transcript.tell(sequence.take_departed())


def hold(caches: list[Any], span: PositionRange | None) -> None:
    """Keep the positions of `span`, those of a quotation, in the caches until others are held; of None: none."""
    sequence = sequence_in(caches)
    if sequence is not None:
        sequence.held = span
