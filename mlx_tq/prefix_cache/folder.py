"""The folder of the store: records in files that are written once, under names that say what they are.

    blocks/NAME  points/NAME    b"TQR1" | sha256 of name and content | content
    lock                        held by the one process that writes just now; else it tells the bytes of all records
    rank-R-of-N/                such a folder, of rank R where N ranks run a model together

The names are the index: who looks for a record opens it. A file appears whole, by rename, and is read only if its
checksum is right, so a cut of the power, a full disk or a changed byte makes a record missing, never wrong. Each use
sets a file's time; beyond the limit the files used longest ago leave. What many prompts begin with counts as used a
week later than it was (its time is in the future), up to half of the limit.
"""

import fcntl
import hashlib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from mlx_tq.errors import ConfigError
from mlx_tq.files import atomic_write, sync_file

LIMIT = 50 * 10**9
BLOCKS, POINTS = "blocks", "points"
RANK = "rank-"
_LOCK = "lock"
_MAGIC = b"TQR1"
_HEAD = len(_MAGIC) + hashlib.sha256().digest_size
# Of all records, those that are looked up at once to leave one by one.
_SHARE = 10
# Nanoseconds by which protected records are ahead, and what tells them from those of a clock that went back.
_AHEAD = 7 * 86_400 * 10**9
_FUTURE = _AHEAD // 2


class Record(NamedTuple):
    """A file of the store: its time in nanoseconds, its bytes and its path."""

    time: int
    size: int
    name: str

    @property
    def path(self) -> Path:
        """Where it is."""
        return Path(self.name)

    @property
    def protected(self) -> bool:
        """It stays longer than others."""
        return self.time > time.time_ns() + _FUTURE

    @property
    def used(self) -> int:
        """When it was last used, in nanoseconds."""
        return self.time - _AHEAD * self.protected


class Folder:
    """A folder of records, which several processes may read while one writes.

    Attributes:
        path: of the folder.
        limit: bytes of all records, at most.
    """

    def __init__(self, path: Path, limit: int = LIMIT) -> None:
        """Take the folder, which is made where it is missing.

        Raises:
            ConfigError: it cannot be made or written, is somebody else's, or holds other files.
        """
        self.path, self.limit = path, limit
        self._nbytes = 0  # of all records, while this process writes
        self._leaving: list[Record] = []  # the next ones to leave, the first of them last
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            foreign = {file.name for file in path.iterdir()} - {BLOCKS, POINTS, _LOCK}
            foreign = {name for name in foreign if not name.startswith((".", RANK))}
            if not foreign and path.stat().st_uid == os.geteuid():
                path.chmod(0o700)
                for kind in (BLOCKS, POINTS):
                    (path / kind).mkdir(mode=0o700, exist_ok=True)
                return
        except OSError as error:
            raise ConfigError(
                f"no store of prefixes can be kept in {path}: {error.strerror}. Name a folder that can be written, or "
                "choose --prefix-cache off."
            ) from error
        why = f"holds other files ({min(foreign)})" if foreign else "belongs to another user"
        raise ConfigError(f"{path} is no store of prefixes: it {why}. Name an empty or a new folder.")

    def read(self, kind: str, name: str, *, use: bool = True) -> bytes | None:
        """A record, which then counts as used; None where it is missing. A damaged one is removed."""
        path = self.path / kind / name
        with suppress(OSError):
            data = path.read_bytes()
            if data[:_HEAD] == _head(name, data[_HEAD:]):
                if use:
                    _use(path)
                return data[_HEAD:]
            path.unlink()
        return None

    def holds(self, kind: str, name: str) -> bool:
        """A record is there, damaged or not."""
        with suppress(OSError):
            return (self.path / kind / name).exists()
        return False

    def write(self, kind: str, name: str, content: bytes) -> None:
        """Write a record, inside `writing`; one that is there counts as used now. Does not wait for the disk.

        Raises:
            OSError: it cannot be written.
        """
        path = self.path / kind / name
        if self.holds(kind, name):
            _use(path)
            return
        with atomic_write(path, sync=False) as temporary:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(descriptor, "wb") as file:  # noqa: PTH123  a descriptor
                file.write(_head(name, content))
                file.write(content)
        self._nbytes += _HEAD + len(content)
        if self._nbytes > self.limit:
            self._shrink()

    def remove(self, kind: str, name: str) -> None:
        """Remove a record, if it is there."""
        with suppress(OSError):
            (self.path / kind / name).unlink()

    def use(self, names: list[tuple[str, str]], *, protect: bool = False) -> None:
        """Let records (kind, name) count as used now, the last of them last; or protect them from now on."""
        for kind, name in names:
            with suppress(OSError):
                _use(self.path / kind / name, protect=protect)

    def settle(self, kind: str, name: str) -> None:
        """Wait until a record, and so what was written before it, is on the disk."""
        with suppress(OSError):
            sync_file(self.path / kind / name)

    @contextmanager
    def writing(self) -> Iterator[bool]:
        """Whether this process may write until the context ends: no other one does."""
        descriptor = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            told = os.read(descriptor, 64)
            os.ftruncate(descriptor, 0)  # who is killed now leaves nothing, and the next one counts
            self._nbytes = int(told) if told.isdigit() else self._count()
            yield True
            os.pwrite(descriptor, str(self._nbytes).encode(), 0)
        finally:
            os.close(descriptor)  # and with it the lock

    def records(self) -> list[Record]:
        """All records, the one that leaves first at the beginning."""
        found = []
        for kind in (BLOCKS, POINTS):
            with os.scandir(self.path / kind) as entries:
                for entry in entries:
                    with suppress(OSError):  # it left meanwhile
                        about = entry.stat()
                        found.append(Record(about.st_mtime_ns, about.st_size, entry.path))
        return sorted(found)

    def check(self) -> tuple[int, int]:
        """Read all records; returns how many there are, and how many were damaged and are gone."""
        found = self.records()
        damaged = sum(not self._is_whole(record.path) for record in found)
        return len(found), damaged

    def clear(self) -> int:
        """Remove all records; returns their bytes."""
        found = self.records()
        for record in found:
            record.path.unlink(missing_ok=True)
        return sum(record.size for record in found)

    def _is_whole(self, path: Path) -> bool:
        data = path.read_bytes()
        whole = data[:_HEAD] == _head(path.name, data[_HEAD:])
        if not whole:
            path.unlink(missing_ok=True)
        return whole

    def _count(self) -> int:
        """Bytes of all records; removes what writers left that were killed."""
        nbytes = 0
        for kind in (BLOCKS, POINTS):
            with os.scandir(self.path / kind) as entries:
                for entry in entries:
                    with suppress(OSError):
                        if entry.name.startswith("."):
                            os.unlink(entry.path)  # noqa: PTH108  of 100,000 files the paths alone take a second
                        else:
                            nbytes += entry.stat().st_size
        return nbytes

    def _shrink(self) -> None:
        """Let records leave until the others are within the limit; one that was used since it was looked up stays."""
        while self._nbytes > self.limit:
            if not self._leaving:
                found = self.records()
                self._nbytes = sum(record.size for record in found)
                self._leaving = self._order(found)[len(found) // _SHARE :: -1]
                continue
            record = self._leaving.pop()
            with suppress(OSError):
                if record.path.stat().st_mtime_ns != record.time:
                    continue
                record.path.unlink()
            self._nbytes -= record.size

    def _order(self, found: list[Record]) -> list[Record]:
        """Records as they leave: those that are protected beyond half of the limit as if they were not."""
        nbytes, order = 0, []
        for record in reversed(found):
            nbytes += record.size * record.protected
            order.append((record.used if nbytes > self.limit / 2 else record.time, record))
        return [record for _, record in sorted(order)]


def _use(path: Path, *, protect: bool = False) -> None:
    now = time.time_ns()
    if protect or path.stat().st_mtime_ns > now + _FUTURE:
        now += _AHEAD
    os.utime(path, ns=(now, now))


def _head(name: str, content: bytes) -> bytes:
    digest = hashlib.sha256(name.encode())
    digest.update(content)
    return _MAGIC + digest.digest()
