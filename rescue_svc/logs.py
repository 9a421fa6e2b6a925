"""One JSON object a line on stderr, with the id of the request. No line ever holds text of a span or a question."""

import json
import logging
import sys
import traceback
from contextvars import ContextVar
from types import TracebackType
from typing import Any

from rescue_svc.log_limit import LogLimit

request_id: ContextVar[str | None] = ContextVar("request_id", default=None)

_STANDARD = set(vars(logging.makeLogRecord({}))) | {"message", "asctime", "color_message", "taskName"}


class JsonFormatter(logging.Formatter):
    """Formats a record; of an exception only its type and its places, as its message may quote a request."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one line of JSON."""
        line: dict[str, Any] = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
        }
        if rid := request_id.get():
            line["request_id"] = rid
        line |= {key: value for key, value in vars(record).items() if key not in _STANDARD}
        if record.exc_info and record.exc_info[0]:
            line |= {"error": record.exc_info[0].__name__, "at": places(record.exc_info[2])}
        return json.dumps(line, default=str)


def places(trace: TracebackType | None) -> list[str]:
    """Return where an exception passed, innermost last, as file:line."""
    return [f"{frame.filename}:{frame.lineno}" for frame in traceback.extract_tb(trace)]


def configure(level: str) -> None:
    """Send all logs to stderr as JSON, so many lines a minute."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    handler.addFilter(LogLimit())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.getLogger("faiss").setLevel(logging.WARNING)  # it lists the CPU features that it tries
