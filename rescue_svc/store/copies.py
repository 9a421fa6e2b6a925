"""Backups of the database, and new databases from the intact rows of a damaged one."""

import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rescue_svc.errors import StoreDamagedError
from rescue_svc.store import files, session_tables
from rescue_svc.store.migrations import migrate
from rescue_svc.store.records import span_of_row, vector_of_row


@dataclass(frozen=True)
class Rebuilt:
    spans: int
    vectors: int
    lost: int  # spans of the old database that are not intact
    damaged_file: Path | None = None  # the old database, if something may be lost


def backup(directory: Path, folder: Path) -> int:
    """Copy the database, sealed, into a new folder; return its bytes. A service may run on `directory` meanwhile."""
    database = files.existing_database(directory)
    with files.new_folder(folder) as partial:
        with files.sqlite_errors(), closing(files.connect(database)) as source:
            source.execute("VACUUM INTO ?", (str(partial / files.DATABASE),))
        files.seal_closed(partial)
    return (folder / files.DATABASE).stat().st_size


def rebuild(directory: Path) -> Rebuilt:
    """Build a new database from every intact span. A damaged one is renamed, never deleted."""
    old, new = files.existing_database(directory), directory / f"{files.DATABASE}.rebuilding"
    lock = files.DirectoryLock(directory)
    try:
        new.unlink(missing_ok=True)
        with files.sqlite_errors(), closing(files.connect(old)) as source, closing(files.connect(new)) as target:
            migrate(target)
            with files.transaction(target):
                rebuilt = _copy_intact(source, target, old.with_name(f"{old.name}.bad-{time.time_ns()}"))
            target.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        if rebuilt.damaged_file:
            rebuilt.damaged_file.hardlink_to(old)
        for log in ("-wal", "-shm"):
            old.with_name(old.name + log).unlink(missing_ok=True)
        new.replace(old)
        files.sync_directory(directory)
        files.seal_closed(directory)
        return rebuilt
    except StoreDamagedError as error:
        new.unlink(missing_ok=True)
        raise StoreDamagedError(
            f"no span can be read from {old}: restore a backup, or move that file, "
            f"{files.DATABASE}-wal and {files.SEAL} away to start with an empty store"
        ) from error
    finally:
        lock.release()


def _copy_intact(source: sqlite3.Connection, target: sqlite3.Connection, damaged_file: Path) -> Rebuilt:
    declared = seen = copied = 0
    names: dict[int, str] = {}
    for session, name, spans, *times in _rows(source, "sessions", "id, name, spans, created, updated, expires"):
        names[session] = name
        declared += spans
        target.execute("INSERT INTO sessions VALUES (?, ?, 0, 0, ?, ?, ?)", (session, name, *times))
        session_tables.create(target, session)
    for *row, digest, seal, session in _rows(source, "spans", "id, start, stop, layer, score, digest, seal, session"):
        seen += 1
        with suppress(StoreDamagedError, KeyError, sqlite3.DatabaseError):  # damaged, or of a lost session
            name = names[session]
            text = session_tables.read_text(source, session, row[0])
            span = span_of_row((*row, text, digest, seal), name)
            target.execute(
                "INSERT INTO spans VALUES (?, ?, ?, ?, ?, ?, ?, ?)", (row[0], session, *row[1:], digest, seal)
            )
            session_tables.add_text(target, session, span.id, span.text)
            target.execute(
                "UPDATE sessions SET spans = spans + 1, text_bytes = text_bytes + ? WHERE id = ?",
                (len(span.text.encode()), session),
            )
            copied += 1
    is_complete = False
    with suppress(sqlite3.DatabaseError):
        checks = [source.execute(f"PRAGMA integrity_check({table})").fetchone()[0] for table in ("sessions", "spans")]
        is_complete = declared == seen == copied and checks == ["ok", "ok"]
    if not copied and not is_complete:
        raise StoreDamagedError("nothing is intact")
    vectors = sum(
        session_tables.insert_vector(target, *row)
        for session in names
        for row in _rows(source, session_tables.vectors_with_seal(session), "span, model, vector, seal")
        if vector_of_row(*row) is not None
    )
    return Rebuilt(copied, vectors, max(declared, seen) - copied, None if is_complete else damaged_file)


def _rows(source: sqlite3.Connection, table: str, columns: str) -> Iterator[tuple[Any, ...]]:
    """Yield every readable row: from the front to the first damaged page, then from the back."""
    seen: set[int] = set()
    for order in ("ASC", "DESC"):
        try:
            for row in source.execute(f"SELECT {columns} FROM {table} ORDER BY 1 {order}"):  # noqa: S608
                if row[0] in seen:
                    return
                seen.add(row[0])
                yield row
        except sqlite3.DatabaseError:
            continue
        return
