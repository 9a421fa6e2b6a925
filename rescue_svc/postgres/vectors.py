"""Vectors of spans: the table of each session, its HNSW index, and dense search."""

from collections.abc import Iterable
from contextlib import suppress
from typing import Literal

import psycopg
from psycopg.errors import UndefinedTable

from rescue_svc.postgres.connections import LOCK, Connections, transaction
from rescue_svc.store import Index, Pending, Vectors

# Up to here an exact scan takes a few milliseconds.
HNSW_FROM = 10_000
_BUILD_BYTES = 2**30  # maximum memory to build an index; beyond it the build uses the disk and is far slower


def store(connection: psycopg.Connection, model: str, spans: list[Pending], matrix: Vectors) -> set[int]:
    """Store vectors [N, D] and return their spans: all but those of sessions that were deleted or changed models."""
    # Does not block writers; a `forget` waits until the vectors are stored, and then drops them.
    sessions = connection.execute(
        "SELECT id FROM sessions WHERE id = ANY(%s) AND model = %s ORDER BY id FOR KEY SHARE",
        [list({item.session for item in spans}), model],
    ).fetchall()
    stored: set[int] = set()
    for (session,) in sessions:
        rows = [(item.span, vector) for item, vector in zip(spans, matrix, strict=True) if item.session == session]
        connection.cursor().executemany(
            f"""INSERT INTO vectors_{session:d} (span, vector) VALUES (%s, %s)
                ON CONFLICT (span) DO UPDATE SET vector = excluded.vector""",
            rows,
        )
        stored.update(span for span, _ in rows)
    return stored


def adopt(connection: psycopg.Connection, session: int, model: str) -> None:
    """Change the model of a session; vectors of another model are deleted, and its spans queued again."""
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
    """Build the index of large sessions; PostgreSQL updates it from then on."""
    rows = connection.execute(
        "SELECT id FROM sessions WHERE id = ANY(%s) AND spans >= %s AND to_regclass('nearest_' || id) IS NULL",
        [list(sessions), HNSW_FROM],
    )
    for (session,) in rows.fetchall():
        with suppress(UndefinedTable):  # deleted meanwhile
            build(connection, session)


def build(connection: psycopg.Connection, session: int) -> None:
    """Build the index of a session, unless another service does; searches scan meanwhile."""
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
    rows = connections.rows_of_session(f"SELECT count(*) FROM vectors_{session:d} WHERE {_of_model(session)}", model)
    return int(rows[0][0]) if rows else 0


def _of_model(session: int) -> str:
    """Return the SQL condition that the model of a session is the last parameter."""
    return f"EXISTS (SELECT FROM sessions WHERE id = {session:d} AND model = %s)"


class PostgresIndex(Index):
    """The vectors [N, D] of one model; none of them is in the memory of the service."""

    def __init__(self, connections: Connections, model: str, name: Literal["hnsw", "exact"]) -> None:
        self.name = name
        self._connections = connections
        self._model = model

    def resume(self, session: int) -> int:
        return count(self._connections, session, self._model)

    def search(self, session: int, query: Vectors, limit: int, excluded: set[int]) -> dict[int, float]:
        condition = "NOT (span = ANY(%s)) AND " if excluded else ""
        # The planner finds the index by its expression, which has the cast.
        vector = f"vector::vector({query.size:d})" if self.name == "hnsw" else "vector"
        rows = self._connections.rows_of_session(
            f"""SELECT span, -distance FROM (
                SELECT span, {vector} <#> %s AS distance FROM vectors_{session:d}
                WHERE {condition}{_of_model(session)} ORDER BY distance LIMIT {limit:d}) AS nearest""",
            query,
            *([list(excluded)] if excluded else []),
            self._model,
        )
        return dict(rows)

    def similarities(self, session: int, query: Vectors, spans: Iterable[int]) -> dict[int, float]:
        statement = f"""SELECT span, -(vector <#> %s) FROM vectors_{session:d}
                        WHERE span = ANY(%s) AND {_of_model(session)}"""
        return dict(self._connections.rows_of_session(statement, query, list(spans), self._model))
