"""Is the database what was written? Spans are the truth and must be whole; words and vectors can be made again."""

import logging
import sqlite3

from rescue_svc.errors import StoreDamagedError
from rescue_svc.store import vectors, words
from rescue_svc.store.records import COLUMNS, span_of_row, vector_of_row

log = logging.getLogger(__name__)


def verify(connection: sqlite3.Connection, *, rebuild_words: bool) -> None:
    """Check every row against its seal; make damaged words and vectors again.

    Raises StoreDamagedError when a span, a session or SQLite's own structure is not what was written.
    """
    for table in ("sessions", "spans", "embeddings"):
        _sqlite_check(connection, f"PRAGMA integrity_check({table})")
    if connection.execute("PRAGMA foreign_key_check").fetchone():
        raise StoreDamagedError(_message("rows point to a session or span that is gone"))
    for session, name in connection.execute("SELECT id, name FROM sessions").fetchall():
        _check_spans(connection, session, name)
    _repair_vectors(connection)
    for (session,) in connection.execute("SELECT id FROM sessions").fetchall():
        if rebuild_words or not words.is_whole(connection, session):
            connection.execute("BEGIN IMMEDIATE")
            words.rebuild(connection, session)
            connection.execute("COMMIT")
    _sqlite_check(connection, "PRAGMA integrity_check")


def _sqlite_check(connection: sqlite3.Connection, pragma: str) -> None:
    found = connection.execute(pragma).fetchone()[0]
    if found != "ok":
        raise StoreDamagedError(_message(f"SQLite finds: {found.splitlines()[0]}"))


def _check_spans(connection: sqlite3.Connection, session: int, name: str) -> None:
    count = size = 0
    for row in connection.execute(f"SELECT {COLUMNS} FROM spans WHERE session = ?", (session,)):  # noqa: S608
        span = span_of_row(row, name)
        count += 1
        size += len(span.text.encode())
    declared = connection.execute("SELECT spans, text_bytes FROM sessions WHERE id = ?", (session,)).fetchone()
    if declared != (count, size):
        raise StoreDamagedError(_message(f"session {name} should hold {declared[0]} spans and holds {count}"))


def _repair_vectors(connection: sqlite3.Connection) -> None:
    rows = connection.execute("SELECT span, model, vector, seal FROM embeddings")
    damaged = [span for span, model, blob, seal in rows if vector_of_row(span, model, blob, seal) is None]
    if damaged:
        log.warning("vectors damaged on disk are made again", extra={"vectors": len(damaged)})
        connection.execute("BEGIN IMMEDIATE")
        vectors.remove(connection, damaged)
        connection.execute("COMMIT")


def _message(found: str) -> str:
    return (
        f"the database is damaged: {found}; `mlx-tq-rescue rebuild` keeps every span that is whole, or restore a backup"
    )
