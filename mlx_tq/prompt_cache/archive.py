"""The archive: packed rows of evicted tokens, in a file that no other process can open.

The file has no name, or on systems that cannot do that loses it as soon as it is open: nothing is left behind, however
the process ends. A thread writes; no reader waits, as a block that is not written yet is read from memory. What it
cannot take (a full disk, or a queue longer than the disk is fast) is lost to recall, counted, and reported once. At the
limit the least recalled blocks are deleted, the oldest first.

Blocks have at most 32 rows, so the file consists of slots of one size. A shorter block leaves a hole, which takes no
disk space; the limit counts the bytes of blocks.
"""

import contextlib
import os
import queue
import shutil
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from itertools import groupby
from pathlib import Path

import numpy as np

from mlx_tq.cache.blocks import Block, LayerShape, block_nbytes, from_bytes, keys_start, to_bytes
from mlx_tq.config import BLOCK
from mlx_tq.errors import CacheFormatError

_LIMIT = 20 * 10**9
_DISK_SHARE = 10  # the default limit is at most this part of the free disk
_MAX_PENDING = 256 * 10**6  # bytes that may wait to be written


def default_limit(folder: Path) -> int:
    """Return the default bytes of an archive: a tenth of the free disk, at most 20 GB; 0 if the disk is not readable.

    The folder may be missing.
    """
    with contextlib.suppress(OSError):
        existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        return min(_LIMIT, shutil.disk_usage(existing).free // _DISK_SHARE)
    return 0


class ArchivedBlock:
    """A block in the archive. Its slot is free again once the block is deleted, or nothing refers to this object."""

    def __init__(
        self, positions: np.ndarray, nbytes: int, start: int, number: int, on_free: Callable[[], None]
    ) -> None:
        self.positions, self.nbytes = positions, nbytes  # int64 [n], ascending
        self.start, self.number = start, number  # byte in the file, and number in the order of archiving
        self.recalls = 0  # how often it was recalled
        self.lost = False  # it could not be written, or was deleted
        self.pending: bytes | None = None  # its bytes until they are in the file; if that fails, for its readers
        self._free = weakref.finalize(self, on_free)  # once, in any thread
        self._free.atexit = False

    def delete(self) -> None:
        self.lost = True
        self._free()


class Archive:
    """A file of blocks, which forks of a conversation share."""

    def __init__(self, shapes: list[LayerShape], folder: Path, limit: int | None = None) -> None:
        """Open a new file in `folder`, which is made if it is missing. If that fails, every block is lost."""
        self.shapes = shapes  # of each layer's rows
        self.lost = self.deleted = 0  # blocks that could not be written, and that made room for others
        self.warning: str | None = None  # what a user should know, until it is taken
        self._has_warned = False
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(prefix="mlx_tq-archive-", dir=folder) as file:
                self._file = os.dup(file.fileno())
            self.limit = default_limit(folder) if limit is None else limit
        except OSError as error:
            self._file, self.limit = -1, 0
            self._warn_of_loss(f"no file can be made in {folder}: {error.strerror}")
        self._slot_nbytes = block_nbytes(BLOCK, shapes)
        self._used = self._num_slots = self._num_blocks = self._num_pending = 0
        self._free_slots: list[int] = []
        self._freed: deque[tuple[int, int]] = deque()  # slots and bytes of blocks that are gone, from any thread
        self._blocks: weakref.WeakSet[ArchivedBlock] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[tuple[ArchivedBlock, bytes] | threading.Event | None] = queue.SimpleQueue()
        threading.Thread(target=_write_all, args=(self._queue, weakref.ref(self)), daemon=True).start()
        closing = weakref.finalize(self, _close, self._file, self._queue)
        closing.atexit = False  # a thread that still computes may wait for the writer then

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks, those that are not written yet included."""
        with self._lock:
            self._collect_freed()
            return self._used

    # Writing.

    def put(self, block: Block) -> ArchivedBlock | None:
        """Archive a block; return None if it exceeds the limit, or the disk is too slow."""
        data = to_bytes(block)
        with self._lock:
            if reason := self._make_space(len(data)):
                self._warn_of_loss(reason)
                self.lost += 1
                return None
            if self._free_slots:
                slot = self._free_slots.pop()
            else:
                slot, self._num_slots = self._num_slots, self._num_slots + 1
            free = partial(self._freed.append, (slot, len(data)))
            archived = ArchivedBlock(block.positions, len(data), slot * self._slot_nbytes, self._num_blocks, free)
            archived.pending = data
            self._blocks.add(archived)
            self._num_blocks += 1
            self._used += len(data)
            self._num_pending += len(data)
            self._queue.put((archived, data))  # in this order: the previous block of the slot may still be pending
        return archived

    def _make_space(self, nbytes: int) -> str:
        """Delete blocks until there is space; return why there cannot be any, or ""."""
        if self._num_pending + nbytes > _MAX_PENDING:
            return "the disk is slower than eviction"
        self._collect_freed()
        while nbytes <= self.limit < self._used + nbytes:
            block = min((b for b in self._blocks if not b.lost), key=lambda b: (b.recalls, b.number), default=None)
            if block is None:
                break
            self._delete_for_space(block)
            self._collect_freed()
        if nbytes > self.limit:
            return f"{nbytes:,} bytes are above its limit of {self.limit:,}; --kv-archive-limit allows more"
        return ""

    def _delete_for_space(self, block: ArchivedBlock) -> None:
        block.delete()
        self.deleted += 1
        if self.deleted == 1:
            self.warn(
                f"the archive has reached its limit of {self.limit:,} bytes: the least recalled blocks are deleted, "
                "the oldest first, and cannot be recalled. --kv-archive-limit allows more. The conversation continues."
            )

    def _collect_freed(self) -> None:
        while self._freed:
            slot, nbytes = self._freed.popleft()
            self._free_slots.append(slot)
            self._used -= nbytes

    def settle(self) -> None:
        """Wait until everything is written."""
        done = threading.Event()
        self._queue.put(done)
        done.wait()

    def wait_for_queue(self) -> None:
        """Wait until there is room for more to be written."""
        if self._num_pending > _MAX_PENDING // 2:
            self.settle()

    def _write(self, block: ArchivedBlock, data: bytes) -> None:
        """Write a block in the thread, unless it was deleted meanwhile."""
        try:
            if not block.lost and os.pwrite(self._file, data, block.start) != len(data):
                raise OSError(None, "only a part of it was written")
            block.pending = None
        except OSError as error:
            with self._lock:
                block.delete()
                self.lost += 1
                self._warn_of_loss(error.strerror or str(error))
        finally:
            with self._lock:
                self._num_pending -= len(data)

    # Reading.

    def read_keys(self, blocks: Iterable[ArchivedBlock], layer: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the keys of one layer, uint16 [H, tokens, words], and each block's mean [blocks, H, D]; unchecked."""
        shape, (heads, width, _, mean) = self.shapes[layer], self.shapes[layer]
        keys, means = [], []
        for count, same_size in groupby(blocks, key=lambda block: len(block.positions)):
            start = keys_start(count) + 2 * sum(other.key_count(count) for other in self.shapes[:layer])
            parts = [self._read_part(block, start, 2 * shape.key_count(count)) for block in same_size]
            words = np.frombuffer(b"".join(parts), "<u2").reshape(len(parts), -1)
            size = heads * count * width
            keys.append(words[:, :size].reshape(-1, heads, count, width).swapaxes(0, 1).reshape(heads, -1, width))
            means.append(words[:, size:].view(np.float16).reshape(len(parts), heads, mean))
        return np.concatenate(keys, axis=1), np.concatenate(means)

    def read(self, block: ArchivedBlock) -> Block | None:
        """Return a block, or None if it is lost, damaged or unreadable."""
        with contextlib.suppress(CacheFormatError, OSError):
            return None if block.lost else from_bytes(self._read_bytes(block, 0, block.nbytes), self.shapes)
        return None

    def read_raw(self, block: ArchivedBlock) -> bytes:
        """Return a block as it is in the file, unchecked; zeros where the disk does not return it."""
        return self._read_part(block, 0, block.nbytes)

    def _read_part(self, block: ArchivedBlock, start: int, size: int) -> bytes:
        data = b""
        with contextlib.suppress(OSError):
            data = self._read_bytes(block, start, size)
        return data.ljust(size, b"\0")

    def _read_bytes(self, block: ArchivedBlock, start: int, size: int) -> bytes:
        data = block.pending  # before the file is read, in which all others are
        if data is None:
            return os.pread(self._file, size, block.start + start)
        return data[start : start + size]

    # Failures.

    def delete_damaged(self, blocks: Iterable[ArchivedBlock]) -> None:
        """Delete blocks that cannot be read, and warn of them."""
        damaged = [block for block in blocks if not block.lost]
        for block in damaged:
            block.delete()
        self.warn_of_damage(len(damaged))

    def warn_of_damage(self, count: int) -> None:
        if count:
            what = "1 block of the archive is damaged: what it"
            what = what if count == 1 else f"{count} blocks of the archive are damaged: what they"
            self.warn(f"{what} held cannot be recalled. The conversation continues.")

    def warn(self, message: str) -> None:
        """Add a warning behind those that were not taken yet."""
        self.warning = message if self.warning is None else f"{self.warning} {message}"

    def take_warning(self) -> str | None:
        """Return the pending warnings and clear them."""
        warning, self.warning = self.warning, None
        return warning

    def _warn_of_loss(self, reason: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            self.warn(
                f"evicted tokens cannot be archived ({reason}), so they cannot be recalled. The conversation continues."
            )


def _close(file: int, jobs: "queue.SimpleQueue[tuple[ArchivedBlock, bytes] | threading.Event | None]") -> None:
    jobs.put(None)
    if file >= 0:
        os.close(file)


def _write_all(
    jobs: "queue.SimpleQueue[tuple[ArchivedBlock, bytes] | threading.Event | None]",
    reference: "weakref.ref[Archive]",
) -> None:
    """Write what is queued, until the file is closed. Run by the thread, which keeps no archive alive."""
    while (job := jobs.get()) is not None:
        if isinstance(job, threading.Event):
            job.set()
            continue
        archive = reference()
        if archive is None:
            return
        archive._write(*job)
        del archive, job
