"""The packed rows of a layer. Copies of a cache share them: what several have, nobody writes any more.

Who writes first does not copy them: they stay as they are for all who have them, and the new rows go into a buffer
behind them. So what many sequences begin with is held once.
"""

from itertools import accumulate, pairwise
from weakref import WeakSet

import mlx.core as mx

from mlx_tq.cache.buffers import STEP, write_rows
from mlx_tq.kernels.regions import SharedRows, rows_between

# Rows of a buffer that is worth keeping apart; a shorter one is copied.
LEAST = STEP
# Buffers that a body has besides its own: each is read by itself.
MOST = 4


Stored = mx.array | list[mx.array] | None


class Buffer:
    """Rows uint32 [B, H, capacity, W], and the bodies that have some of them."""

    def __init__(self, rows: mx.array | None) -> None:
        self.rows = rows
        self.bodies: WeakSet[Body] = WeakSet()

    @property
    def nbytes(self) -> int:
        """Bytes of the rows."""
        return 0 if self.rows is None else self.rows.nbytes


class Body:
    """Rows side by side: those of shared buffers, then its own.

    Args:
        rows: uint32 [B, H, capacity, W], or several such side by side, or None while there are none. Whoever has the
            body knows how many count.
    """

    def __init__(self, rows: Stored = None) -> None:
        self._shared: list[tuple[Buffer, int]] = []
        self._own = self._held(Buffer(mx.concatenate(rows, axis=2) if isinstance(rows, list) else rows))

    def __bool__(self) -> bool:
        return bool(self.arrays)

    @property
    def arrays(self) -> list[mx.array]:
        """All of them, the same ones in each body that shares them."""
        buffers = [*(buffer for buffer, _ in self._shared), self._own]
        return [buffer.rows for buffer in buffers if buffer.rows is not None]

    def shared(self, stop: int) -> tuple[SharedRows, ...]:
        """Of the rows before `stop` those that come before the body's own."""
        found = self._before(stop)
        return tuple(SharedRows(buffer.rows, count) for buffer, count in found if buffer.rows is not None)

    @property
    def own(self) -> mx.array | None:
        """The rows behind these, as they are now: what is written later does not reach them."""
        return None if self._own.rows is None else self._own.rows[:]

    def between(self, start: int, stop: int) -> mx.array | None:
        """Rows [start, stop) in one array; None where there are none at all."""
        every = sum(count for _, count in self._shared)
        return rows_between(self.shared(every), self._own.rows, start, stop) if self else None

    def whole(self, count: int) -> mx.array | None:
        """The first `count` rows in one array, with spare capacity where the body shares none."""
        return self.between(0, count) if self._shared else self._own.rows

    def in_place(self, stop: int) -> Stored:
        """Rows before `stop` as they lie in buffers, so that nothing is copied."""
        edges = [*accumulate((count for _, count in self._shared), initial=0), stop]
        found = [self.between(start, min(stop, end)) for start, end in pairwise(edges) if start < min(stop, end)]
        pieces = [rows for rows in found if rows is not None]
        return pieces if len(pieces) > 1 else self.between(0, stop)

    def lasting(self, stop: int) -> list[tuple[Buffer, int]]:
        """Buffers that copies go on sharing when they write behind the first `stop` rows, and how many rows of each."""
        found = self._before(stop)
        rest = stop - sum(count for _, count in found)
        if rest >= LEAST:
            found.append((self._own, rest))
            if len(found) > MOST:
                least = _fewest(found)
                del found[least : least + 2]
        return found

    def fork(self) -> "Body":
        """Another body with the same rows."""
        twin = Body()
        twin._shared = [(twin._held(buffer), count) for buffer, count in self._shared]
        twin._own = twin._held(self._own)
        return twin

    def write(self, rows: mx.array, start: int) -> None:
        """Put rows [B, H, n, W] behind those before row `start`; what was there is not the body's any more."""
        self._shared = self._before(start)
        at = start - sum(count for _, count in self._shared)
        own = self._own
        if len(own.bodies) > 1:
            if at >= LEAST:
                self._share(own, at)
                at = 0
            self._own = self._held(Buffer(None if own.rows is None or at == 0 else own.rows[:, :, :at]))
        self._own.rows = write_rows(self._own.rows, rows, at)

    def _before(self, stop: int) -> list[tuple[Buffer, int]]:
        """Of the rows before `stop` those of shared buffers."""
        edges = accumulate((count for _, count in self._shared), initial=0)
        found = [(buffer, min(count, stop - at)) for (buffer, count), at in zip(self._shared, edges, strict=False)]
        return [(buffer, count) for buffer, count in found if count > 0]

    def _share(self, buffer: Buffer, count: int) -> None:
        """Go on behind `count` rows of a buffer. Of many buffers the neighbors with the fewest rows are joined."""
        shared = [*self._shared, (buffer, count)]
        if len(shared) > MOST:
            least = _fewest(shared)
            pair = shared[least : least + 2]
            joined = mx.concatenate([each.rows[:, :, :n] for each, n in pair if each.rows is not None], axis=2)
            shared[least : least + 2] = [(self._held(Buffer(joined)), joined.shape[2])]
        self._shared = shared

    def _held(self, buffer: Buffer) -> Buffer:
        buffer.bodies.add(self)
        return buffer


def _fewest(shared: list[tuple[Buffer, int]]) -> int:
    """Where the two neighbors begin that have the fewest rows."""
    return min(range(len(shared) - 1), key=lambda i: shared[i][1] + shared[i + 1][1])
