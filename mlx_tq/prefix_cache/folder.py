"""The folder of a prefix cache: records in files that are written once. A file's name is its key, and so the index.

    blocks/KEY  checkpoints/KEY    sha256 of key and content | content
    lock                           held by the one process that writes; else it has the bytes of all records
    rank-R-of-N/                   such a folder, of rank R where N ranks run a model together

A file appears whole, by rename, and is read only if its checksum is right: a power cut, a full disk or a changed byte
makes a record missing, never wrong. Each use sets a file's time; beyond the limit the least recently used are evicted.
Protected records count as used a week later (their time is in the future), up to half of the limit.
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
BLOCKS, CHECKPOINTS = KINDS = "blocks", "checkpoints"
RANK = "rank-"
_LOCK = "lock"
_DIGEST_SIZE = hashlib.sha256().digest_size
_AHEAD = 7 * 86_400 * 10**9  # nanoseconds that protected records are ahead
_FUTURE = _AHEAD // 2  # tells them from records that a wrong clock wrote


class Record(NamedTuple):
    time: int  # of the last use in nanoseconds; `_AHEAD` more if the record is protected
    size: int
    path: Path

    @property
    def is_protected(self) -> bool:
        return self.time > time.time_ns() + _FUTURE

    @property
    def last_used(self) -> int:
        return self.time - _AHEAD * self.is_protected


class Folder:
    """A folder of records, up to `limit` bytes, which several processes may read while one writes.

    It is made where it is missing. Raises ConfigError if it cannot be written, belongs to another user, or holds other
    files.
    """

    def __init__(self, path: Path, limit: int = LIMIT) -> None:
        self.path, self.limit = path, limit
        self._nbytes = 0  # of all records, while this process writes
        self._to_evict: list[Record] = []  # the next one last
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            foreign = {file.name for file in path.iterdir()} - {*KINDS, _LOCK}
            foreign = {name for name in foreign if not name.startswith((".", RANK))}
            if not foreign and path.stat().st_uid == os.geteuid():
                path.chmod(0o700)
                for kind in KINDS:
                    (path / kind).mkdir(mode=0o700, exist_ok=True)
                return
        except OSError as error:
            raise ConfigError(
                f"{path} cannot be used as a prefix cache: {error.strerror}. Name a folder that can be written, or "
                "choose --prefix-cache off."
            ) from error
        why = f"holds other files ({min(foreign)})" if foreign else "belongs to another user"
        raise ConfigError(f"{path} is not a prefix cache: it {why}. Name an empty or a new folder.")

    def read(self, kind: str, key: str, *, touch: bool = True) -> bytes | None:
        """Return a record, which then counts as used, or None if it is missing. A damaged one is removed."""
        path = self.path / kind / key
        with suppress(OSError):
            data = path.read_bytes()
            if data[:_DIGEST_SIZE] == _digest(key, data[_DIGEST_SIZE:]):
                if touch:
                    self.touch([(kind, key)])
                return data[_DIGEST_SIZE:]
            path.unlink()
        return None

    def has(self, kind: str, key: str) -> bool:
        """Return whether a record exists, damaged or not."""
        with suppress(OSError):
            return (self.path / kind / key).exists()
        return False

    def write(self, kind: str, key: str, content: bytes) -> None:
        """Write a record, inside `writing`, without waiting for the disk; one that exists counts as used now."""
        path = self.path / kind / key
        if self.has(kind, key):
            self.touch([(kind, key)])
            return
        with atomic_write(path, sync=False) as temporary:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(descriptor, "wb") as file:  # noqa: PTH123  truncating a file would let ext4 wait for the disk
                file.writelines((_digest(key, content), content))
        self._nbytes += _DIGEST_SIZE + len(content)
        if self._nbytes > self.limit:
            self._evict()

    def remove(self, kind: str, key: str) -> None:
        with suppress(OSError):
            (self.path / kind / key).unlink()

    def touch(self, records: list[tuple[str, str]], *, protect: bool = False) -> None:
        """Let records (kind, key) count as used now. Protected ones stay so, and all are protected if `protect`."""
        for kind, key in records:
            path, now = self.path / kind / key, time.time_ns()
            with suppress(OSError):
                if protect or path.stat().st_mtime_ns > now + _FUTURE:
                    now += _AHEAD
                os.utime(path, ns=(now, now))

    def sync(self, kind: str, key: str) -> None:
        """Wait until a record, and so what was written before it, is on the disk."""
        with suppress(OSError):
            sync_file(self.path / kind / key)

    @contextmanager
    def writing(self) -> Iterator[bool]:
        """Yield whether this process may write until the context ends: whether no other one does."""
        descriptor = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            nbytes = os.read(descriptor, 64)
            os.ftruncate(descriptor, 0)  # if this process is killed, the next one counts
            if not nbytes.isdigit():
                for path in (path for kind in KINDS for path in (self.path / kind).glob(".*")):  # of killed writers
                    path.unlink(missing_ok=True)
            self._nbytes = int(nbytes) if nbytes.isdigit() else sum(record.size for record in self.records())
            yield True
            os.pwrite(descriptor, str(self._nbytes).encode(), 0)
        finally:
            os.close(descriptor)  # and with it the lock

    def records(self) -> list[Record]:
        """Return all records, the least recently used first."""
        records = []
        for kind in KINDS:
            with os.scandir(self.path / kind) as entries:
                for entry in entries:
                    with suppress(OSError):  # evicted meanwhile
                        status = entry.stat()
                        if not entry.name.startswith("."):  # else it is being written
                            records.append(Record(status.st_mtime_ns, status.st_size, Path(entry.path)))
        return sorted(records)

    def check(self) -> tuple[int, int]:
        """Read all records; return how many there are, and how many were damaged and are removed now."""
        paths = [record.path for record in self.records()]
        return len(paths), sum(self.read(path.parent.name, path.name, touch=False) is None for path in paths)

    def clear(self) -> int:
        """Remove all records; return their bytes."""
        records = self.records()
        for record in records:
            record.path.unlink(missing_ok=True)
        return sum(record.size for record in records)

    def _evict(self) -> None:
        """Evict records until the others are within the limit; one that was used since it was listed stays."""
        while self._nbytes > self.limit:
            if not self._to_evict:
                records = self.records()
                self._nbytes = sum(record.size for record in records)
                self._to_evict = self._eviction_order(records)[len(records) // 10 :: -1]  # then they are listed again
                continue
            record = self._to_evict.pop()
            with suppress(OSError):
                if record.path.stat().st_mtime_ns != record.time:
                    continue
                record.path.unlink()
            self._nbytes -= record.size

    def _eviction_order(self, records: list[Record]) -> list[Record]:
        """Sort by time, except that protected records beyond half of the limit are sorted by their last use."""
        nbytes, order = 0, []
        for record in reversed(records):
            nbytes += record.size * record.is_protected
            order.append((record.last_used if nbytes > self.limit / 2 else record.time, record))
        return [record for _, record in sorted(order)]


def _digest(key: str, content: bytes) -> bytes:
    digest = hashlib.sha256(key.encode())
    digest.update(content)
    return digest.digest()
