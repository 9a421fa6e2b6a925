"""The store in SQLite. What a call wrote is on disk when it returns."""

import logging
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rescue_svc.errors import StoreUnavailableError
from rescue_svc.settings import Caps
from rescue_svc.store import check, files, fts, session_tables
from rescue_svc.store.interface import Store, no_session
from rescue_svc.store.migrations import migrate
from rescue_svc.store.records import (
    COLUMNS,
    NewSpan,
    Pending,
    Session,
    Span,
    Vectors,
    span_of_row,
    vector_of_row,
    vector_seal,
)

log = logging.getLogger(__name__)

READERS = 4
_SESSION = "id, name, spans, text_bytes, created, updated, expires"
_SESSIONS = f"SELECT {_SESSION} FROM sessions"  # noqa: S608


class SqliteStore(Store):
    """Spans of all sessions in one database, which one process opens."""

    def __init__(self, directory: Path, caps: Caps) -> None:
        self.directory = directory
        self._caps = caps
        self._lock = files.DirectoryLock(directory)
        self._writing = threading.Lock()
        self._readers: queue.LifoQueue[sqlite3.Connection] = queue.LifoQueue()
        self._common_words: dict[int, dict[str, int]] = {}
        self._embedded: dict[str, int] = {}  # by model: the last span with a vector, or that was given up
        path = directory / files.DATABASE
        with ExitStack() as on_failure:
            on_failure.callback(self._lock.release)
            try:
                with files.sqlite_errors():
                    trust = files.trust(directory)
                    self._writer = on_failure.enter_context(closing(files.connect(path)))
                    migrate(self._writer)
                    if trust in ("crashed", "altered"):
                        fault = "the database was not closed cleanly, or was changed; checking every row"
                        log.warning(fault, extra={"trust": trust})
                        check.verify(self._writer, rebuild_words=trust == "altered")
                    # A crash after a committed DELETE may keep old text in the log.
                    self._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)")
                    files.seal_open(directory)
                    (directory / files.INDEXES).mkdir(exist_ok=True, mode=0o700)
                    for _ in range(READERS):
                        self._readers.put(on_failure.enter_context(closing(files.connect(path))))
            except OSError as error:
                raise StoreUnavailableError(f"data directory {directory} cannot be used: {error}") from error
            on_failure.pop_all()

    def describe(self) -> str:
        return str(self.directory)

    def close(self) -> None:
        with self._writing, ExitStack() as closed_last, files.sqlite_errors():
            closed_last.callback(self._lock.release)
            with closing(self._writer), ExitStack() as readers:
                for _ in range(READERS):
                    readers.enter_context(closing(self._readers.get()))
                self._purge_log()
            files.seal_closed(self.directory)

    @contextmanager
    def _write(self) -> Iterator[sqlite3.Connection]:
        with self._writing, files.sqlite_errors(), files.transaction(self._writer):
            yield self._writer

    @contextmanager
    def _read(self) -> Iterator[sqlite3.Connection]:
        reader = self._readers.get()
        try:
            with files.sqlite_errors():
                reader.execute("BEGIN")
                try:
                    yield reader
                finally:
                    reader.execute("ROLLBACK")
        finally:
            self._readers.put(reader)

    def write(self, name: str, spans: Sequence[NewSpan], expires: float | None = None) -> tuple[int, int]:
        now = time.time()
        with self._write() as connection:
            session = self._session_for_writing(connection, name, now, expires)
            new = []
            for span in spans:
                row = connection.execute(
                    """INSERT INTO spans (session, start, stop, layer, score, digest, seal)
                       VALUES (?, ?, ?, ?, ?, ?, ?)
                       ON CONFLICT (session, digest) DO NOTHING RETURNING id""",
                    (session, span.start, span.stop, span.layer, span.score, span.digest(), span.seal(name)),
                ).fetchone()
                if row:
                    new.append(span)
                    session_tables.add_text(connection, session, row[0], span.text)
            size = sum(len(span.text.encode()) for span in new)
            total = connection.execute(
                """UPDATE sessions SET spans = spans + ?, text_bytes = text_bytes + ?, updated = max(updated, ?),
                   expires = max(expires, ?) WHERE id = ? RETURNING spans""",  # max is NULL if one of both is
                (len(new), size, now, expires, session),
            ).fetchone()[0]
            stored = connection.execute("SELECT sum(spans) FROM sessions").fetchone()[0]
            self._caps.check_spans(name, total, stored)
        return len(new), total

    def renew(self, name: str, expires: float) -> Session:
        with self._write() as connection:
            row = connection.execute(
                f"UPDATE sessions SET expires = max(expires, ?) WHERE name = ? RETURNING {_SESSION}",  # noqa: S608
                (expires, name),
            ).fetchone()
        if row is None:
            raise no_session(name)
        return Session(*row)

    def _session_for_writing(self, connection: sqlite3.Connection, name: str, now: float, expires: float | None) -> int:
        row = connection.execute("SELECT id FROM sessions WHERE name = ?", (name,)).fetchone()
        if row:
            return int(row[0])
        self._caps.check_new_session(connection.execute("SELECT count(*) FROM sessions").fetchone()[0])
        session: int = connection.execute(
            """INSERT INTO sessions (name, spans, text_bytes, created, updated, expires)
               VALUES (?, 0, 0, ?, ?, ?) RETURNING id""",
            (name, now, now, expires),
        ).fetchone()[0]
        session_tables.create(connection, session)
        return session

    def _rows(self, statement: str, *parameters: object) -> list[Any]:
        with self._read() as connection:
            return connection.execute(statement, parameters).fetchall()

    def _session_rows(self, session: int, statement: str, *parameters: object) -> list[Any]:
        """Return the rows of a statement on a session's own tables, none if it was deleted."""
        with self._read() as connection:
            if not _exists(connection, session):
                return []
            return connection.execute(statement, parameters).fetchall()

    def session(self, name: str) -> Session | None:
        rows = self._rows(f"{_SESSIONS} WHERE name = ?", name)
        return Session(*rows[0]) if rows else None

    def sessions(self) -> list[Session]:
        return [Session(*row) for row in self._rows(f"{_SESSIONS} ORDER BY updated DESC, id DESC")]

    def page(self, session: Session, first: int, count: int) -> list[Span]:
        return self._spans(session, "ORDER BY id LIMIT ? OFFSET ?", count, first)

    def spans(self, session: Session, ids: Sequence[int] | None = None) -> list[Span]:
        chosen = "" if ids is None else f"WHERE id IN ({','.join('?' * len(ids))})"
        return self._spans(session, f"{chosen} ORDER BY id", *(ids or ()))

    def _spans(self, session: Session, condition: str, *parameters: object) -> list[Span]:
        table = session_tables.spans_with_text(session.id)
        statement = f"SELECT {COLUMNS} FROM {table} {condition}"  # noqa: S608
        return [span_of_row(row, session.name) for row in self._session_rows(session.id, statement, *parameters)]

    def covered(self, session: Session, ranges: Sequence[tuple[int, int]]) -> set[int]:
        statement = "SELECT id FROM spans WHERE session = ? AND start >= ? AND start < ? AND stop <= ?"
        with self._read() as connection:
            return {
                row[0]
                for start, stop in ranges
                for row in connection.execute(statement, (session.id, start, stop, stop))
            }

    def bm25(self, session: Session, query: str, limit: int, excluded: set[int]) -> dict[int, float]:
        with self._read() as connection:
            if not _exists(connection, session.id):
                return {}
            common = self._common_words.setdefault(session.id, {})
            return fts.search(connection, session, query, limit, excluded, common)

    def forget(self, name: str, expired_at: float | None = None) -> Session:
        with self._write() as connection:
            statement = f"{_SESSIONS} WHERE name = ? AND (? IS NULL OR expires <= ?)"
            row = connection.execute(statement, (name, expired_at, expired_at)).fetchone()
            if row is None:
                raise no_session(name)
            session = Session(*row)
            session_tables.drop(connection, session.id)
            connection.execute("DELETE FROM embeddings WHERE session = ?", (session.id,))
            connection.execute("DELETE FROM sessions WHERE id = ?", (session.id,))
        self._common_words.pop(session.id, None)
        return session

    def purge(self) -> None:
        with self._writing, files.sqlite_errors():
            self._purge_log()

    def _purge_log(self) -> None:
        busy = self._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
        if busy:
            raise StoreUnavailableError(
                "another program, such as a backup, reads the database, so that its log still has old text; it is "
                "purged at the next DELETE or when the service stops"
            )

    def embed_next(self, model: str, limit: int, embed: Callable[[list[Pending]], Vectors]) -> bool:
        with self._read() as connection:
            rows = connection.execute(
                """SELECT s.id, s.session FROM spans s LEFT JOIN embeddings e ON e.span = s.id AND e.model = ?
                   WHERE s.id > ? AND e.span IS NULL ORDER BY s.id LIMIT ?""",
                (model, self._embedded.get(model, 0), limit),
            ).fetchall()
            spans = [
                Pending(span, session, session_tables.read_text(connection, session, span)) for span, session in rows
            ]
        if spans:
            matrix = embed(spans)
            with self._write() as connection:
                for item, vector in zip(spans, matrix, strict=True):  # stores none of a span that was deleted meanwhile
                    data = vector.astype("<f4").tobytes()
                    seal = vector_seal(item.span, model, data)
                    session_tables.insert_vector(connection, item.span, model, data, seal)
            self._embedded[model] = spans[-1].span
        return bool(spans)

    def give_up(self, model: str, span: int) -> None:
        self._embedded[model] = span

    def count_pending(self, model: str) -> int:
        statement = """SELECT (SELECT coalesce(sum(spans), 0) FROM sessions)
                            - (SELECT count(*) FROM embeddings WHERE model = ?)"""
        return int(self._rows(statement, model)[0][0])

    def vectors(
        self, session: int, model: str, after: int, dim: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32], int]:
        """Return the vectors stored after number `after`: their spans [N], the rows [N, D], and the last one's number.

        Damaged ones are removed.
        """
        table = session_tables.vectors_with_seal(session)
        condition = "model = ? AND seq > ? ORDER BY seq"
        statement = f"SELECT seq, span, vector, seal FROM {table} WHERE {condition}"  # noqa: S608
        rows = self._session_rows(session, statement, model, after)
        read = [(span, vector_of_row(span, model, blob, seal)) for _, span, blob, seal in rows]
        intact = [(span, vector) for span, vector in read if vector is not None and vector.shape == (dim,)]
        spans = [span for span, _ in intact]
        damaged = {span for span, _ in read}.difference(spans)
        if damaged:
            log.warning(
                "damaged vectors are removed, and recomputed at the next start", extra={"vectors": len(damaged)}
            )
            with self._write() as connection:
                connection.executemany("DELETE FROM embeddings WHERE span = ?", ((span,) for span in damaged))
        matrix = np.stack([vector for _, vector in intact]) if intact else np.zeros((0, dim), np.float32)
        return np.array(spans, np.int64), matrix, rows[-1][0] if rows else after

    def count_vectors(self, session: int, model: str, upto: int = 2**62) -> int:
        statement = "SELECT count(*) FROM embeddings WHERE session = ? AND model = ? AND seq <= ?"
        return int(self._rows(statement, session, model, upto)[0][0])


def _exists(connection: sqlite3.Connection, session: int) -> bool:
    return connection.execute("SELECT 1 FROM sessions WHERE id = ?", (session,)).fetchone() is not None
