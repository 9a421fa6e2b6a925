"""The archive: every packed row that left a sequence, in a file that nobody else can open.

The file is unlinked as soon as it is open, so nothing stays behind, however the process ends. A thread of its own
writes; whoever hands rows over never waits for it. What it cannot take (a full disk, a queue that is longer than the
disk is fast) is lost to recall, counted, and said once; the conversation goes on.
"""

import contextlib
import mmap
import os
import queue
import shutil
import tempfile
import threading
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from mlx_tq.cache.blocks import Block, LayerShape, from_bytes, keys_start, to_bytes
from mlx_tq.errors import CacheFormatError

LIMIT = 20 * 10**9
# Of the free disk, at most.
_SHARE = 10
# Bytes that may wait to be written.
_WAITING = 256 * 10**6


def default_limit(folder: Path) -> int:
    """Bytes of an archive in a folder: 20 GB, or a tenth of the free disk where that is less."""
    return min(LIMIT, shutil.disk_usage(folder).free // _SHARE)


class Extent:
    """A block's place in the file; the place is free again when nobody holds the extent any more.

    Attributes:
        positions: ascending, int64 [n].
        size: bytes of the block.
        start: where it begins in the file; -1 until it is written.
        lost: it could not be written.
    """

    def __init__(self, positions: np.ndarray, size: int) -> None:
        self.positions, self.size, self.start, self.lost = positions, size, -1, False


class ArchiveFile:
    """A file of blocks, which several sequences may share: a fork reads what the conversation before it archived.

    Attributes:
        lost: blocks that could not be written.
        warning: why not, until somebody takes it.
    """

    def __init__(self, shapes: list[LayerShape], folder: Path, limit: int | None = None) -> None:
        """Open a new file in `folder`, which is made where it is missing; where that fails, everything is lost."""
        self.shapes = shapes
        self.lost = 0
        self.warning: str | None = None
        self._refused = False
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file, name = tempfile.mkstemp(prefix="mlx_tq-archive-", dir=folder)
            Path(name).unlink()
            self.limit = default_limit(folder) if limit is None else limit
        except OSError as error:
            self._file, self.limit = -1, 0
            self._refuse(f"no file can be made in {folder}: {error.strerror}")
        self._end = 0
        self._free: dict[int, list[int]] = {}  # starts of places by size
        self._lock = threading.RLock()  # places may be given back while one is being chosen
        self._waiting = 0
        self._queue: queue.SimpleQueue[tuple[Extent, bytes] | threading.Event | None] = queue.SimpleQueue()
        threading.Thread(target=_write_all, args=(self._queue, weakref.ref(self)), daemon=True).start()
        weakref.finalize(self, _close, self._file, self._queue)

    @property
    def nbytes(self) -> int:
        """Bytes of blocks that somebody holds, those that wait among them."""
        free = sum(size * len(starts) for size, starts in self._free.items())
        return self._end - free + self._waiting

    def put(self, block: Block) -> Extent | None:
        """Hand a block over to be written; None where there is no room for it, or the disk is behind."""
        data = to_bytes(block)
        with self._lock:
            is_behind = self._waiting + len(data) > _WAITING
            if is_behind or self.nbytes + len(data) > self.limit:
                full = f"the archive has reached its limit of {self.limit:,} bytes; --kv-archive-limit allows more"
                self._refuse("the disk is slower than tokens leave" if is_behind else full)
                self.lost += 1
                return None
            self._waiting += len(data)
        extent = Extent(block.positions, len(data))
        self._queue.put((extent, data))
        return extent

    def settle(self) -> None:
        """Wait until all that was handed over is written."""
        done = threading.Event()
        self._queue.put(done)
        done.wait()

    def keys(self, extents: Iterable[Extent], layer: int) -> tuple[np.ndarray, np.ndarray]:
        """Keys of one layer as uint16 [H, tokens, words] and the mean of each extent [extents, H, D]; not checked."""
        shape = self.shapes[layer]
        keys, means = [], []
        with self._mapped() as mapped:
            for extent in extents:
                count = len(extent.positions)
                before = sum(other.key_count(count) for other in self.shapes[:layer])
                at = extent.start + keys_start(count) + 2 * before
                words = np.frombuffer(mapped, "<u2", shape.key_count(count), at)
                size = shape.heads * count * shape.key_words
                keys.append(words[:size].reshape(shape.heads, count, shape.key_words).copy())
                means.append(words[size:].view(np.float16).reshape(shape.heads, shape.mean).copy())
                del words  # the map can be closed only when nobody looks at it
        return np.concatenate(keys, axis=1), np.stack(means)

    def read(self, extent: Extent) -> Block:
        """A block, checked.

        Raises:
            CacheFormatError: it is damaged, or the disk gives it no more.
        """
        try:
            return from_bytes(os.pread(self._file, extent.size, extent.start), self.shapes)
        except OSError as error:
            raise CacheFormatError(f"a block of packed rows cannot be read: {error.strerror}. It is lost.") from error

    def raw(self, extent: Extent) -> bytes:
        """A block as it is in the file, not checked; shorter where the disk gives no more."""
        with contextlib.suppress(OSError):
            return os.pread(self._file, extent.size, extent.start)
        return b""

    def make_room(self) -> None:
        """Wait until there is room for more to be written."""
        if self._waiting > _WAITING // 2:
            self.settle()

    def warn(self, message: str) -> None:
        """Have something said to the user, if nothing is yet."""
        self.warning = self.warning or message

    def take_warning(self) -> str | None:
        """What a user should know, once."""
        warning, self.warning = self.warning, None
        return warning

    @contextlib.contextmanager
    def _mapped(self) -> Iterator[mmap.mmap]:
        with mmap.mmap(self._file, 0, prot=mmap.PROT_READ) as mapped:
            yield mapped

    def _write(self, extent: Extent, data: bytes) -> None:
        """In the thread: find a place and fill it."""
        with self._lock:
            places = self._free.get(len(data))
            start = places.pop() if places else self._end
            if not places:
                self._free.pop(len(data), None)
            self._end = max(self._end, start + len(data))
        try:
            if os.pwrite(self._file, data, start) != len(data):
                raise OSError(None, "only a part of it was written")
        except OSError as error:
            with self._lock:
                extent.lost = True
                self.lost += 1
                self._refuse(error.strerror or str(error))
                self._free.setdefault(len(data), []).append(start)
        else:
            extent.start = start
            weakref.finalize(extent, _give_back, weakref.ref(self), start, len(data))
        finally:
            with self._lock:
                self._waiting -= len(data)

    def _refuse(self, reason: str) -> None:
        """Have it said, once, that something is lost."""
        if not self._refused:
            self._refused = True
            said = f"what leaves the cache cannot be archived ({reason}), so it cannot be recalled."
            self.warn(f"{said} The conversation goes on.")

    def give_back(self, start: int, size: int) -> None:
        """A place is free: its last holder is gone."""
        with self._lock:
            self._free.setdefault(size, []).append(start)


def _give_back(archive: "weakref.ref[ArchiveFile]", start: int, size: int) -> None:
    found = archive()
    if found is not None:
        found.give_back(start, size)


def _close(file: int, waiting: "queue.SimpleQueue[tuple[Extent, bytes] | threading.Event | None]") -> None:
    waiting.put(None)
    if file >= 0:
        os.close(file)


def _write_all(
    waiting: "queue.SimpleQueue[tuple[Extent, bytes] | threading.Event | None]", archive: "weakref.ref[ArchiveFile]"
) -> None:
    """The thread: write what waits until the file is closed."""
    while (job := waiting.get()) is not None:
        if isinstance(job, threading.Event):
            job.set()
            continue
        found = archive()
        if found is None:
            return
        found._write(*job)
        del found, job
