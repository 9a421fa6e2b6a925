"""Vectors of spans: the queue of those that wait, the table of each session, and its index by HNSW."""

from collections.abc import Iterable
from contextlib import suppress

import psycopg
from psycopg.errors import UndefinedTable

from rescue_svc.postgres.connections import LOCK, Connections
from rescue_svc.postgres.transactions import transaction
from rescue_svc.store import Pending, Vectors

# Up to here an exact scan takes a few milliseconds.
HNSW_FROM = 10_000
_BUILD_BYTES = 2**30  # at most so much memory for building an index, which beyond it goes to disk and takes far longer


def take(connection: psycopg.Connection, but: set[int], limit: int) -> dict[int, int]:
    """Take the next spans that no one else has, until the transaction ends; return their sessions."""
    rows = connection.execute(
        "SELECT span, session FROM queue WHERE NOT (span = ANY(%s)) ORDER BY span LIMIT %s FOR UPDATE SKIP LOCKED",
        [list(but), limit],
    )
    return dict(rows.fetchall())


def leave_queue(connection: psycopg.Connection, spans: Iterable[int]) -> None:
    """Remove spans that wait no more."""
    connection.execute("DELETE FROM queue WHERE span = ANY(%s)", [list(spans)])


def store(connection: psycopg.Connection, model: str, spans: list[Pending], matrix: Vectors) -> None:
    """Store a vector [N, D] for each span, but of sessions that were forgotten or taken over by another model."""
    sessions = {item.session for item in spans}
    # Shared with writers; who forgets the session waits until its vectors are in, and then drops them.
    rows = connection.execute(
        "SELECT id FROM sessions WHERE id = ANY(%s) AND model = %s ORDER BY id FOR KEY SHARE", [list(sessions), model]
    )
    for (session,) in rows.fetchall():
        mine = [(item.span, vector) for item, vector in zip(spans, matrix, strict=True) if item.session == session]
        connection.cursor().executemany(
            f"""INSERT INTO vectors_{session:d} (span, vector) VALUES (%s, %s)
                ON CONFLICT (span) DO UPDATE SET vector = excluded.vector""",
            mine,
        )
        leave_queue(connection, [span for span, _ in mine])


def adopt(connection: psycopg.Connection, session: int, model: str) -> None:
    """Make a session one of this model; vectors of another go, and its spans wait again."""
    with transaction(connection):
        row = connection.execute("SELECT model FROM sessions WHERE id = %s FOR NO KEY UPDATE", [session]).fetchone()
        if row is None or row[0] == model:
            return
        if row[0] is not None:
            connection.execute(f"DROP INDEX IF EXISTS nearest_{session:d}; TRUNCATE vectors_{session:d}")
            connection.execute(
                f"INSERT INTO queue SELECT id, {session:d} FROM spans_{session:d} ON CONFLICT DO NOTHING"
            )
        connection.execute("UPDATE sessions SET model = %s WHERE id = %s", [model, session])


def index_large(connection: psycopg.Connection, sessions: Iterable[int]) -> None:
    """Build the index of sessions that have grown large; it keeps up by itself from then on."""
    rows = connection.execute(
        "SELECT id FROM sessions WHERE id = ANY(%s) AND spans >= %s AND to_regclass('nearest_' || id) IS NULL",
        [list(sessions), HNSW_FROM],
    )
    for (session,) in rows.fetchall():
        with suppress(UndefinedTable):  # forgotten meanwhile
            build(connection, session)


def build(connection: psycopg.Connection, session: int) -> None:
    """Build the index of a session, unless another service does; who searches meanwhile scans."""
    with transaction(connection):
        if connection.execute("SELECT pg_try_advisory_xact_lock(%s)", [(LOCK << 32) + session]).fetchone() != (True,):
            return
        connection.execute("SET LOCAL statement_timeout = 0; SET LOCAL lock_timeout = 0")
        count, dim = connection.execute(
            f"SELECT count(*), max(vector_dims(vector)) FROM vectors_{session:d}"
        ).fetchone() or (0, 0)
        memory = min(_BUILD_BYTES, 2**26 + count * (4 * dim + 1024))
        connection.execute(f"SET LOCAL maintenance_work_mem = '{memory // 1024}kB'")
        connection.execute(
            f"""CREATE INDEX IF NOT EXISTS nearest_{session:d} ON vectors_{session:d}
                USING hnsw ((vector::vector({dim:d})) vector_ip_ops)"""
        )


def count(connections: Connections, session: int, model: str) -> int:
    """Count a session's vectors of a model."""
    found = connections.rows_of_session(f"SELECT count(*) FROM vectors_{session:d} WHERE {of_model(session)}", model)
    return int(found[0][0]) if found else 0


def of_model(session: int) -> str:
    """Return the condition that a session's vectors are of the model that is the statement's last parameter."""
    return f"EXISTS (SELECT FROM sessions WHERE id = {session:d} AND model = %s)"
