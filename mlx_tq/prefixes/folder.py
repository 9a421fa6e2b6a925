"""The folder of the store: records in files that are written once, under names that say what they are.

    blocks/NAME  points/NAME    b"TQR1" | sha256 of name and content | content
    lock                        held by the one process that writes just now; else it tells the bytes of all records

The names are the index: who looks for a record opens it. A file appears whole, by rename, and is read only if its
checksum is right, so a cut of the power, a full disk or a changed byte makes a record missing, never wrong. Each use
sets a file's time; beyond the limit the files used longest ago leave.
"""

import fcntl
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from mlx_tq.atomic_files import atomic_write, wait_for_disk
from mlx_tq.errors import ConfigError

LIMIT = 50 * 10**9
BLOCKS, POINTS = "blocks", "points"
_LOCK = "lock"
_MAGIC = b"TQR1"
_HEAD = len(_MAGIC) + hashlib.sha256().digest_size
# What is left of the limit once records had to leave, so that they seldom have to.
_LEFT = 0.9


class Record(NamedTuple):
    """A file of the store: when it was last used, in nanoseconds, its bytes and its path."""

    used: int
    size: int
    path: Path


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
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            foreign = {file.name for file in path.iterdir()} - {BLOCKS, POINTS, _LOCK}
            foreign = {name for name in foreign if not name.startswith(".")}
            if not foreign and path.stat().st_uid == os.geteuid():
                path.chmod(0o700)
                for kind in (BLOCKS, POINTS):
                    (path / kind).mkdir(mode=0o700, exist_ok=True)
                return
        except OSError as error:
            raise ConfigError(
                f"no store of prefixes can be kept in {path}: {error.strerror}. Name a folder that can be written, or "
                "choose --kv-store off."
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
                    os.utime(path)
                return data[_HEAD:]
            path.unlink()
        return None

    def holds(self, kind: str, name: str) -> bool:
        """A record is there, damaged or not."""
        return (self.path / kind / name).exists()

    def write(self, kind: str, name: str, content: bytes) -> None:
        """Write a record, inside `writing`; one that is there counts as used now. Does not wait for the disk.

        Raises:
            OSError: it cannot be written.
        """
        path = self.path / kind / name
        if self.holds(kind, name):
            os.utime(path)
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

    def use(self, names: list[tuple[str, str]]) -> None:
        """Let records (kind, name) count as used now, the last of them last."""
        for kind, name in names:
            with suppress(OSError):
                os.utime(self.path / kind / name)

    def settle(self, kind: str, name: str) -> None:
        """Wait until a record, and so what was written before it, is on the disk."""
        with suppress(OSError):
            wait_for_disk(self.path / kind / name)

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
        """All records, the one used longest ago first."""
        found = []
        for kind in (BLOCKS, POINTS):
            with os.scandir(self.path / kind) as entries:
                for entry in entries:
                    with suppress(OSError):  # it left meanwhile
                        about = entry.stat()
                        found.append(Record(about.st_mtime_ns, about.st_size, Path(entry.path)))
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
        for kind in (BLOCKS, POINTS):
            for path in (self.path / kind).glob(".*"):
                path.unlink(missing_ok=True)
        return sum(record.size for record in self.records())

    def _shrink(self) -> None:
        found = self.records()
        self._nbytes = sum(record.size for record in found)
        for record in found:
            if self._nbytes <= _LEFT * self.limit:
                return
            record.path.unlink(missing_ok=True)
            self._nbytes -= record.size


def _head(name: str, content: bytes) -> bytes:
    digest = hashlib.sha256(name.encode())
    digest.update(content)
    return _MAGIC + digest.digest()
