"""The store in PostgreSQL. What a call wrote is in its log on disk when it returns."""

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import psycopg
from psycopg.errors import UndefinedTable

from rescue_svc.postgres import vectors, words
from rescue_svc.postgres.connections import Connections, transaction
from rescue_svc.postgres.schema import create_tables, migrate
from rescue_svc.settings import Caps
from rescue_svc.store import NewSpan, Pending, Session, Span, Store, Vectors, no_session, plain_words

log = logging.getLogger(__name__)

_SESSION = "id, name, spans, text_bytes, created, updated, expires"
_SPAN = "start, stop, layer, score, text, id"
# Spans, queue and counts in one round trip. The session's row is locked, so that no other service adds the same digest.
_ADD = """
    WITH added AS (
        INSERT INTO spans_{session:d} (id, start, stop, layer, score, text, length, digest, words)
        SELECT nextval('span_ids'), start, stop, layer, score, text, length, digest, to_tsvector('words', plain) FROM (
            SELECT * FROM unnest(%(starts)s::bigint[], %(stops)s::bigint[], %(layers)s::integer[],
                %(scores)s::double precision[], %(texts)s::text[], %(lengths)s::integer[], %(digests)s::bytea[],
                %(plain)s::text[]) WITH ORDINALITY AS new(start, stop, layer, score, text, length, digest, plain, place)
            WHERE NOT EXISTS (SELECT FROM spans_{session:d} AS old WHERE old.digest = new.digest) ORDER BY place) AS new
        RETURNING id, length, octet_length(text) AS size
    ), waiting AS (
        INSERT INTO queue (span, session) SELECT id, {session:d} FROM added
    )
    UPDATE sessions SET spans = spans + n, text_bytes = text_bytes + size, words = words + length,
        updated = greatest(updated, %(now)s),
        expires = CASE WHEN expires IS NOT NULL AND %(expires)s::float8 IS NOT NULL
            THEN greatest(expires, %(expires)s::float8) END
    FROM (SELECT count(*) AS n, coalesce(sum(size), 0) AS size, coalesce(sum(length), 0) AS length FROM added) AS sums
    WHERE id = {session:d} RETURNING n, spans, (SELECT sum(spans) FROM sessions) + n"""


class PostgresStore(Store):
    """Spans of all sessions, in a database that several services can use concurrently.

    With `hnsw`, large sessions get an HNSW index. Each of several services that write at the same moment may reach the
    limits on all sessions together.
    """

    def __init__(self, connections: Connections, caps: Caps, *, hnsw: bool) -> None:
        self._connections = connections
        self._caps = caps
        self._hnsw = hnsw
        self._given_up: set[int] = set()
        self._common_words: defaultdict[int, dict[str, int]] = defaultdict(dict)
        try:
            with connections.take() as connection:
                migrate(connection)
        except BaseException:
            connections.close()
            raise
        if not connections.server.durable:
            log.warning("fsync or full_page_writes is off on the server: a power cut may lose what was acknowledged")

    def describe(self) -> str:
        server = self._connections.server
        removal = "with the server's checkpoints"
        if server.may_checkpoint:
            removal = "immediately" if server.may_empty_log else "immediately, its log when that is reused"
        return (
            f"{self._connections.where}, PostgreSQL {server.version}, pgvector {server.vector}, page checksums "
            f"{'on' if server.checksums else 'off'}, deleted text leaves the disk {removal}"
        )

    def close(self) -> None:
        self._connections.close()

    def write(self, name: str, spans: Sequence[NewSpan], expires: float | None = None) -> tuple[int, int]:
        now = time.time()
        new: dict[bytes, NewSpan] = {}
        for span in spans:
            new.setdefault(span.digest(), span)
        unique = list(new.values())
        plain = [plain_words(span.text) for span in unique]
        rows = {
            "starts": [span.start for span in unique],
            "stops": [span.stop for span in unique],
            "layers": [span.layer for span in unique],
            "scores": [span.score for span in unique],
            "texts": [span.text for span in unique],
            "digests": list(new),
            "lengths": [len(tokens) for tokens in plain],
            "plain": [" ".join(tokens) for tokens in plain],
            "now": now,
            "expires": expires,
        }
        with self._connections.take() as connection, transaction(connection):
            session = self._session_for_writing(connection, name, now, expires)
            added, total, stored = connection.execute(_ADD.format(session=session), rows).fetchone() or (0, 0, 0)
            self._caps.check_spans(name, total, stored)
        return added, total

    def renew(self, name: str, expires: float) -> Session:
        # greatest ignores NULL
        statement = f"""UPDATE sessions SET expires = CASE WHEN expires IS NOT NULL THEN greatest(expires, %s) END
                        WHERE name = %s RETURNING {_SESSION}"""
        rows = self._rows(statement, expires, name)
        if not rows:
            raise no_session(name)
        return Session(*rows[0])

    def _session_for_writing(self, connection: psycopg.Connection, name: str, now: float, expires: float | None) -> int:
        while True:
            row = connection.execute("SELECT id FROM sessions WHERE name = %s FOR NO KEY UPDATE", [name]).fetchone()
            if row:
                return int(row[0])
            (sessions,) = connection.execute("SELECT count(*) FROM sessions").fetchone() or (0,)
            self._caps.check_new_session(sessions)
            row = connection.execute(
                """INSERT INTO sessions (name, created, updated, expires) VALUES (%s, %s, %s, %s)
                   ON CONFLICT DO NOTHING RETURNING id""",
                [name, now, now, expires],
            ).fetchone()
            if row:  # else another service has just inserted it
                create_tables(connection, row[0])
                return int(row[0])

    def session(self, name: str) -> Session | None:
        rows = self._rows(f"SELECT {_SESSION} FROM sessions WHERE name = %s", name)
        return Session(*rows[0]) if rows else None

    def sessions(self) -> list[Session]:
        return [Session(*row) for row in self._rows(f"SELECT {_SESSION} FROM sessions ORDER BY updated DESC, id DESC")]

    def spans(self, session: Session, ids: Sequence[int] | None = None) -> list[Span]:
        condition, parameters = ("", []) if ids is None else ("WHERE id = ANY(%s)", [list(ids)])
        statement = f"SELECT {_SPAN} FROM spans_{session.id:d} {condition} ORDER BY id"
        return [Span(*row) for row in self._connections.rows_of_session(statement, *parameters)]

    def page(self, session: Session, first: int, count: int) -> list[Span]:
        statement = f"SELECT {_SPAN} FROM spans_{session.id:d} ORDER BY id LIMIT %s OFFSET %s"
        return [Span(*row) for row in self._connections.rows_of_session(statement, count, first)]

    def covered(self, session: Session, ranges: Sequence[tuple[int, int]]) -> set[int]:
        rows = self._connections.rows_of_session(
            f"""SELECT id FROM unnest(%s::bigint[], %s::bigint[]) AS r(low, high)
                JOIN spans_{session.id:d} AS s ON s.start >= low AND s.start < high AND s.stop <= high""",
            [low for low, _ in ranges],
            [high for _, high in ranges],
        )
        return {row[0] for row in rows}

    def bm25(self, session: Session, query: str, limit: int, excluded: set[int]) -> dict[int, float]:
        common = self._common_words[session.id]
        with self._connections.take() as connection, suppress(UndefinedTable):
            return words.search(connection, session, query, limit, excluded, common)
        return {}

    def forget(self, name: str, expired_at: float | None = None) -> Session:
        with self._connections.take() as connection, transaction(connection):
            statement = f"""DELETE FROM sessions WHERE name = %s AND (%s::float8 IS NULL OR expires <= %s)
                            RETURNING {_SESSION}"""
            row = connection.execute(statement, [name, expired_at, expired_at]).fetchone()
            if row is None:
                raise no_session(name)
            session = Session(*row)
            connection.execute(f"DROP TABLE spans_{session.id:d}, vectors_{session.id:d}")
        self._common_words.pop(session.id, None)
        return session

    def purge(self) -> None:
        with self._connections.take() as connection:
            if self._connections.server.may_empty_log:
                connection.execute("SELECT pg_switch_wal()")
            if self._connections.server.may_checkpoint:
                connection.execute("CHECKPOINT")

    def _rows(self, statement: str, *parameters: Any) -> list[tuple[Any, ...]]:
        with self._connections.take() as connection:
            return connection.execute(statement, parameters).fetchall()

    def embed_next(self, model: str, limit: int, embed: Callable[[list[Pending]], Vectors]) -> bool:
        for (session,) in self._rows("SELECT id FROM sessions WHERE model IS DISTINCT FROM %s", model):
            with self._connections.take() as connection:
                vectors.adopt(connection, session, model)
        with self._connections.take() as connection:
            with transaction(connection):
                # Until the transaction ends, no other service takes these spans.
                taken = connection.execute(
                    """SELECT session, span FROM queue WHERE NOT (span = ANY(%s)) ORDER BY span LIMIT %s
                       FOR UPDATE SKIP LOCKED""",
                    [list(self._given_up), limit],
                ).fetchall()
                by_session = defaultdict(list)
                for session, span in taken:
                    by_session[session].append(span)
                pending = [
                    Pending(span, session, text)
                    for session, spans in by_session.items()
                    # On another connection: in the transaction this would block a DROP.
                    for span, text in self._connections.rows_of_session(
                        f"SELECT id, text FROM spans_{session:d} WHERE id = ANY(%s) ORDER BY id", spans
                    )
                ]
                stored = vectors.store(connection, model, pending, embed(pending)) if pending else set()
                waiting = {item.span for item in pending} - stored
                connection.execute(
                    "DELETE FROM queue WHERE span = ANY(%s)", [[span for _, span in taken if span not in waiting]]
                )
            if pending and self._hnsw:
                vectors.index_large(connection, {item.session for item in pending})
        return bool(taken)

    def give_up(self, model: str, span: int) -> None:
        self._given_up.add(span)

    def count_pending(self, model: str) -> int:
        rows = self._rows(
            """SELECT (SELECT count(*) FROM queue JOIN sessions ON id = session WHERE model IS NULL OR model = %s)
                    + (SELECT coalesce(sum(spans), 0) FROM sessions WHERE model <> %s)""",
            model,
            model,
        )
        return int(rows[0][0])

    def count_vectors(self, session: int, model: str) -> int:
        return vectors.count(self._connections, session, model)
