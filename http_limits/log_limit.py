"""A rate limit for log lines, so that a client that provokes errors cannot fill the disk."""

import logging
import time
from collections.abc import Callable

MAX_LINES = 300
WINDOW_S = 60.0


class LogLimit(logging.Filter):
    """Pass at most `MAX_LINES` records a minute from each line of code, and report how many were dropped."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._windows: dict[tuple[str, int], tuple[float, int]] = {}  # by file and line: start, records since then

    def filter(self, record: logging.LogRecord) -> bool:
        source = (record.pathname, record.lineno)
        now = self._clock()
        start, count = self._windows.get(source, (now, 0))
        if now - start >= WINDOW_S:
            if count > MAX_LINES:
                _append(record, f"{count - MAX_LINES} similar lines were dropped before this one")
            start, count = now, 0
        count += 1
        self._windows[source] = (start, count)
        if count == MAX_LINES:
            _append(record, "similar lines are dropped until the minute is over")
        return count <= MAX_LINES


def _append(record: logging.LogRecord, note: str) -> None:
    record.msg, record.args = f"{record.getMessage()} ({note})", ()
