"""What travels between mlx_tq and the rescue service, and what of an answer is believed."""

import json
from collections.abc import Sequence
from math import isfinite
from typing import Any, NamedTuple

from mlx_tq.errors import RescueError

# What the service takes.
MAX_CHUNKS = 256
MAX_TEXT = 8192  # characters of a span and of a question
MAX_EXCLUDED = 4096
MAX_TOP_K = 64

# Bytes of an answer that are read: 64 spans of 8,192 characters, escaped, fit many times.
MAX_ANSWER = 8_000_000

Range = tuple[int, int]


class TextSpan(NamedTuple):
    """Text of the evicted tokens at positions [start, stop)."""

    start: int
    stop: int
    text: str


class Found(NamedTuple):
    """A span that the service found; `similarity` is at most 1, best first."""

    start: int
    stop: int
    text: str
    similarity: float


class Embedded(NamedTuple):
    """Unit vectors of texts, by the embedder `model`."""

    model: str
    vectors: list[list[float]]


def http_errors() -> tuple[type[Exception], ...]:
    """What a call may raise before there is an answer."""
    import httpx2  # a quarter of a second

    return (httpx2.HTTPError, httpx2.InvalidURL, httpx2.StreamError, OSError)


def write_body(session_id: str, spans: Sequence[TextSpan]) -> dict[str, Any]:
    """The body of /evict/write."""
    chunks = [
        {"text": clean(span.text)[:MAX_TEXT], "token_range": [span.start, span.stop], "layer": -1, "score": 0.0}
        for span in spans
    ]
    return {"session_id": session_id, "chunks": chunks}


def retrieve_body(
    session_id: str, query: str, *, top_k: int, score_floor: float | None, exclude: Sequence[Range]
) -> dict[str, Any]:
    """The body of /evict/retrieve; of too many ranges to exclude, the longest are sent."""
    longest = sorted(exclude, key=lambda span: span[0] - span[1])[:MAX_EXCLUDED]
    return {
        "session_id": session_id,
        "query": clean(query)[:MAX_TEXT],
        "top_k": min(top_k, MAX_TOP_K),
        "score_floor": score_floor,
        "exclude_ranges": [list(span) for span in longest],
        "join": False,  # whoever asks knows best how much it can take
    }


def clean(text: str) -> str:
    """Text as the service takes it: no NUL, no lone surrogates."""
    return text.replace("\x00", "\ufffd").encode("utf-8", "replace").decode("utf-8")


def read_written(answer: bytes) -> int:
    """How many spans of a write were new.

    Raises:
        RescueError: the answer is not one of the rescue service.
    """
    accepted = _object(answer).get("accepted")
    if not isinstance(accepted, int):
        raise _foreign(f"accepted is {accepted!r:.40}")
    return accepted


def read_found(answer: bytes) -> list[Found]:
    """The spans of an answer to a question, best first.

    Raises:
        RescueError: the answer is not one of the rescue service.
    """
    chunks = _object(answer).get("chunks")
    if not isinstance(chunks, list):
        raise _foreign(f"chunks is {chunks!r:.40}")
    return [_read_chunk(chunk) for chunk in chunks[:MAX_TOP_K]]


def read_embedded(answer: bytes) -> Embedded:
    """The vectors of texts, all of one length.

    Raises:
        RescueError: the answer is not one of the rescue service.
    """
    said = _object(answer)
    model, vectors = said.get("model"), said.get("vectors")
    if not isinstance(model, str) or not isinstance(vectors, list):
        raise _foreign(f"model is {model!r:.40}")
    lengths = {len(vector) if isinstance(vector, list) else 0 for vector in vectors}
    numbers = all(isinstance(value, float | int) and isfinite(value) for vector in vectors for value in vector or [])
    if len(lengths) != 1 or 0 in lengths or not numbers:
        raise _foreign(f"vectors have the lengths {sorted(lengths)!r:.40}, or are no numbers")
    return Embedded(model, vectors)


def _read_chunk(chunk: Any) -> Found:
    if not isinstance(chunk, dict):
        raise _foreign(f"a chunk is {chunk!r:.40}")
    text, where, similarity = chunk.get("text"), chunk.get("token_range"), chunk.get("similarity")
    if not isinstance(text, str) or not text:
        raise _foreign(f"a chunk's text is {text!r:.40}")
    if not (isinstance(where, list) and len(where) == 2 and all(map(_is_count, where)) and where[0] < where[1]):
        raise _foreign(f"a chunk's token_range is {where!r:.40}")
    if isinstance(similarity, bool) or not isinstance(similarity, int | float) or not -2 <= similarity <= 2:
        raise _foreign(f"a chunk's similarity is {similarity!r:.40}")
    return Found(where[0], where[1], text, float(similarity))


def _object(answer: bytes) -> dict[str, Any]:
    try:
        value = json.loads(answer)
    except (ValueError, RecursionError) as error:
        raise _foreign("it is not JSON") from error
    if not isinstance(value, dict):
        raise _foreign(f"it is a {type(value).__name__}")
    return value


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _foreign(fault: str) -> RescueError:
    return RescueError(
        f"what answers is not the rescue service ({fault}). Check the URL: `mlx-tq-rescue serve` names its own."
    )
