"""Checks of requests: whether a host is this machine, and how large and slow a body may be."""

import asyncio
import ipaddress
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from starlette.requests import Request

BODY_TIMEOUT_S = 30.0  # a client that sends slowly must not block others
_HEAD_START = 2**16  # bytes by which the speed of a new upload is taken to be higher


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def host_name(header: str) -> str:
    """Return the name in a Host header, in lower case and without the port; "" if the header is not valid."""
    try:
        parts = urlsplit(f"//{header}")
    except ValueError:
        return ""
    return (parts.hostname or "") if parts.netloc == header else ""


@dataclass(eq=False)
class _Upload:
    body: bytearray
    deadline: asyncio.Timeout
    start: float = field(default_factory=lambda: asyncio.get_running_loop().time())

    def speed(self) -> float:
        elapsed = asyncio.get_running_loop().time() - self.start
        return (len(self.body) + _HEAD_START) / max(elapsed, 1e-6)


class Uploads:
    """Bodies that arrive, at most `limit` at a time: the slowest is dropped for a further one. On one event loop."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._arriving: set[_Upload] = set()

    @contextmanager
    def track(self, body: bytearray, deadline: asyncio.Timeout) -> Iterator[None]:
        """Count the body as arriving in the block; its deadline passes immediately if it has to make room."""
        upload = _Upload(body, deadline)
        self._arriving.add(upload)
        # Later, because a body that is here already is read before that, and needs no room.
        asyncio.get_running_loop().call_soon(self._make_room)
        try:
            yield
        finally:
            self._arriving.discard(upload)

    def _make_room(self) -> None:
        while len(self._arriving) > self._limit:
            slowest = min(self._arriving, key=_Upload.speed)
            self._arriving.discard(slowest)
            if not slowest.deadline.expired():
                slowest.deadline.reschedule(0)


async def read_body(
    request: "Request", max_bytes: int, *, too_large: Exception, too_slow: Exception, uploads: Uploads
) -> bytes:
    """Read a body; raise `too_large` beyond `max_bytes`, and `too_slow` after BODY_TIMEOUT_S or if it is dropped."""
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > max_bytes:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S) as deadline:
            with uploads.track(body, deadline):
                async for part in request.stream():
                    body += part
                    if len(body) > max_bytes:
                        raise too_large
    except TimeoutError:
        raise too_slow from None
    return bytes(body)
