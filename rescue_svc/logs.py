"""Logs as JSON lines on stderr, with the id of the request and never with text of a span or a query."""

import json
import logging
import sys
import traceback
from contextvars import ContextVar
from typing import Any

from http_limits.log_limit import LogLimit

request_id: ContextVar[str | None] = ContextVar("request_id", default=None)

_STANDARD = set(vars(logging.makeLogRecord({}))) | {"message", "asctime", "color_message", "taskName"}


class JsonFormatter(logging.Formatter):
    """Formats an exception as its type and file:line places only, because its message may quote a request."""

    def format(self, record: logging.LogRecord) -> str:
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
            trace = traceback.extract_tb(record.exc_info[2])
            line["error"] = record.exc_info[0].__name__
            line["at"] = [f"{frame.filename}:{frame.lineno}" for frame in trace]
        return json.dumps(line, default=str)


def configure(level: str) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    handler.addFilter(LogLimit())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
