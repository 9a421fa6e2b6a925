"""JSON bodies of requests to the rescue service, and strict parsers of its responses."""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from mlx_tq.errors import RescueError

# Limits of the service's API.
MAX_CHUNKS = 256
MAX_TEXT = 8192  # characters of a span or a query
MAX_EXCLUDED = 4096
MAX_TOP_K = 64

Range = tuple[int, int]


class TextSpan(NamedTuple):
    """Text of the evicted tokens at positions [start, stop)."""

    start: int
    stop: int
    text: str


class RetrievedSpan(NamedTuple):
    """A span that matches a query, with a similarity of at most 1."""

    start: int
    stop: int
    text: str
    similarity: float


class Embeddings(NamedTuple):
    """Unit vectors of texts, and the embedder that made them."""

    model: str
    vectors: list[list[float]]


def write_body(session_id: str, spans: Sequence[TextSpan]) -> dict[str, Any]:
    chunks = [
        {"text": clean(span.text)[:MAX_TEXT], "token_range": [span.start, span.stop], "layer": -1, "score": 0.0}
        for span in spans
    ]
    return {"session_id": session_id, "chunks": chunks}


def retrieve_body(
    session_id: str, query: str, *, top_k: int, score_floor: float | None, exclude: Sequence[Range]
) -> dict[str, Any]:
    longest = sorted(exclude, key=lambda span: span[0] - span[1])[:MAX_EXCLUDED]
    return {
        "session_id": session_id,
        "query": clean(query)[:MAX_TEXT],
        "top_k": min(top_k, MAX_TOP_K),
        "score_floor": score_floor,
        "exclude_ranges": [list(span) for span in longest],
        "join": False,  # the session joins spans itself, within its own limit
    }


def clean(text: str) -> str:
    """Replace what the service refuses: NUL and lone surrogates."""
    return text.replace("\x00", "\ufffd").encode("utf-8", "replace").decode("utf-8")


def parse_accepted(response: bytes) -> int:
    accepted = _parse_object(response).get("accepted")
    _check(isinstance(accepted, int), "accepted", accepted)
    return int(accepted)


def parse_retrieved(response: bytes) -> list[RetrievedSpan]:
    chunks = _parse_object(response).get("chunks")
    _check(isinstance(chunks, list), "chunks", chunks)
    return [_parse_chunk(chunk) for chunk in chunks[:MAX_TOP_K]]


def _parse_chunk(chunk: Any) -> RetrievedSpan:
    _check(isinstance(chunk, dict), "a chunk", chunk)
    text, span, similarity = chunk.get("text"), chunk.get("token_range"), chunk.get("similarity")
    _check(isinstance(text, str) and text, "text", text)
    _check(isinstance(span, list) and len(span) == 2 and all(type(position) is int for position in span), "range", span)
    _check(0 <= span[0] < span[1], "token_range", span)
    _check(type(similarity) in (int, float) and -2 <= similarity <= 2, "similarity", similarity)  # NaN is neither
    return RetrievedSpan(span[0], span[1], text, float(similarity))


def parse_embeddings(response: bytes) -> Embeddings:
    fields = _parse_object(response)
    model, vectors = fields.get("model"), fields.get("vectors")
    _check(isinstance(model, str), "model", model)
    _check(isinstance(vectors, list) and all(isinstance(vector, list) for vector in vectors), "vectors", vectors)
    lengths = {len(vector) for vector in vectors}
    _check(len(lengths) == 1 and 0 not in lengths, "the lengths of vectors", sorted(lengths))
    for value in (value for vector in vectors for value in vector):
        _check(type(value) in (int, float) and -2 <= value <= 2, "a component", value)
    return Embeddings(model, vectors)


def _parse_object(response: bytes) -> Any:
    try:
        value = json.loads(response)
    except (ValueError, RecursionError):
        value = response
    _check(isinstance(value, dict), "the body", value)
    return value


def _check(is_valid: Any, name: str, value: Any) -> None:
    if not is_valid:
        raise RescueError(
            f"the response is not from a rescue service ({name}: {value!r:.40}). Check the URL: `mlx-tq-rescue serve` "
            "prints its own."
        )
