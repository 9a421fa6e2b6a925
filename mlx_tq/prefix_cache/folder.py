"""The folder of a prefix cache: records in files that are written once. A file's name is its key, and so the index.

    mlx_tq_prefix_cache            made in an empty folder only; without it, a folder is not a prefix cache
    blocks/KEY  checkpoints/KEY    TQR1 | sha256 of key and content | content
    lock                           held by the one process that writes; else it has the bytes of all records
    rank-R-of-N/                   such a folder, of rank R where N ranks run a model together

A file appears whole, by rename, and is read only if its checksum is right: a power cut, a full disk or a changed byte
makes a record missing, never wrong. Each use sets a file's time; beyond the limit the least recently used are evicted.
Protected records count as used a week later (their time is in the future), up to half of the limit.

Others may put anything into the folder. Only regular files are opened, and only what has the name and the first letters
of a record is deleted.
"""

import errno
import fcntl
import hashlib
import os
import re
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from http_limits.process_checks import is_disk_full
from mlx_tq.distributed.group import ALONE, Ranks
from mlx_tq.errors import ConfigError, one_line
from mlx_tq.files import atomic_write, cache_folder, open_regular

AUTO, OFF = "auto", "off"
LIMIT = 50 * 10**9
BLOCKS, CHECKPOINTS = KINDS = "blocks", "checkpoints"
RANK = "rank-"
_MARKER, _LOCK = "mlx_tq_prefix_cache", "lock"
_MAGIC = b"TQR1"
_IGNORED = {".DS_Store", ".localized"}  # which macOS puts into folders
_KEY, _TEMPORARY = re.compile(r"[0-9a-f]{64}"), re.compile(r"\.[0-9a-f]{64}\.[0-9a-f]{8}")
_DIGEST_SIZE = hashlib.sha256().digest_size
_AHEAD = 7 * 86_400 * 10**9  # nanoseconds that protected records are ahead
# Times that are less or further ahead are of a clock that was wrong, and protect nothing.
_MIN_AHEAD, _MAX_AHEAD = _AHEAD // 2, 2 * _AHEAD


class Record(NamedTuple):
    time: int  # of the last use in nanoseconds; `_AHEAD` more if the record is protected
    size: int
    path: Path

    @property
    def is_protected(self) -> bool:
        return _is_protected(self.time)

    @property
    def last_used(self) -> int:
        """The time of the last use; 0, so that it is evicted first, if the clock was far ahead."""
        if self.time > time.time_ns() + _MAX_AHEAD:
            return 0
        return self.time - _AHEAD * self.is_protected


class Folder:
    """A folder of records, up to `limit` bytes, which several processes may read while one writes.

    It is made where it is missing or empty. Raises ConfigError if it cannot be written, belongs to another user, or
    holds other files.
    """

    def __init__(self, path: Path, limit: int = LIMIT) -> None:
        self.path, self.limit = path, limit
        self._nbytes = 0  # of all records, while this process writes
        self._to_evict: list[Record] = []  # the next one last
        self._frees_disk = True  # False if a full disk stayed full after an eviction, as with snapshots, until a write
        try:
            self._make()
        except OSError as error:
            raise ConfigError(
                f"{path} cannot be used as a prefix cache: {error.strerror}. Name an empty or a new folder that can be "
                "written, or choose --prefix-cache off."
            ) from error

    def _make(self) -> None:
        """Make what is missing; raise OSError if that fails, or if the folder is not ours."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        names = {file.name for file in self.path.iterdir()} - _IGNORED
        if names and _MARKER not in names:
            raise FileExistsError(errno.EEXIST, f"it holds other files ({min(names)})")
        if self.path.stat().st_uid != os.geteuid():
            raise PermissionError(errno.EPERM, "it belongs to another user")
        if not names:
            (self.path / _MARKER).touch(mode=0o600)
        for kind in KINDS:
            if (self.path / kind).is_symlink():
                raise NotADirectoryError(errno.ENOTDIR, f"its {kind} is a link")
        self.path.chmod(0o700)
        for kind in KINDS:
            (self.path / kind).mkdir(mode=0o700, exist_ok=True)

    def read(self, kind: str, key: str, *, touch: bool = True) -> bytes | None:
        """Return a record, which then counts as used, or None if it is missing. A damaged one is removed."""
        content, _ = self._read(self._path(kind, key))
        if content is not None and touch:
            self.touch([(kind, key)])
        return content

    def has(self, kind: str, key: str) -> bool:
        """Return whether a record exists, damaged or not."""
        return os.path.lexists(self._path(kind, key))

    def nbytes(self, kind: str, key: str) -> int:
        """Return the size of a record, damaged or not; 0 if it is missing."""
        with suppress(OSError):
            return self._path(kind, key).lstat().st_size
        return 0

    def write(self, kind: str, key: str, content: bytes, *, verify: bool = False) -> None:
        """Write a record, inside `writing`, without waiting for the disk.

        One that exists counts as used now; with `verify`, it is replaced if it is damaged.
        """
        if verify:
            nbytes = self.nbytes(kind, key)
            _, is_damaged = self._read(self._path(kind, key))
            self._nbytes -= nbytes if is_damaged else 0
        if self.has(kind, key):
            self.touch([(kind, key)])
            return
        path, parts = self._path(kind, key), (_MAGIC, _digest(key, content), content)
        size = sum(map(len, parts))
        try:
            _write(path, parts)
        except OSError as error:
            if not is_disk_full(error) or not self._frees_disk or size > self._nbytes:
                raise
            self._frees_disk = False
            self._evict(self._nbytes - size)
            _write(path, parts)
        self._frees_disk = True
        self._nbytes += size
        self._evict(self.limit)

    def remove(self, kind: str, key: str) -> None:
        _remove(self._path(kind, key))

    def touch(self, records: list[tuple[str, str]], *, protect: bool = False) -> None:
        """Let records (kind, key) count as used now. Protected ones stay so, and all are protected if `protect`."""
        for kind, key in records:
            path, now = self._path(kind, key), time.time_ns()
            with suppress(OSError):
                if protect or _is_protected(path.lstat().st_mtime_ns):
                    now += _AHEAD
                os.utime(path, ns=(now, now), follow_symlinks=False)

    def sync(self, kind: str, key: str) -> None:
        """Wait until a record, and so what was written before it, is on the disk."""
        with suppress(OSError), open_regular(self._path(kind, key)) as file:
            os.fsync(file.fileno())

    @contextmanager
    def writing(self) -> Iterator[bool]:
        """Yield whether this process may write until the context ends: whether no other one does."""
        self._make()  # again, if somebody deleted it
        with open_regular(self.path / _LOCK, os.O_RDWR | os.O_CREAT) as lock:  # closing it releases the lock
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            nbytes = lock.read(64)
            lock.truncate(0)  # if this process is killed, the next one counts
            if nbytes.isdigit():
                self._nbytes = int(nbytes)
            else:
                self._remove_temporaries()
                self._count()
            yield True
            os.pwrite(lock.fileno(), str(self._nbytes).encode(), 0)

    def _remove_temporaries(self) -> None:
        """Remove what killed writers left."""
        for kind in KINDS:
            for path in (self.path / kind).glob(".*"):
                if _TEMPORARY.fullmatch(path.name):
                    _remove(path)

    def records(self) -> list[Record]:
        """Return all records, the least recently used first."""
        records = []
        for kind in KINDS:
            with os.scandir(self.path / kind) as entries:
                for entry in entries:
                    with suppress(OSError):  # evicted meanwhile
                        status = entry.stat(follow_symlinks=False)
                        if _KEY.fullmatch(entry.name) and stat.S_ISREG(status.st_mode):
                            records.append(Record(status.st_mtime_ns, status.st_size, Path(entry.path)))
        return sorted(records, key=lambda record: (record.last_used, record))

    def check(self) -> tuple[int, int]:
        """Read all records; return how many there are, and how many were damaged and are removed now."""
        records = self.records()
        return len(records), sum(self._read(record.path)[1] for record in records)

    def clear(self) -> int:
        """Remove all records; return their bytes."""
        return sum(record.size for record in self.records() if _remove(record.path))

    def _path(self, kind: str, key: str) -> Path:
        if not _KEY.fullmatch(key):  # a forged record may name anything
            raise ValueError(f"{key[:80]!r} is not the key of a record")
        return self.path / kind / key

    def _read(self, path: Path) -> tuple[bytes | None, bool]:
        """Return the content of a record, or None, and whether it was damaged and has been removed."""
        with suppress(OSError), open_regular(path) as file:
            status = os.fstat(file.fileno())
            if status.st_size <= self.limit and file.read(len(_MAGIC)) == _MAGIC:
                digest, content = file.read(_DIGEST_SIZE), file.readall()
                if digest == _digest(path.name, content):
                    return content, False
            return None, _remove(path, status)
        return None, False

    def _count(self) -> list[Record]:
        records = self.records()
        self._nbytes, self._to_evict = sum(record.size for record in records), []
        return records

    def _evict(self, limit: int) -> None:
        """Evict records until the others are within `limit`; one that was used since it was listed stays."""
        has_evicted = True
        while self._nbytes > limit:
            if self._to_evict:
                record = self._to_evict.pop()
                with suppress(OSError):
                    if record.path.lstat().st_mtime_ns == record.time and _remove(record.path):
                        self._nbytes -= record.size
                        has_evicted = True
            elif has_evicted:
                records = self._count()
                self._to_evict = self._eviction_order(records)[len(records) // 10 :: -1]  # then they are listed again
                has_evicted = False
            else:  # nothing that was listed could be removed
                return

    def _eviction_order(self, records: list[Record]) -> list[Record]:
        """Sort by time, except that protected records beyond half of the limit are sorted by their last use."""
        nbytes, order = 0, []
        for record in reversed(records):
            nbytes += record.size * record.is_protected
            counts_fully = record.is_protected and nbytes <= self.limit / 2
            order.append((record.time if counts_fully else record.last_used, record))
        return [record for _, record in sorted(order)]


def _is_protected(time_ns: int) -> bool:
    return _MIN_AHEAD < time_ns - time.time_ns() <= _MAX_AHEAD


def _write(path: Path, parts: Iterable[bytes]) -> None:
    with atomic_write(path, sync=False) as temporary:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "wb") as file:  # noqa: PTH123  truncating a file would let ext4 wait for the disk
            file.writelines(parts)


def open_folder(name: str | Folder | None, limit: int = LIMIT, ranks: Ranks = ALONE) -> Folder | None:
    """Open the folder that a user names, or a rank's own inside it; "auto" is in the cache folder, "off" is none."""
    if isinstance(name, Folder):
        return name
    if name in (None, OFF):
        return None
    try:
        path = cache_folder() / "prefix_cache" if name == AUTO else Path(name).expanduser()
    except RuntimeError as error:  # no such user
        raise ConfigError(f"the prefix cache {name}: {one_line(error)}. Write the folder itself.") from error
    folder = Folder(path, limit)
    return folder if ranks.is_alone else Folder(folder.path / f"{RANK}{ranks.rank}-of-{ranks.size}", limit)


def _remove(path: Path, status: os.stat_result | None = None) -> bool:
    """Remove a file and return True if it begins like a record, or is one whose beginning a power cut took.

    With the status of a file that was read, another one, which a process has stored since, stays.
    """
    with suppress(OSError):
        with open_regular(path) as file:
            beginning = file.read(len(_MAGIC))
            is_same = status is None or os.path.samestat(status, os.fstat(file.fileno()))
        if is_same and _MAGIC.startswith(beginning.rstrip(b"\0")):
            path.unlink()
            return True
    return False


def _digest(key: str, content: bytes) -> bytes:
    digest = hashlib.sha256(key.encode())
    digest.update(content)
    return digest.digest()
