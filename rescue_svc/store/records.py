"""What the store keeps of a span, and the seals that tell when a row is no longer what was written."""

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
    """A session's row."""

    id: int
    name: str
    spans: int
    text_bytes: int
    created: float
    updated: float


@dataclass(frozen=True)
class NewSpan:
    """A span that a client sends."""

    start: int
    stop: int
    layer: int
    score: float
    text: str

    def digest(self) -> bytes:
        """Identity within a session: the same range and text are the same span. 16 bytes."""
        content = struct.pack("<qq", self.start, self.stop) + self.text.encode()
        return hashlib.blake2b(content, digest_size=16).digest()

    def seal(self, session: str) -> int:
        """CRC-32 of all that the row says, and of whose it is."""
        return zlib.crc32(self.digest() + struct.pack("<qd", self.layer, self.score) + session.encode())


@dataclass(frozen=True)
class Span(NewSpan):
    """A span that the store gave an id."""

    id: int


@dataclass(frozen=True)
class Pending:
    """A span that waits for its vector."""

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
            "(it keeps every span that is whole) or restore a backup"
        )
    return span


def vector_seal(span: int, model: str, vector: bytes) -> int:
    """CRC-32 of a stored vector, of the span it belongs to and the model that made it."""
    return zlib.crc32(vector + struct.pack("<q", span) + model.encode())


def vector_of_row(span: int, model: str, vector: bytes, seal: int) -> Vectors | None:
    """Return the float32 vector [D] of a row, or None when it is not what was written."""
    if not isinstance(vector, bytes) or len(vector) % 4 or vector_seal(span, model, vector) != seal:
        return None
    return np.frombuffer(vector, dtype="<f4")
