"""The store: SQLite is the truth; a call that returned is on the disk."""

import logging
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from rescue_svc.errors import SessionFullError, SessionNotFoundError, StoreFullError, StoreUnavailableError
from rescue_svc.settings import Caps
from rescue_svc.store import check, files, vectors, words
from rescue_svc.store.migrations import migrate
from rescue_svc.store.records import COLUMNS, NewSpan, Pending, Session, Span, Vectors, span_of_row

log = logging.getLogger(__name__)

READERS = 4


class SqliteStore:
    """Spans of all sessions, in one SQLite database of one process. Safe to call from many threads.

    Raises DirectoryInUseError, StoreUnavailableError or StoreDamagedError when it cannot be opened.
    """

    def __init__(self, directory: Path, caps: Caps) -> None:
        self.directory = directory
        self._caps = caps
        self._lock = files.DirectoryLock(directory)
        self._writing = threading.Lock()
        self._readers: queue.LifoQueue[sqlite3.Connection] = queue.LifoQueue()
        self._common_words: dict[int, dict[str, int]] = {}
        self._embedded: dict[str, int] = {}  # by model: every span up to here has its vector, or was given up
        try:
            with files.sqlite_errors():
                self._open(directory / files.DATABASE)
        except OSError as error:
            self._lock.release()
            raise StoreUnavailableError(f"data directory {directory} cannot be used: {error}") from error
        except BaseException:
            self._lock.release()
            raise

    def _open(self, path: Path) -> None:
        trust = files.trust(self.directory)
        with ExitStack() as on_failure:
            self._writer = on_failure.enter_context(closing(files.connect(path)))
            self._prepare(trust)
            on_failure.pop_all()
        for _ in range(READERS):
            self._readers.put(files.connect(path))

    def _prepare(self, trust: files.Trust) -> None:
        migrate(self._writer)
        if trust in ("crashed", "altered"):
            log.warning(
                "the database was not closed cleanly, or was changed; checking every row", extra={"trust": trust}
            )
            check.verify(self._writer, rebuild_words=trust == "altered")
        # A crash may have come after a DELETE was committed and before the log was emptied of the old text.
        self._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        files.seal_open(self.directory)
        (self.directory / files.INDEXES).mkdir(exist_ok=True, mode=0o700)

    def about(self) -> str:
        """Say where the spans are."""
        return str(self.directory)

    def close(self) -> None:
        """Empty the log into the database, seal it and free the directory."""
        with self._writing:
            try:
                with files.sqlite_errors():
                    self._purge_log()
                    for _ in range(READERS):
                        self._readers.get().close()
                    self._writer.close()
                    files.seal_closed(self.directory)
            finally:
                self._lock.release()

    @contextmanager
    def _write(self) -> Iterator[sqlite3.Connection]:
        with self._writing, files.sqlite_errors():
            self._writer.execute("BEGIN IMMEDIATE")
            try:
                yield self._writer
                self._writer.execute("COMMIT")
            except BaseException:
                # SQLite has already rolled back by itself after some errors, a full disk among them.
                if self._writer.in_transaction:
                    self._writer.execute("ROLLBACK")
                raise

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

    # Sessions and spans

    def write(self, name: str, spans: Sequence[NewSpan]) -> tuple[int, int]:
        """Store spans in one transaction; return how many are new and how many the session then holds.

        Raises SessionFullError or StoreFullError, and then nothing of the call is stored.
        """
        now = time.time()
        with self._write() as connection:
            session = self._session_for_writing(connection, name, now)
            new = [span for span in spans if self._insert(connection, session, name, span)]
            size = sum(len(span.text.encode()) for span in new)
            total = connection.execute(
                """UPDATE sessions SET spans = spans + ?, text_bytes = text_bytes + ?, updated = max(updated, ?)
                   WHERE id = ? RETURNING spans""",
                (len(new), size, now, session),
            ).fetchone()[0]
            self._check_caps(connection, name, total)
        return len(new), total

    def _session_for_writing(self, connection: sqlite3.Connection, name: str, now: float) -> int:
        row = connection.execute("SELECT id FROM sessions WHERE name = ?", (name,)).fetchone()
        if row:
            return int(row[0])
        if connection.execute("SELECT count(*) FROM sessions").fetchone()[0] >= self._caps.sessions:
            raise StoreFullError(
                f"there are {self._caps.sessions} sessions, the cap; forget some or raise RESCUE_MAX_SESSIONS"
            )
        cursor = connection.execute(
            "INSERT INTO sessions (name, spans, text_bytes, created, updated) VALUES (?, 0, 0, ?, ?)", (name, now, now)
        )
        session = cursor.lastrowid
        assert session is not None  # noqa: S101 - an INSERT always sets it; this tells the type checker
        words.create(connection, session)
        return session

    def _insert(self, connection: sqlite3.Connection, session: int, name: str, span: NewSpan) -> bool:
        row = connection.execute(
            """INSERT INTO spans (session, start, stop, layer, score, text, digest, seal)
               VALUES (?, ?, ?, ?, ?, ?, ?, ?)
               ON CONFLICT (session, digest) DO NOTHING RETURNING id""",
            (session, span.start, span.stop, span.layer, span.score, span.text, span.digest(), span.seal(name)),
        ).fetchone()
        if row:
            words.add(connection, session, row[0], span.text)
        return row is not None

    def _check_caps(self, connection: sqlite3.Connection, name: str, total: int) -> None:
        if total > self._caps.session_spans:
            raise SessionFullError(
                f"session {name} would hold {total} spans, the cap is {self._caps.session_spans}; "
                "forget it, use another, or raise RESCUE_MAX_SESSION_SPANS"
            )
        everywhere = connection.execute("SELECT sum(spans) FROM sessions").fetchone()[0]
        if everywhere > self._caps.spans:
            raise StoreFullError(
                f"the store would hold {everywhere} spans, the cap is {self._caps.spans}; "
                "forget sessions or raise RESCUE_MAX_SPANS"
            )

    def session(self, name: str) -> Session | None:
        """Return a session, or None if it was never written or is forgotten."""
        with self._read() as connection:
            row = connection.execute(
                "SELECT id, name, spans, text_bytes, created, updated FROM sessions WHERE name = ?", (name,)
            ).fetchone()
        return Session(*row) if row else None

    def sessions(self) -> list[Session]:
        """Return all sessions, the last written first."""
        with self._read() as connection:
            rows = connection.execute(
                "SELECT id, name, spans, text_bytes, created, updated FROM sessions ORDER BY updated DESC, id DESC"
            ).fetchall()
        return [Session(*row) for row in rows]

    def page(self, session: Session, first: int, count: int) -> list[Span]:
        """Return `count` spans in the order of writing, behind the `first` ones; raises StoreDamagedError."""
        with self._read() as connection:
            rows = connection.execute(
                f"SELECT {COLUMNS} FROM spans WHERE session = ? ORDER BY id LIMIT ? OFFSET ?",  # noqa: S608
                (session.id, count, first),
            ).fetchall()
        return [span_of_row(row, session.name) for row in rows]

    def spans(self, session: Session, ids: Sequence[int] | None = None) -> list[Span]:
        """Return the session's spans with these ids, or all, in the order of writing; raises StoreDamagedError."""
        chosen = "" if ids is None else f" AND id IN ({','.join('?' * len(ids))})"
        with self._read() as connection:
            rows = connection.execute(
                f"SELECT {COLUMNS} FROM spans WHERE session = ?{chosen} ORDER BY id",  # noqa: S608 - only ? marks
                (session.id, *(ids or ())),
            ).fetchall()
        return [span_of_row(row, session.name) for row in rows]

    def covered(self, session: Session, ranges: Sequence[tuple[int, int]]) -> set[int]:
        """Return the ids of spans that lie wholly in one of `ranges`."""
        with self._read() as connection:
            return {
                row[0]
                for start, stop in ranges
                for row in connection.execute(
                    "SELECT id FROM spans WHERE session = ? AND start >= ? AND start < ? AND stop <= ?",
                    (session.id, start, stop, stop),
                )
            }

    def bm25(self, session: Session, query: str, limit: int, excluded: set[int]) -> dict[int, float]:
        """Return the best span ids by BM25 with their scores; nothing for a session that was forgotten meanwhile."""
        with self._read() as connection:
            if not connection.execute("SELECT 1 FROM sessions WHERE id = ?", (session.id,)).fetchone():
                return {}
            common = self._common_words.setdefault(session.id, {})
            return words.search(connection, session.id, session.spans, query, limit, excluded, common)

    def forget(self, name: str) -> Session:
        """Remove a session so that no byte of its text is left; return what it was. Raises SessionNotFoundError."""
        session = self.session(name)
        if session is None:
            raise SessionNotFoundError(f"no session {name}; `GET /sessions` lists all")
        with self._write() as connection:
            words.drop(connection, session.id)
            connection.execute("DELETE FROM embeddings WHERE session = ?", (session.id,))
            connection.execute("DELETE FROM sessions WHERE id = ?", (session.id,))
        with self._writing, files.sqlite_errors():
            self._purge_log()
        self._common_words.pop(session.id, None)
        return session

    def _purge_log(self) -> None:
        busy = self._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
        if busy:
            raise StoreUnavailableError(
                "another program is reading the database, so its log still holds old text; it is purged at the next "
                "DELETE or when the service stops; end the other program, a backup for instance"
            )

    # Vectors

    def embed_next(self, model: str, limit: int, embed: Callable[[list[Pending]], Vectors]) -> bool:
        """Give the next spans, in the order of writing, the vectors that `embed` makes; tell whether there were any."""
        spans = self.pending(model, self._embedded.get(model, 0), limit)
        if spans:
            self.store_vectors(model, spans, embed(spans))
            self._embedded[model] = spans[-1].span
        return bool(spans)

    def give_up(self, model: str, span: int) -> None:
        """Leave a span without a vector until the next start: it cannot be embedded."""
        self._embedded[model] = span

    def pending(self, model: str, after: int, limit: int) -> list[Pending]:
        """Return the next spans past id `after` that have no vector of `model`."""
        with self._read() as connection:
            return vectors.pending(connection, model, after, limit)

    def count_pending(self, model: str) -> int:
        """Count the spans that have no vector of `model`."""
        with self._read() as connection:
            return vectors.count_pending(connection, model)

    def store_vectors(self, model: str, spans: Sequence[Pending], matrix: Vectors) -> None:
        """Store one vector a span, [N, D], in one transaction."""
        with self._write() as connection:
            vectors.store(connection, model, spans, matrix)

    def vectors(self, session: int, model: str, after: int, dim: int) -> vectors.Stored:
        """Return a session's vectors past number `after`; damaged ones are removed, to be made again."""
        with self._read() as connection:
            stored, damaged = vectors.load(connection, session, model, after, dim)
        if damaged:
            log.warning(
                "damaged vectors are left out and made again at the next start", extra={"vectors": len(damaged)}
            )
            with self._write() as connection:
                vectors.remove(connection, damaged)
        return stored

    def count_vectors(self, session: int, model: str, upto: int = 2**62) -> int:
        """Count a session's vectors up to sequence number `upto`."""
        with self._read() as connection:
            return vectors.count(connection, session, model, upto)
