"""The data directory: its lock, its connections, and the seal that detects changes by other programs."""

import fcntl
import hashlib
import json
import os
import shutil
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from rescue_svc import errors

DATABASE = "rescue.db"
SEAL = "rescue.seal"
LOCK = "rescue.lock"
INDEXES = "index"

_PRAGMAS = (
    "journal_mode = WAL",
    "synchronous = FULL",
    "fullfsync = ON",  # macOS: fsync alone leaves the data in the drive's cache; no effect elsewhere
    "checkpoint_fullfsync = ON",
    "secure_delete = ON",
    "foreign_keys = ON",
    "cell_size_check = ON",  # damage is found where it is read
    "trusted_schema = OFF",
    "temp_store = MEMORY",  # text of spans never reaches a temporary file
)

Trust = Literal["new", "crashed", "sealed", "altered"]


@contextmanager
def sqlite_errors() -> Iterator[None]:
    try:
        yield
    except (sqlite3.Error, UnicodeDecodeError) as error:
        # Python raises without a code if stored text, or a message that quotes it, is not UTF-8: that is damage, too.
        primary = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF
        if primary == sqlite3.SQLITE_FULL:
            raise errors.StoreFullError(
                "the disk is full; free space, or delete sessions once there is a little"
            ) from error
        if primary in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            fault = "the database is damaged; stop the service, then `mlx-tq-rescue rebuild` or restore a backup"
            raise errors.StoreDamagedError(fault) from error
        name = getattr(error, "sqlite_errorname", type(error).__name__)
        raise errors.StoreUnavailableError(
            f"the database cannot be used now ({name}); check the data directory and its disk"
        ) from error


def connect(path: Path) -> sqlite3.Connection:
    """Open the database with the pragmas that durability and deletion require."""
    connection = sqlite3.connect(path, timeout=10, isolation_level=None, check_same_thread=False)
    try:
        for pragma in _PRAGMAS:
            connection.execute(f"PRAGMA {pragma}").close()
    except BaseException:
        connection.close()
        raise
    return connection


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        # SQLite has already rolled back by itself after some errors, a full disk among them.
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


class DirectoryLock:
    """Keeps other processes out of the data directory; the system releases it when this one ends."""

    def __init__(self, directory: Path) -> None:
        try:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._fd = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise errors.StoreUnavailableError(
                f"data directory {directory} cannot be written ({error.strerror}); make it writable or set --data-dir"
            ) from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._fd)
            raise errors.DirectoryInUseError(
                f"data directory {directory} is in use by another process; stop it or set another --data-dir"
            ) from error

    def release(self) -> None:
        os.close(self._fd)


def existing_database(directory: Path) -> Path:
    """Return the path of the database; raise StoreUnavailableError if there is none."""
    if not (directory / DATABASE).exists():
        raise errors.StoreUnavailableError(f"{directory} has no {DATABASE}; name the service's --data-dir")
    return directory / DATABASE


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield a folder for files, which are synced and get the name `folder` when the block is complete."""
    if folder.exists():
        raise errors.StoreUnavailableError(f"{folder} exists; name a folder that does not: nothing is overwritten")
    partial = folder.with_name(f"{folder.name}.partial-{time.time_ns()}")
    try:
        partial.mkdir(parents=True, mode=0o700)
        yield partial
        for path in partial.iterdir():
            with path.open("rb+") as file:
                sync(file.fileno())
        partial.rename(folder)
        sync_directory(folder.parent)
    except OSError as error:
        raise errors.StoreUnavailableError(
            f"{folder} cannot be created ({error.strerror}); name another folder"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write_durably(path: Path, *parts: bytes) -> None:
    """Replace a file in one step that survives a crash at any point."""
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("wb") as file:
            for part in parts:
                file.write(part)
            file.flush()
            sync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)  # of a full disk
    sync_directory(path.parent)


def sync(fd: int) -> None:
    """Force a file to the disk; on macOS fsync alone stops at the cache of the drive."""
    if hasattr(fcntl, "F_FULLFSYNC"):
        fcntl.fcntl(fd, fcntl.F_FULLFSYNC)
    else:
        os.fsync(fd)


def sync_directory(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def seal_closed(directory: Path) -> None:
    """Record the digest of the database after a clean close."""
    write_durably(directory / SEAL, json.dumps({"state": "closed", "blake2b": _digest(directory / DATABASE)}).encode())


def seal_open(directory: Path) -> None:
    """Record that the database is in use."""
    write_durably(directory / SEAL, json.dumps({"state": "open"}).encode())


def trust(directory: Path) -> Trust:
    """Return how far the database can be trusted before it is opened."""
    database, seal = directory / DATABASE, directory / SEAL
    if not seal.exists():
        return "altered" if database.exists() and database.stat().st_size else "new"
    try:
        record = json.loads(seal.read_bytes())
        state, digest = record["state"], record.get("blake2b")
    except (ValueError, KeyError, TypeError, AttributeError):
        state, digest = "damaged", None
    if not database.exists() or not database.stat().st_size:
        raise errors.StoreDamagedError(
            f"{database} is missing or empty although it was written before; restore a backup"
        )
    if state == "open":
        return "crashed"
    has_log = (directory / f"{DATABASE}-wal").exists()
    unchanged = state == "closed" and digest == _digest(database) and not has_log
    return "sealed" if unchanged else "altered"


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()
