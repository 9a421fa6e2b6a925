"""Rows of the store, with seals that detect damage."""

import hashlib
import struct
import zlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rescue_svc.errors import StoreDamagedError

Vectors = npt.NDArray[np.float32]
SpanRow = tuple[int, int, int, int, float, str, bytes, int]
COLUMNS = "id, start, stop, layer, score, text, digest, seal"


@dataclass(frozen=True)
class Session:
    id: int
    name: str
    spans: int
    text_bytes: int
    created: float
    updated: float
    expires: float | None  # None: never


@dataclass(frozen=True)
class NewSpan:
    """A span that is not stored yet."""

    start: int
    stop: int
    layer: int
    score: float
    text: str

    def digest(self) -> bytes:
        """Return the identity within a session: equal range and text are the same span. 16 bytes."""
        content = struct.pack("<qq", self.start, self.stop) + self.text.encode()
        return hashlib.blake2b(content, digest_size=16).digest()

    def seal(self, session: str) -> int:
        """Return a CRC-32 of the row and its session."""
        return zlib.crc32(self.digest() + struct.pack("<qd", self.layer, self.score) + session.encode())


@dataclass(frozen=True)
class Span(NewSpan):
    id: int


@dataclass(frozen=True)
class Pending:
    span: int
    session: int
    text: str


def span_of_row(row: SpanRow, session: str) -> Span:
    """Build a span from a row of COLUMNS; raise StoreDamagedError when it is not what was written."""
    id, start, stop, layer, score, text, digest, seal = row
    try:
        span = Span(start, stop, layer, score, text, id)
        intact = span.digest() == digest and span.seal(session) == seal
    except (TypeError, AttributeError, struct.error):
        intact = False
    if not intact:
        raise StoreDamagedError(
            f"span {id} of session {session} is not what was written; stop the service, then `mlx-tq-rescue rebuild` "
            "(it keeps every intact span) or restore a backup"
        )
    return span


def vector_seal(span: int, model: str, vector: bytes) -> int:
    """Return a CRC-32 of a stored vector, its span and its model."""
    return zlib.crc32(vector + struct.pack("<q", span) + model.encode())


def vector_of_row(span: int, model: str, vector: bytes, seal: int) -> Vectors | None:
    """Return the float32 vector [D] of a row, or None if it is damaged."""
    if not isinstance(vector, bytes) or len(vector) % 4 or vector_seal(span, model, vector) != seal:
        return None
    return np.frombuffer(vector, dtype="<f4")
