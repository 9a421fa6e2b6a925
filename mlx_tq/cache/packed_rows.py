"""The packed rows of a layer, in buffers that copies of a cache share.

Rows that several caches have are never written again: the first one that writes puts new rows into a buffer behind
them. So a prefix that many sequences share is stored once.
"""

import weakref
from itertools import accumulate, pairwise
from weakref import WeakSet

import mlx.core as mx

from mlx_tq.config import BLOCK
from mlx_tq.kernels.regions import SharedRows, rows_between

BLOCK_ROWS = 256  # rows that the prefix cache stores together
STEP = 256  # rows by which the buffer grows once it has as many; a shorter one grows by blocks
MIN_SHARED = STEP  # fewer shared rows are copied, as they are not worth a buffer of their own
MAX_SHARED_BUFFERS = 4  # attention reads each shared buffer by itself

Pair = tuple[mx.array, mx.array]
StoredRows = mx.array | list[mx.array] | None
# Buffers that several caches share while each is alive, and the bytes that one cache saves by each.
SharedBuffers = list[tuple["weakref.ref[Buffer]", int]]


def row_capacity(rows: int) -> int:
    """Return the rows that a buffer for `rows` rows has room for."""
    step = STEP if rows > STEP else BLOCK
    return -(-rows // step) * step


def whole_steps(rows: int) -> int:
    """Round down to whole steps: the rest of a buffer has room for rows that the cache needs anyway."""
    return rows // STEP * STEP


def join_tokens(parts: list[mx.array], capacity: int) -> mx.array:
    """Concatenate parts [B, H, n, D] in a buffer of at least `capacity` tokens, padded with zeros."""
    shape = parts[0].shape
    rest = max(0, capacity - sum(part.shape[2] for part in parts))
    return mx.concatenate([*parts, mx.zeros((*shape[:2], rest, shape[3]), parts[0].dtype)], axis=2)


def write_tokens(full: Pair, tokens: Pair, start: int) -> Pair:
    """Write keys and values from index `start` on: in place, or into longer arrays if there is no room."""
    count = tokens[0].shape[2]
    if start + count > full[0].shape[2]:
        keys, values = (mx.concatenate([x[:, :, :start], new], axis=2) for x, new in zip(full, tokens, strict=True))
        return keys, values
    for x, new in zip(full, tokens, strict=True):
        x[:, :, start : start + count] = new
    return full


class Buffer:
    """Rows uint32 [B, H, capacity, W], and the owners that have some of them."""

    def __init__(self, rows: mx.array | None) -> None:
        self.rows = rows
        self.owners: WeakSet[PackedRows] = WeakSet()

    @property
    def nbytes(self) -> int:
        return 0 if self.rows is None else self.rows.nbytes


class PackedRows:
    """The rows of some shared buffers, then those of a buffer of its own. The owner knows how many rows are in use."""

    def __init__(self, rows: StoredRows = None) -> None:
        self._shared: list[tuple[Buffer, int]] = []
        self._unshared = self._claim(Buffer(mx.concatenate(rows, axis=2) if isinstance(rows, list) else rows))

    def __bool__(self) -> bool:
        return bool(self.arrays)

    @property
    def arrays(self) -> list[mx.array]:
        """All buffers; a shared one is the same array in each owner."""
        buffers = [*(buffer for buffer, _ in self._shared), self._unshared]
        return [buffer.rows for buffer in buffers if buffer.rows is not None]

    def shared(self, stop: int) -> tuple[SharedRows, ...]:
        """Return the shared rows among the first `stop` rows."""
        return tuple(
            SharedRows(buffer.rows, count) for buffer, count in self._shared_before(stop) if buffer.rows is not None
        )

    @property
    def unshared(self) -> mx.array | None:
        """The rows behind the shared ones, as they are now: the same array in each owner, which no write changes."""
        return self._unshared.rows

    def between(self, start: int, stop: int) -> mx.array | None:
        """Return rows [start, stop) in one array, or None if there are no buffers."""
        total = sum(count for _, count in self._shared)
        return rows_between(self.shared(total), self._unshared.rows, start, stop) if self else None

    def first(self, count: int) -> mx.array | None:
        """Return the first `count` rows in one array, with spare capacity if nothing is shared."""
        return self.between(0, count) if self._shared else self._unshared.rows

    def in_place(self, stop: int) -> StoredRows:
        """Return the first `stop` rows as they lie in buffers, so that nothing is copied."""
        edges = [*accumulate((count for _, count in self._shared), initial=0), stop]
        parts = [self.between(start, min(stop, end)) for start, end in pairwise(edges) if start < min(stop, end)]
        pieces = [rows for rows in parts if rows is not None]
        return pieces if len(pieces) > 1 else self.between(0, stop)

    def shareable(self, stop: int) -> SharedBuffers:
        """Return the buffers that copies go on sharing when they write behind the first `stop` rows."""
        buffers = self._shared_before(stop)
        rest = stop - sum(count for _, count in buffers)
        if rest >= MIN_SHARED:
            buffers.append((self._unshared, rest))
            if len(buffers) > MAX_SHARED_BUFFERS:  # two of them are then joined in each copy
                shortest = _shortest_neighbors(buffers)
                del buffers[shortest : shortest + 2]
        return [
            (weakref.ref(buffer), buffer.nbytes // buffer.rows.shape[2] * whole_steps(count))
            for buffer, count in buffers
            if buffer.rows is not None
        ]

    def fork(self) -> "PackedRows":
        """Return another owner of the same rows."""
        twin = PackedRows()
        twin._shared = [(twin._claim(buffer), count) for buffer, count in self._shared]
        twin._unshared = twin._claim(self._unshared)
        return twin

    def write(self, rows: mx.array, start: int) -> None:
        """Put rows [B, H, n, W] behind the first `start` rows; earlier rows from there on are given up."""
        self._shared = self._shared_before(start)
        last, index = self._unshared, start - sum(count for _, count in self._shared)
        if len(last.owners) > 1:
            if index >= MIN_SHARED:
                self._share(last, index)
                index = 0
            self._unshared = self._claim(Buffer(None if last.rows is None or index == 0 else last.rows[:, :, :index]))
        buffer, stop = self._unshared.rows, index + rows.shape[2]
        if buffer is None or stop > buffer.shape[2]:
            buffer = join_tokens([rows[:, :, :0] if buffer is None else buffer], row_capacity(stop))
        self._unshared.rows = buffer[:]  # what others hold stays as it is
        self._unshared.rows[:, :, index:stop] = rows

    def release_capacity(self, stop: int) -> None:
        """Keep copies of the first `stop` rows where they are less than half of a buffer."""
        rest = stop - sum(count for _, count in self._shared_before(stop))
        self._shared = [(self._shortened(buffer, count), count) for buffer, count in self._shared_before(stop)]
        self._unshared = self._shortened(self._unshared, rest)

    def _shortened(self, buffer: Buffer, count: int) -> Buffer:
        if buffer.rows is None or 2 * row_capacity(count) >= buffer.rows.shape[2]:
            return buffer
        buffer.owners.discard(self)
        return self._claim(Buffer(mx.contiguous(buffer.rows[:, :, :count]) if count else None))

    def _shared_before(self, stop: int) -> list[tuple[Buffer, int]]:
        edges = accumulate((count for _, count in self._shared), initial=0)
        counts = [
            (buffer, min(count, stop - start)) for (buffer, count), start in zip(self._shared, edges, strict=False)
        ]
        return [(buffer, count) for buffer, count in counts if count > 0]

    def _share(self, buffer: Buffer, count: int) -> None:
        """Add the first `count` rows of a buffer to the shared ones, of which the two shortest neighbors may merge."""
        shared = [*self._shared, (buffer, count)]
        if len(shared) > MAX_SHARED_BUFFERS:
            i = _shortest_neighbors(shared)
            joined = mx.concatenate([b.rows[:, :, :n] for b, n in shared[i : i + 2] if b.rows is not None], axis=2)
            shared[i : i + 2] = [(self._claim(Buffer(joined)), joined.shape[2])]
        self._shared = shared

    def _claim(self, buffer: Buffer) -> Buffer:
        buffer.owners.add(self)
        return buffer


def _shortest_neighbors(shared: list[tuple[Buffer, int]]) -> int:
    return min(range(len(shared) - 1), key=lambda i: shared[i][1] + shared[i + 1][1])
