"""A limit of the log's rate, so that whoever makes the program complain cannot fill the disk.

`mlx_tq/server` and `rescue_svc` share no code, and have this file alike.
"""

import logging
import time
from collections.abc import Callable

LINES = 300
WINDOW_S = 60.0


class LogLimit(logging.Filter):
    """Lets each place of the program log `LINES` a minute.

    The last of them says that more is left out, the first of a later minute how many were.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._seen: dict[tuple[str, int], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Tell whether the record is to be logged."""
        place = (record.pathname, record.lineno)
        now = self._clock()
        began, lines = self._seen.get(place, (now, 0))
        if now - began >= WINDOW_S:
            if lines > LINES:
                _add(record, f"{lines - LINES} lines like this were left out before it")
            began, lines = now, 0
        lines += 1
        self._seen[place] = (began, lines)
        if lines == LINES:
            _add(record, "more lines like this are left out until a minute is over")
        return lines <= LINES


def _add(record: logging.LogRecord, words: str) -> None:
    record.msg, record.args = f"{record.getMessage()} ({words})", ()
