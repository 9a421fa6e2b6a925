"""The archive: every packed row that left a sequence, in a file that nobody else can open.

The file has no name, or on systems that cannot do that loses it as soon as it is open: nothing stays behind, however
the process ends. A thread of its own writes; whoever hands rows over never waits for it, nor who reads them: what is
still to be written is read from memory. What it cannot take (a full
disk, a queue that is longer than the disk is fast) is lost to recall, counted, and said once; the conversation goes on.
At its limit the blocks that were recalled least leave it, the oldest first.
"""

import contextlib
import heapq
import os
import queue
import shutil
import tempfile
import threading
import weakref
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path

import numpy as np

from mlx_tq.cache.blocks import Block, LayerShape, from_bytes, keys_start, to_bytes
from mlx_tq.errors import CacheFormatError
from mlx_tq.prompt_cache.places import Places

LIMIT = 20 * 10**9
# Of the free disk, at most.
_SHARE = 10
# Bytes that may wait to be written.
_WAITING = 256 * 10**6


def default_limit(folder: Path) -> int:
    """Bytes of an archive in a folder: 20 GB, or a tenth of the free disk where that is less."""
    return min(LIMIT, shutil.disk_usage(folder).free // _SHARE)


class Extent:
    """A block's place in the file; the place is free again when the block left, or nobody holds the extent any more.

    Attributes:
        positions: ascending, int64 [n].
        size: bytes of the block.
        start: where it begins in the file.
        recalls: how often it was.
        lost: it could not be written, or left: it is not in the file.
        waiting: its bytes, until they are in the file; where that fails, for whoever is reading it.
    """

    def __init__(self, positions: np.ndarray, size: int, start: int, places: Places) -> None:
        self.positions, self.size, self.start = positions, size, start
        self.recalls, self.lost = 0, False
        self.waiting: bytes | None = None
        self._give_back = weakref.finalize(self, places.give_back, start, size)  # once, whatever comes first
        self._give_back.atexit = False

    def leave(self) -> None:
        """Leave the file for good."""
        self.lost = True
        self._give_back()


class ArchiveFile:
    """A file of blocks, which several sequences may share: a fork reads what the conversation before it archived.

    Attributes:
        lost: blocks that could not be written.
        left: blocks that made room for others.
        warning: why, until somebody takes it.
    """

    def __init__(self, shapes: list[LayerShape], folder: Path, limit: int | None = None) -> None:
        """Open a new file in `folder`, which is made where it is missing; where that fails, everything is lost."""
        self.shapes = shapes
        self.lost = self.left = 0
        self.warning: str | None = None
        self._refused = False
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(prefix="mlx_tq-archive-", dir=folder) as file:
                self._file = os.dup(file.fileno())
            self.limit = default_limit(folder) if limit is None else limit
        except OSError as error:
            self._file, self.limit = -1, 0
            self._refuse(f"no file can be made in {folder}: {error.strerror}")
        self._places = Places(self.limit)
        self._leaving: list[tuple[int, int, weakref.ref[Extent]]] = []  # a heap: times recalled, number, block
        self._lock = threading.Lock()
        self._count = self._waiting = 0
        self._queue: queue.SimpleQueue[tuple[Extent, bytes] | threading.Event | None] = queue.SimpleQueue()
        threading.Thread(target=_write_all, args=(self._queue, weakref.ref(self)), daemon=True).start()
        closing = weakref.finalize(self, _close, self._file, self._queue)
        closing.atexit = False  # a thread that still computes may wait for the writer then

    @property
    def nbytes(self) -> int:
        """Bytes of blocks that somebody holds, those that wait among them."""
        with self._lock:
            return self._places.used

    def put(self, block: Block) -> Extent | None:
        """Hand a block over to be written; None where it is above the limit itself, or the disk is behind."""
        data = to_bytes(block)
        with self._lock:
            place, reason = self._place(len(data))
            if place is None:
                self._refuse(reason)
                self.lost += 1
                return None
            extent = Extent(block.positions, len(data), place, self._places)
            extent.waiting = data
            heapq.heappush(self._leaving, (0, self._count, weakref.ref(extent)))
            self._count += 1
            self._waiting += len(data)
            self._queue.put((extent, data))  # in this order: who had the place before may be waiting still
        return extent

    def _place(self, size: int) -> tuple[int | None, str]:
        """Where so many bytes may lie, for which others leave; else why nowhere."""
        if self._waiting + size > _WAITING:
            return None, "the disk is slower than tokens leave"
        if size <= self.limit:
            while (place := self._places.take(size)) is None and self._leaving:
                self._make_leave()
            if place is not None:
                return place, ""
        return None, f"{size:,} bytes are above its limit of {self.limit:,}; --kv-archive-limit allows more"

    def _make_leave(self) -> None:
        """Let the block leave that was recalled least, the oldest of those."""
        recalls, number, found = heapq.heappop(self._leaving)
        extent = found()
        if extent is None or extent.lost:
            return
        if extent.recalls > recalls:
            heapq.heappush(self._leaving, (extent.recalls, number, found))
            return
        extent.leave()
        self.left += 1
        if self.left == 1:
            self.warn(
                f"the archive has reached its limit of {self.limit:,} bytes: blocks that were recalled least leave it, "
                "the oldest first, and cannot come back. --kv-archive-limit allows more. The conversation goes on."
            )

    def settle(self) -> None:
        """Wait until all that was handed over is written."""
        done = threading.Event()
        self._queue.put(done)
        done.wait()

    def keys(self, extents: Iterable[Extent], layer: int) -> tuple[np.ndarray, np.ndarray]:
        """Keys of one layer as uint16 [H, tokens, words] and the mean of each extent [extents, H, D]; not checked."""
        shape, (heads, width, _, mean) = self.shapes[layer], self.shapes[layer]
        keys, means = [], []
        for count, run in groupby(extents, key=lambda extent: len(extent.positions)):
            before = keys_start(count) // 2 + sum(other.key_count(count) for other in self.shapes[:layer])
            found = self._words(list(run), before, shape.key_count(count))
            size = heads * count * width
            keys.append(found[:, :size].reshape(-1, heads, count, width).swapaxes(0, 1).reshape(heads, -1, width))
            means.append(found[:, size:].view(np.float16).reshape(len(found), heads, mean))
        return np.concatenate(keys, axis=1), np.concatenate(means)

    def _words(self, extents: list[Extent], before: int, count: int) -> np.ndarray:
        """Of each block so many words, behind as many others, uint16 [extents, count], as `_part` reads."""
        parts = (self._part(extent, 2 * before, 2 * count) for extent in extents)
        return np.frombuffer(b"".join(parts), "<u2").reshape(len(extents), count)

    def _part(self, extent: Extent, start: int, size: int) -> bytes:
        """So many bytes of a block, not checked; zeros where the disk gives no more."""
        found = b""
        with contextlib.suppress(OSError):
            found = self._bytes(extent, start, size)
        return found.ljust(size, b"\0")

    def read(self, extent: Extent) -> Block:
        """A block, checked.

        Raises:
            CacheFormatError: it is damaged, or the disk gives it no more.
        """
        try:
            return from_bytes(self._bytes(extent, 0, extent.size), self.shapes)
        except OSError as error:
            raise CacheFormatError(f"a block of packed rows cannot be read: {error.strerror}. It is lost.") from error

    def undamaged(self, extent: Extent) -> Block | None:
        """A block, if the archive has it and it can be read."""
        with contextlib.suppress(CacheFormatError):
            return None if extent.lost else self.read(extent)
        return None

    def drop(self, extents: Iterable[Extent]) -> None:
        """Have blocks leave that cannot be read, which is said of those that had not left already."""
        damaged = [extent for extent in extents if not extent.lost]
        for extent in damaged:
            extent.leave()
        self.say_damaged(len(damaged))

    def raw(self, extent: Extent) -> bytes:
        """A block as it is in the file, not checked; zeros where the disk gives no more."""
        return self._part(extent, 0, extent.size)

    def make_room(self) -> None:
        """Wait until there is room for more to be written."""
        if self._waiting > _WAITING // 2:
            self.settle()

    def warn(self, message: str) -> None:
        """Have something said to the user, behind what is still to be said."""
        self.warning = message if self.warning is None else f"{self.warning} {message}"

    def say_damaged(self, blocks: int) -> None:
        """Have it said that so many blocks cannot be read, if any."""
        if blocks:
            what = "1 block is damaged: what it" if blocks == 1 else f"{blocks} blocks are damaged: what they"
            self.warn(f"of the archive {what} held cannot be recalled. The conversation goes on.")

    def take_warning(self) -> str | None:
        """What a user should know, once."""
        warning, self.warning = self.warning, None
        return warning

    def _bytes(self, extent: Extent, start: int, size: int) -> bytes:
        data = extent.waiting  # asked before the file, in which all others are
        return os.pread(self._file, size, extent.start + start) if data is None else data[start : start + size]

    def _write(self, extent: Extent, data: bytes) -> None:
        """In the thread: fill a block's place, unless it left meanwhile."""
        try:
            if not extent.lost and os.pwrite(self._file, data, extent.start) != len(data):
                raise OSError(None, "only a part of it was written")
            extent.waiting = None
        except OSError as error:
            with self._lock:
                extent.leave()
                self.lost += 1
                self._refuse(error.strerror or str(error))
        finally:
            with self._lock:
                self._waiting -= len(data)

    def _refuse(self, reason: str) -> None:
        """Have it said, once, that something is lost."""
        if not self._refused:
            self._refused = True
            said = f"what leaves the cache cannot be archived ({reason}), so it cannot be recalled."
            self.warn(f"{said} The conversation goes on.")


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
