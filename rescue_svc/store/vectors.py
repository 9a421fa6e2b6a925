"""Stored vectors: the costly part of an index, kept so that an index can be built again without the embedder."""

import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rescue_svc.store.records import Pending, Vectors, vector_of_row, vector_seal


@dataclass(frozen=True)
class Stored:
    """Vectors in the order in which they were stored."""

    spans: npt.NDArray[np.int64]  # [N]
    vectors: Vectors  # [N, D]
    last: int  # sequence number of the newest, 0 if there is none


def pending(connection: sqlite3.Connection, model: str, after: int, limit: int) -> list[Pending]:
    """Return the next spans past id `after` that have no vector of `model`."""
    rows = connection.execute(
        """SELECT s.id, s.session, s.text FROM spans s LEFT JOIN embeddings e ON e.span = s.id AND e.model = ?
           WHERE s.id > ? AND e.span IS NULL ORDER BY s.id LIMIT ?""",
        (model, after, limit),
    )
    return [Pending(*row) for row in rows]


def count_pending(connection: sqlite3.Connection, model: str) -> int:
    """Count the spans that have no vector of `model`."""
    return int(
        connection.execute(
            "SELECT (SELECT coalesce(sum(spans), 0) FROM sessions) - (SELECT count(*) FROM embeddings WHERE model = ?)",
            (model,),
        ).fetchone()[0]
    )


def store(connection: sqlite3.Connection, model: str, spans: Sequence[Pending], vectors: Vectors) -> None:
    """Store a vector [N, D] for each span; a span that was forgotten meanwhile is passed over."""
    for item, vector in zip(spans, vectors, strict=True):
        blob = vector.astype("<f4").tobytes()
        store_raw(connection, item.span, model, blob, vector_seal(item.span, model, blob))


def store_raw(connection: sqlite3.Connection, span: int, model: str, blob: bytes, seal: int) -> int:
    """Store a vector as bytes with its seal; return 1, or 0 when there is no such span."""
    return connection.execute(
        """INSERT OR REPLACE INTO embeddings (span, session, model, vector, seal)
           SELECT id, session, ?, ?, ? FROM spans WHERE id = ?""",
        (model, blob, seal, span),
    ).rowcount


def load(connection: sqlite3.Connection, session: int, model: str, after: int, dim: int) -> tuple[Stored, list[int]]:
    """Return the vectors stored past sequence number `after`, and the spans whose vector is damaged."""
    rows = connection.execute(
        "SELECT seq, span, vector, seal FROM embeddings WHERE session = ? AND model = ? AND seq > ? ORDER BY seq",
        (session, model, after),
    ).fetchall()
    whole: list[int] = []
    damaged: list[int] = []
    vectors: list[Vectors] = []
    for _, span, blob, seal in rows:
        vector = vector_of_row(span, model, blob, seal)
        if vector is None or vector.shape != (dim,):
            damaged.append(span)
        else:
            whole.append(span)
            vectors.append(vector)
    matrix = np.stack(vectors) if vectors else np.zeros((0, dim), np.float32)
    return Stored(np.array(whole, np.int64), matrix, rows[-1][0] if rows else after), damaged


def count(connection: sqlite3.Connection, session: int, model: str, upto: int) -> int:
    """Count the vectors stored up to sequence number `upto`: what an index that claims to hold them must hold."""
    return int(
        connection.execute(
            "SELECT count(*) FROM embeddings WHERE session = ? AND model = ? AND seq <= ?", (session, model, upto)
        ).fetchone()[0]
    )


def remove(connection: sqlite3.Connection, spans: Sequence[int]) -> None:
    """Remove damaged vectors; their spans are embedded again."""
    connection.executemany("DELETE FROM embeddings WHERE span = ?", [(span,) for span in spans])
