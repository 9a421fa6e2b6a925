"""Verification of the database. Spans must be intact; words and vectors can be recomputed."""

import logging
import sqlite3

from rescue_svc.errors import StoreDamagedError
from rescue_svc.store import fts, session_tables
from rescue_svc.store.files import transaction
from rescue_svc.store.records import COLUMNS, span_of_row, vector_of_row

log = logging.getLogger(__name__)


def verify(connection: sqlite3.Connection, *, rebuild_words: bool) -> None:
    """Check every row against its seal, and recompute damaged words and vectors; raise StoreDamagedError for others."""
    for table in ("sessions", "spans", "embeddings"):
        _sqlite_check(connection, f"PRAGMA integrity_check({table})")
    if connection.execute("PRAGMA foreign_key_check").fetchone():
        raise StoreDamagedError(_message("rows refer to a session or span that does not exist"))
    sessions = connection.execute("SELECT id, name, spans, text_bytes FROM sessions").fetchall()
    for session, name, spans, size in sessions:
        table = session_tables.spans_with_text(session)
        rows = connection.execute(f"SELECT {COLUMNS} FROM {table}")  # noqa: S608
        sizes = [len(span_of_row(row, name).text.encode()) for row in rows]
        if (spans, size) != (len(sizes), sum(sizes)):
            raise StoreDamagedError(_message(f"session {name} should have {spans} spans and has {len(sizes)}"))
    damaged = []
    for session, *_ in sessions:
        table = session_tables.vectors_with_seal(session)
        rows = connection.execute(f"SELECT span, model, vector, seal FROM {table}")  # noqa: S608
        damaged += [span for span, model, blob, seal in rows if vector_of_row(span, model, blob, seal) is None]
    if damaged:
        log.warning("damaged vectors are recomputed", extra={"vectors": len(damaged)})
        with transaction(connection):
            connection.executemany("DELETE FROM embeddings WHERE span = ?", ((span,) for span in damaged))
    for session, *_ in sessions:
        if rebuild_words or not fts.is_whole(connection, session):
            texts = connection.execute(f"SELECT id, text FROM texts_{session:d}").fetchall()  # noqa: S608
            with transaction(connection):
                fts.drop(connection, session)
                fts.create(connection, session)
                for span, text in texts:
                    fts.add(connection, session, span, text)
    _sqlite_check(connection, "PRAGMA integrity_check")


def _sqlite_check(connection: sqlite3.Connection, pragma: str) -> None:
    result = connection.execute(pragma).fetchone()[0]
    if result != "ok":
        raise StoreDamagedError(_message(f"SQLite finds: {result.splitlines()[0]}"))


def _message(fault: str) -> str:
    return f"the database is damaged: {fault}; `mlx-tq-rescue rebuild` keeps every intact span, or restore a backup"
