"""JSON bodies of requests to the rescue service, and strict parsers of its responses."""

import json
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


def clean(text: str) -> str:
    """Cut a text, and replace what the service refuses: NUL and lone surrogates."""
    return text.replace("\x00", "\ufffd").encode("utf-8", "replace").decode("utf-8")[:MAX_TEXT]


def parse_accepted(response: bytes) -> int:
    accepted = _parse_object(response).get("accepted")
    _check(isinstance(accepted, int), "accepted", accepted)
    return int(accepted)


def parse_retrieved(response: bytes) -> list[RetrievedSpan]:
    chunks = _parse_object(response).get("chunks")
    _check(isinstance(chunks, list), "chunks", chunks)
    spans = []
    for chunk in chunks[:MAX_TOP_K]:
        _check(isinstance(chunk, dict), "a chunk", chunk)
        text, ends, similarity = chunk.get("text"), chunk.get("token_range"), chunk.get("similarity")
        _check(isinstance(text, str) and text, "text", text)
        _check(isinstance(ends, list) and len(ends) == 2 and all(type(end) is int for end in ends), "range", ends)
        _check(0 <= ends[0] < ends[1], "token_range", ends)
        _check(type(similarity) in (int, float) and -2 <= similarity <= 2, "similarity", similarity)  # NaN is neither
        spans.append(RetrievedSpan(ends[0], ends[1], text, float(similarity)))
    return spans


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


def parse_embedder(response: bytes) -> str | None:
    embedder = _parse_object(response).get("embedder")
    _check(isinstance(embedder, dict), "embedder", embedder)
    model: str | None = embedder.get("model")
    _check(model is None or isinstance(model, str), "model", model)
    return model


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
