"""The tables that each session has of its own: its texts, its vectors and its words.

Forgetting a session drops them, and `secure_delete` zeroes every page of a dropped table. It zeroes deleted rows of a
shared table too, but not the copies that SQLite leaves in a page when it has moved rows to the next one.
"""

import sqlite3

from rescue_svc.errors import StoreDamagedError
from rescue_svc.store import fts


def create(connection: sqlite3.Connection, session: int) -> None:
    connection.execute(f"CREATE TABLE texts_{session:d} (id INTEGER PRIMARY KEY, text TEXT NOT NULL) STRICT")
    connection.execute(f"CREATE TABLE vectors_{session:d} (span INTEGER PRIMARY KEY, vector BLOB NOT NULL) STRICT")
    fts.create(connection, session)


def drop(connection: sqlite3.Connection, session: int) -> None:
    connection.execute(f"DROP TABLE IF EXISTS texts_{session:d}")
    connection.execute(f"DROP TABLE IF EXISTS vectors_{session:d}")
    fts.drop(connection, session)


def add_text(connection: sqlite3.Connection, session: int, span: int, text: str) -> None:
    connection.execute(f"INSERT INTO texts_{session:d} VALUES (?, ?)", (span, text))  # noqa: S608
    fts.add(connection, session, span, text)


def read_text(connection: sqlite3.Connection, session: int, span: int) -> str:
    row = connection.execute(f"SELECT text FROM texts_{session:d} WHERE id = ?", (span,)).fetchone()  # noqa: S608
    if row is None:
        raise StoreDamagedError(f"the text of span {span} is lost; stop the service, then `mlx-tq-rescue rebuild`")
    return str(row[0])


def spans_with_text(session: int) -> str:
    """Return the rows of a session's spans as an SQL table; the text of a damaged one may be NULL."""
    return f"(SELECT * FROM spans LEFT JOIN texts_{session:d} USING (id) WHERE session = {session:d})"  # noqa: S608


def vectors_with_seal(session: int) -> str:
    """Return the rows of a session's vectors as an SQL table; a damaged one may be NULL."""
    return f"(SELECT * FROM embeddings LEFT JOIN vectors_{session:d} USING (span) WHERE session = {session:d})"  # noqa: S608


def insert_vector(connection: sqlite3.Connection, span: int, model: str, vector: bytes, seal: int) -> int:
    """Store the bytes of a vector; return 1, or 0 if the span was deleted."""
    row = connection.execute(
        """INSERT OR REPLACE INTO embeddings (span, session, model, seal)
           SELECT id, session, ?, ? FROM spans WHERE id = ? RETURNING session""",
        (model, seal, span),
    ).fetchone()
    if row is None:
        return 0
    connection.execute(f"INSERT OR REPLACE INTO vectors_{row[0]:d} VALUES (?, ?)", (span, vector))  # noqa: S608
    return 1
