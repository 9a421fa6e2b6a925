"""Spans of all sessions in PostgreSQL: what a call returned from is in its log, on the disk."""

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import psycopg
from psycopg.errors import UndefinedTable

from rescue_svc.errors import SessionFullError, SessionNotFoundError, StoreFullError
from rescue_svc.postgres import vectors, words
from rescue_svc.postgres.connections import Connections
from rescue_svc.postgres.schema import create_tables, drop_tables, migrate
from rescue_svc.postgres.transactions import transaction
from rescue_svc.settings import Caps
from rescue_svc.store import NewSpan, Pending, Session, Span, Vectors

log = logging.getLogger(__name__)

_SESSION = "id, name, spans, text_bytes, created, updated"
_SPAN = "start, stop, layer, score, text, id"
# Spans, queue and counts in one exchange. The row of the session is locked, so no one else adds the same digest.
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
        updated = greatest(updated, %(now)s)
    FROM (SELECT count(*) AS n, coalesce(sum(size), 0) AS size, coalesce(sum(length), 0) AS length FROM added) AS sums
    WHERE id = {session:d} RETURNING n, spans, (SELECT sum(spans) FROM sessions) + n"""


class PostgresStore:
    """Spans of all sessions, in a database that several services use at once. Safe to call from many threads.

    `hnsw` says whether large sessions get an index by HNSW. The caps on all sessions together are those of one service:
    where several write at the same moment, each may fill them.

    Raises StoreUnavailableError without the rights to make its tables, StoreDamagedError for a newer version's.
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

    def about(self) -> str:
        """Say where the spans are, and what of forgotten text the server removes at once."""
        server = self._connections.server
        gone = "with the server's checkpoints"
        if server.may_checkpoint:
            gone = "at once" if server.may_empty_log else "at once, its log when that is used again"
        return (
            f"{self._connections.where}, PostgreSQL {server.version}, pgvector {server.vector}, page checksums "
            f"{'on' if server.checksums else 'off'}, forgotten text leaves the disk {gone}"
        )

    def close(self) -> None:
        """Close all connections."""
        self._connections.close()

    # Sessions and spans

    def write(self, name: str, spans: Sequence[NewSpan]) -> tuple[int, int]:
        """Store spans in one transaction; return how many are new and how many the session then holds.

        Raises SessionFullError or StoreFullError, and then nothing of the call is stored.
        """
        now = time.time()
        new: dict[bytes, NewSpan] = {}
        for span in spans:
            new.setdefault(span.digest(), span)  # the first of those that are the same
        kept = list(new.values())
        plain = [words.plain(span.text) for span in kept]
        rows = {
            "starts": [span.start for span in kept],
            "stops": [span.stop for span in kept],
            "layers": [span.layer for span in kept],
            "scores": [span.score for span in kept],
            "texts": [span.text for span in kept],
            "digests": list(new),
            "lengths": [len(found) for found in plain],
            "plain": [" ".join(found) for found in plain],
            "now": now,
        }
        with self._connections.take() as connection, transaction(connection):
            session = self._session_for_writing(connection, name, now)
            added, total, everywhere = connection.execute(_ADD.format(session=session), rows).fetchone() or (0, 0, 0)
            self._check_caps(name, total, everywhere)
        return added, total

    def _session_for_writing(self, connection: psycopg.Connection, name: str, now: float) -> int:
        """Return a session with its row locked until the transaction ends."""
        while True:
            found = connection.execute("SELECT id FROM sessions WHERE name = %s FOR NO KEY UPDATE", [name]).fetchone()
            if found:
                return int(found[0])
            if connection.execute("SELECT count(*) >= %s FROM sessions", [self._caps.sessions]).fetchone() == (True,):
                raise StoreFullError(
                    f"there are {self._caps.sessions} sessions, the cap; forget some or raise RESCUE_MAX_SESSIONS"
                )
            made = connection.execute(
                "INSERT INTO sessions (name, created, updated) VALUES (%s, %s, %s) ON CONFLICT DO NOTHING RETURNING id",
                [name, now, now],
            ).fetchone()
            if made:  # else another service has just made it
                create_tables(connection, made[0])
                return int(made[0])

    def _check_caps(self, name: str, total: int, everywhere: int) -> None:
        if total > self._caps.session_spans:
            raise SessionFullError(
                f"session {name} would hold {total} spans, the cap is {self._caps.session_spans}; "
                "forget it, use another, or raise RESCUE_MAX_SESSION_SPANS"
            )
        if everywhere > self._caps.spans:
            raise StoreFullError(
                f"the store would hold {everywhere} spans, the cap is {self._caps.spans}; "
                "forget sessions or raise RESCUE_MAX_SPANS"
            )

    def session(self, name: str) -> Session | None:
        """Return a session, or None if it was never written or is forgotten."""
        rows = self._rows(f"SELECT {_SESSION} FROM sessions WHERE name = %s", name)
        return Session(*rows[0]) if rows else None

    def sessions(self) -> list[Session]:
        """Return all sessions, the last written first."""
        return [Session(*row) for row in self._rows(f"SELECT {_SESSION} FROM sessions ORDER BY updated DESC, id DESC")]

    def spans(self, session: Session, ids: Sequence[int] | None = None) -> list[Span]:
        """Return the session's spans with these ids, or all, in the order of writing."""
        every = f"SELECT {_SPAN} FROM spans_{session.id:d}"
        if ids is None:
            return [Span(*row) for row in self._connections.rows_of_session(f"{every} ORDER BY id")]
        return [
            Span(*row)
            for row in self._connections.rows_of_session(f"{every} WHERE id = ANY(%s) ORDER BY id", list(ids))
        ]

    def page(self, session: Session, first: int, count: int) -> list[Span]:
        """Return `count` spans in the order of writing, behind the `first` ones."""
        statement = f"SELECT {_SPAN} FROM spans_{session.id:d} ORDER BY id LIMIT %s OFFSET %s"
        return [Span(*row) for row in self._connections.rows_of_session(statement, count, first)]

    def covered(self, session: Session, ranges: Sequence[tuple[int, int]]) -> set[int]:
        """Return the ids of spans that lie wholly in one of `ranges`."""
        rows = self._connections.rows_of_session(
            f"""SELECT id FROM unnest(%s::bigint[], %s::bigint[]) AS r(low, high)
                JOIN spans_{session.id:d} AS s ON s.start >= low AND s.start < high AND s.stop <= high""",
            [low for low, _ in ranges],
            [high for _, high in ranges],
        )
        return {row[0] for row in rows}

    def bm25(self, session: Session, query: str, limit: int, excluded: set[int]) -> dict[int, float]:
        """Return the best span ids by BM25 with their scores; nothing for a session that was forgotten meanwhile."""
        common = self._common_words[session.id]
        with self._connections.take() as connection, suppress(UndefinedTable):
            return words.search(connection, session.id, session.spans, query, limit, excluded, common)
        return {}

    def forget(self, name: str) -> Session:
        """Drop a session's tables, and have their files and the log's removed as far as the role may ask for that.

        Returns what it was. Raises SessionNotFoundError.
        """
        with self._connections.take() as connection:
            with transaction(connection):
                row = connection.execute(
                    f"DELETE FROM sessions WHERE name = %s RETURNING {_SESSION}",
                    [name],
                ).fetchone()
                if row is None:
                    raise SessionNotFoundError(f"no session {name}; `GET /sessions` lists all")
                session = Session(*row)
                drop_tables(connection, session.id)
            if self._connections.server.may_empty_log:
                connection.execute("SELECT pg_switch_wal()")
            if self._connections.server.may_checkpoint:
                connection.execute("CHECKPOINT")
        self._common_words.pop(session.id, None)
        return session

    def _rows(self, statement: str, *parameters: Any) -> list[tuple[Any, ...]]:
        with self._connections.take() as connection:
            return connection.execute(statement, parameters).fetchall()

    # Vectors

    def embed_next(self, model: str, limit: int, embed: Callable[[list[Pending]], Vectors]) -> bool:
        """Give up to `limit` spans that wait the vectors that `embed` makes; tell whether there were any.

        They are this service's until the transaction ends, and free again however it ends.
        """
        self._adopt_sessions(model)
        with self._connections.take() as connection:
            with transaction(connection):
                taken = vectors.take(connection, self._given_up, limit)
                waiting = self._texts(taken)
                if waiting:
                    vectors.store(connection, model, waiting, embed(waiting))
                vectors.leave_queue(connection, set(taken) - {item.span for item in waiting})
            if waiting and self._hnsw:
                vectors.index_large(connection, {item.session for item in waiting})
        return bool(taken)

    def _adopt_sessions(self, model: str) -> None:
        """Make sessions new to this model its own; what another made of them is made again."""
        for (session,) in self._rows("SELECT id FROM sessions WHERE model IS DISTINCT FROM %s", model):
            with self._connections.take() as connection:
                vectors.adopt(connection, session, model)

    def _texts(self, taken: dict[int, int]) -> list[Pending]:
        """Return the spans with their texts, read beside the transaction, in which they would keep a DROP waiting."""
        by_session = defaultdict(list)
        for span, session in taken.items():
            by_session[session].append(span)
        return [
            Pending(span, session, text)
            for session, spans in by_session.items()
            for span, text in self._connections.rows_of_session(
                f"SELECT id, text FROM spans_{session:d} WHERE id = ANY(%s) ORDER BY id", spans
            )
        ]

    def give_up(self, model: str, span: int) -> None:
        """Leave a span without a vector until the next start: it cannot be embedded."""
        self._given_up.add(span)

    def count_pending(self, model: str) -> int:
        """Count the spans that have no vector of `model`."""
        rows = self._rows(
            """SELECT (SELECT count(*) FROM queue JOIN sessions ON id = session WHERE model IS NULL OR model = %s)
                    + (SELECT coalesce(sum(spans), 0) FROM sessions WHERE model <> %s)""",
            model,
            model,
        )
        return int(rows[0][0])

    def count_vectors(self, session: int, model: str) -> int:
        """Count a session's vectors."""
        return vectors.count(self._connections, session, model)
