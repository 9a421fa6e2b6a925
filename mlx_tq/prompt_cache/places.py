"""Where blocks of different sizes lie in a file that never grows beyond a limit."""

from bisect import bisect
from collections import deque


class Places:
    """Free stretches of a file, of which the first that is long enough is taken; neighbors that are free are one."""

    def __init__(self, limit: int) -> None:
        """All of `limit` bytes are free."""
        self._limit = limit
        self._free = [(0, limit)] if limit else []  # begin and end, ascending
        self._back: deque[tuple[int, int]] = deque()

    @property
    def used(self) -> int:
        """Bytes that are taken."""
        self._merge()
        return self._limit - sum(stop - start for start, stop in self._free)

    def take(self, size: int) -> int | None:
        """Begin of a place of so many bytes, or None where no stretch is long enough."""
        self._merge()
        for i, (start, stop) in enumerate(self._free):
            if stop - start >= size:
                self._free[i : i + 1] = [(start + size, stop)] if stop - start > size else []
                return start
        return None

    def give_back(self, start: int, size: int) -> None:
        """A place is free again; at any moment and in any thread, as whoever held it may be collected."""
        self._back.append((start, start + size))

    def _merge(self) -> None:
        while self._back:
            start, stop = self._back.popleft()
            i = bisect(self._free, (start, stop))
            if i < len(self._free) and self._free[i][0] == stop:
                stop = self._free.pop(i)[1]
            if i and self._free[i - 1][1] == start:
                i -= 1
                start = self._free.pop(i)[0]
            self._free.insert(i, (start, stop))
