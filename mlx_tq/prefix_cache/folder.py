"""The folder of a prefix cache: records in files that are written once. A file's name is its key, and so the index.

    mlx_tq_prefix_cache            made in an empty folder only; without it, a folder is not a prefix cache
    blocks/KEY  checkpoints/KEY    TQR1 | sha256 of key and content | content
    lock                           held by the one process that writes; else it has the bytes of all records
    rank-R-of-N/                   such a folder, of rank R where N ranks run a model together

A file appears whole, by rename, and is read only if its checksum is right: a power cut, a full disk or a changed byte
makes a record missing, never wrong. Each use sets the time of a checkpoint. Beyond the limit, checkpoints are removed
by worth, and with each the blocks that no other one names.

Others may put anything into the folder. Only regular files are opened, and only what has the name and the first letters
of a record is deleted.
"""

import errno
import fcntl
import hashlib
import math
import os
import re
import stat
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from http_limits.process_checks import is_disk_full
from mlx_tq.distributed.group import ALONE, Ranks
from mlx_tq.errors import CacheFormatError, ConfigError, one_line
from mlx_tq.files import atomic_write, cache_folder, open_regular, sync_descriptor
from mlx_tq.prefix_cache.summary import KEY, Summary, read_summary

AUTO, OFF = "auto", "off"
LIMIT = 50 * 10**9
HOURLY_LIMIT = 128 * 2**30  # bytes written in an hour, so that the drive does not wear out
BLOCKS, CHECKPOINTS = KINDS = "blocks", "checkpoints"
RANK = "rank-"
_MARKER, _LOCK = "mlx_tq_prefix_cache", "lock"
_MAGIC = b"TQR1"
_IGNORED = {".DS_Store", ".localized"}  # which macOS puts into folders
_TEMPORARY = re.compile(rf"\.{KEY.pattern}\.[0-9a-f]{{8}}")
_DIGEST_SIZE = hashlib.sha256().digest_size
_HEAD_SIZE = len(_MAGIC) + _DIGEST_SIZE
_MAX_PARTS = 1024  # of one read, on all systems
_HALF_LIFE = 64  # checkpoints used later, after which one is worth half
_SPARE = 20  # a removal frees a twentieth of the limit more than is needed, so that few are due
_PASSING = {errno.EMFILE, errno.ENFILE, errno.EIO, errno.ENOMEM}  # errors that say nothing of a file's content


class Record(NamedTuple):
    time: int  # of the last use in nanoseconds
    size: int  # bytes that it takes of the disk
    path: Path


class Folder:
    """A folder of records, up to `limit` bytes, which several processes may read while one writes.

    It is made where it is missing or empty. Raises ConfigError if it cannot be written, belongs to another user, or
    holds other files.
    """

    def __init__(self, path: Path, limit: int = LIMIT, hourly_limit: int = HOURLY_LIMIT) -> None:
        self.path, self.limit, self.hourly_limit = path, limit, hourly_limit
        self._nbytes = 0  # of all records, while this process writes
        self._needed_blocks: set[str] = set()  # keys of blocks whose checkpoint is being written
        self._written: Counter[int] = Counter()  # bytes, by minute of the last hour
        self._summaries: dict[str, tuple[int, Summary | None]] = {}  # of checkpoints, with their inodes
        self._frees_disk = True  # False if a full disk stayed full after a removal, as with snapshots, until a write
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

    def read(self, key: str) -> bytes | None:
        """Return a checkpoint, or None if it is missing. A damaged one is removed."""
        return self._read(self._path(CHECKPOINTS, key))[0]

    def read_block(self, key: str, parts: Sequence[memoryview]) -> bool:
        """Read a block into writable parts; return whether it was there. A damaged one is removed."""
        with suppress(OSError), open_regular(self._path(BLOCKS, key)) as file:
            status, head = os.fstat(file.fileno()), file.read(_HEAD_SIZE)
            is_whole = status.st_size == _HEAD_SIZE + sum(part.nbytes for part in parts)
            if is_whole and head[: len(_MAGIC)] == _MAGIC:
                for start in range(0, len(parts), _MAX_PARTS):
                    os.readv(file.fileno(), parts[start : start + _MAX_PARTS])
                if head[len(_MAGIC) :] == _digest(key, parts):
                    return True
            _remove(self._path(BLOCKS, key), status)
        return False

    def checkpoints(self) -> dict[str, Summary]:
        """Return the summaries of all checkpoints, by key. They are not verified until a checkpoint is read."""
        with suppress(OSError):
            return self._summarize()
        return {}

    def _summarize(self) -> dict[str, Summary]:
        summaries: dict[str, tuple[int, Summary | None]] = {}
        with os.scandir(self.path / CHECKPOINTS) as entries:
            for entry in entries:
                inode, earlier = entry.inode(), self._summaries.get(entry.name)
                if earlier is not None and earlier[0] == inode:
                    summaries[entry.name] = earlier
                elif KEY.fullmatch(entry.name):
                    summaries[entry.name] = inode, self._read_summary(Path(entry.path))
        self._summaries = summaries
        return {key: summary for key, (_, summary) in summaries.items() if summary is not None}

    def _read_summary(self, path: Path) -> Summary | None:
        try:
            with open_regular(path) as file:
                file.seek(_HEAD_SIZE)
                return read_summary(file)
        except CacheFormatError:
            return None
        except OSError as error:
            if error.errno in _PASSING:
                raise
            return None  # removed meanwhile, or no regular file

    def has(self, kind: str, key: str) -> bool:
        """Return whether a record exists, damaged or not."""
        return os.path.lexists(self._path(kind, key))

    def nbytes(self, kind: str, key: str) -> int:
        """Return the bytes that a record takes of the disk, damaged or not; 0 if it is missing."""
        with suppress(OSError):
            return disk_bytes(self._path(kind, key).lstat())
        return 0

    def make_room(self, nbytes: int, needed_blocks: Iterable[str]) -> None:
        """Remove what is worth least, inside `writing`, so that `nbytes` more are within the limit.

        These blocks stay until `writing` ends, as those that are written do.
        """
        self._needed_blocks.update(needed_blocks)
        if self._nbytes + nbytes > self.limit:
            self._remove_until(self.limit - nbytes - self.limit // _SPARE)

    def may_write(self, nbytes: int) -> bool:
        """Return whether `nbytes` more are within what may be written in an hour."""
        hour_ago = int(time.monotonic() // 60) - 60
        self._written = Counter({minute: written for minute, written in self._written.items() if minute > hour_ago})
        return self._written.total() + nbytes <= self.hourly_limit

    def write(self, kind: str, key: str, content: bytes, *, verify: bool = False) -> None:
        """Write a record, inside `writing`, without waiting for the disk.

        One that exists stays, but with `verify` only if it is not damaged.
        """
        if kind == BLOCKS:
            self._needed_blocks.add(key)
        path, parts = self._path(kind, key), (_MAGIC, _digest(key, [content]), content)
        if verify:
            before = self.nbytes(kind, key)
            self._nbytes -= before if self._read(path)[1] else 0
        if self.has(kind, key):
            return
        try:
            _write(path, parts)
        except OSError as error:
            size = sum(map(len, parts))
            if not is_disk_full(error) or not self._frees_disk or size > self._nbytes:
                raise
            self._frees_disk = False
            self._remove_until(self._nbytes - size)
            _write(path, parts)
        self._frees_disk = True
        size = self.nbytes(kind, key)
        self._nbytes += size
        self._written[int(time.monotonic() // 60)] += size
        self._summaries.pop(key, None)

    def remove(self, kind: str, key: str) -> None:
        _remove(self._path(kind, key))
        self._summaries.pop(key, None)

    def touch(self, key: str) -> None:
        """Let a checkpoint count as used now."""
        with suppress(OSError):
            os.utime(self._path(CHECKPOINTS, key), follow_symlinks=False)

    def sync(self, key: str) -> None:
        """Wait until a checkpoint, and so what was written before it, is on the disk."""
        with suppress(OSError), open_regular(self._path(CHECKPOINTS, key)) as file:
            sync_descriptor(file.fileno())

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
            self._needed_blocks.clear()
            if nbytes.isdigit():
                self._nbytes = int(nbytes)
            else:
                self._remove_temporaries()
                self._remove_until(self.limit)  # also blocks whose checkpoint was not written any more
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
        records, now = [], time.time_ns()
        for kind in KINDS:
            with os.scandir(self.path / kind) as entries:
                for entry in entries:
                    with suppress(OSError):  # removed meanwhile
                        status = entry.stat(follow_symlinks=False)
                        if KEY.fullmatch(entry.name) and stat.S_ISREG(status.st_mode):
                            used = status.st_mtime_ns if status.st_mtime_ns <= now else 0  # the clock was wrong
                            records.append(Record(used, disk_bytes(status), Path(entry.path)))
        return sorted(records)

    def check(self) -> tuple[int, int]:
        """Read all records; return how many there are, and how many were damaged and are removed now."""
        records = self.records()
        return len(records), sum(self._read(record.path)[1] for record in records)

    def clear(self) -> int:
        """Remove all records; return their bytes."""
        return sum(record.size for record in self.records() if _remove(record.path))

    def _path(self, kind: str, key: str) -> Path:
        if not KEY.fullmatch(key):  # a forged record may name anything
            raise ValueError(f"{key[:80]!r} is not the key of a record")
        return self.path / kind / key

    def _read(self, path: Path) -> tuple[bytes | None, bool]:
        """Return the content of a record, or None, and whether it was damaged and has been removed."""
        with suppress(OSError), open_regular(path) as file:
            status = os.fstat(file.fileno())
            if status.st_size <= self.limit and file.read(len(_MAGIC)) == _MAGIC:
                digest, content = file.read(_DIGEST_SIZE), file.readall()
                if digest == _digest(path.name, [content]):
                    return content, False
            return None, _remove(path, status)
        return None, False

    def _remove_until(self, limit: int) -> None:
        """Remove blocks that no checkpoint names, then checkpoints by worth, until the others are within `limit`."""
        records: dict[str, dict[str, Record]] = {kind: {} for kind in KINDS}
        for record in self.records():
            records[record.path.parent.name][record.path.name] = record
        self._nbytes = sum(record.size for by_key in records.values() for record in by_key.values())
        blocks, summaries = records[BLOCKS], self._summarize()
        holders = Counter(key for summary in summaries.values() for key in {*summary.block_keys})

        def remove(record: Record) -> None:
            if _remove(record.path):
                self._nbytes -= record.size

        for key, record in blocks.items():
            if not holders[key] and key not in self._needed_blocks:
                remove(record)
        worth = {  # its logarithm
            key: math.log2(len(summaries[key].tokens)) - later_uses / _HALF_LIFE if key in summaries else -math.inf
            for later_uses, key in enumerate(reversed(records[CHECKPOINTS]))
        }
        for key in sorted(worth, key=lambda key: worth[key]):
            if self._nbytes <= limit:
                return
            remove(records[CHECKPOINTS][key])
            for block in {*summaries[key].block_keys} if key in summaries else ():
                holders[block] -= 1
                if not holders[block] and block in blocks and block not in self._needed_blocks:
                    remove(blocks[block])


def disk_bytes(status: os.stat_result) -> int:
    """Return the bytes that a file takes of the disk, also before they are written there."""
    return max(status.st_blocks * 512, status.st_size)


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


def _digest(key: str, parts: Iterable[bytes | memoryview]) -> bytes:
    digest = hashlib.sha256(key.encode())
    for part in parts:
        digest.update(part)
    return digest.digest()
