"""Checks before a request is parsed: who may call and how much they may send. Large requests queue up."""

import asyncio
import secrets
from collections.abc import Callable
from typing import Any, TypeVar

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request

from http_limits.request_checks import BODY_TIMEOUT_S, Uploads, host_name, is_loopback, read_body
from mlx_tq.server.api_errors import InvalidRequestError, QueueFullError

LARGE_REQUEST_BYTES = 2**16  # tokenizing takes about 0.1 s
_MAX_QUEUED_BYTES = 2**23  # of all requests in preparation or waiting for it

Result = TypeVar("Result")


def default_max_body(positions: int | None) -> int:
    """Return the default `--max-body` for a context length (None: unknown)."""
    if positions is None:
        return 10**7
    # A token is about four bytes, and JSON escapes take up to six per byte. Tools and schemas need room, too.
    return max(2 * 10**6, 32 * positions)


class Guard:
    """Checks callers and reads bodies. Without `api_key`, only localhost may call."""

    def __init__(self, api_key: str | None, origins: list[str], max_body: int, max_bodies: int) -> None:
        self._api_key = api_key.encode() if api_key else None
        self._origins = set(origins)
        self.max_body, self._max_bodies = max_body, max_bodies
        self._uploads = Uploads(max_bodies)

    def check_caller(self, request: Request) -> None:
        """Refuse foreign web pages, wrong keys and, without a key, foreign names of this machine.

        Pages reach localhost through the user's browser (CSRF, DNS rebinding).
        """
        origin, host = request.headers.get("origin"), request.headers.get("host", "")
        if origin is not None and origin not in self._origins and not (host and origin.partition("://")[2] == host):
            message = "web pages may not call this server; allow one with --allowed-origins"
            raise InvalidRequestError(message, status=403)
        if self._api_key is None:
            if not is_loopback(host_name(host)):
                message = "without an API key, only requests to localhost are accepted; use that host name"
                raise InvalidRequestError(message, status=403)
            return
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        keys = [request.headers.get("x-api-key", ""), token if scheme.lower() == "bearer" else ""]
        if not any(secrets.compare_digest(key.strip().encode(), self._api_key) for key in keys):
            message = "the API key is missing or wrong; send `Authorization: Bearer KEY` or `x-api-key: KEY`"
            raise InvalidRequestError(message, status=401)

    async def read_body(self, request: Request) -> bytes:
        """Read a body. Only requests whose body has arrived count in the queue: slow clients block no one."""
        message = f"the body is over {self.max_body} bytes; shorten it, or raise --max-body"
        too_large = InvalidRequestError(message, status=413)
        slow = f"took longer than {BODY_TIMEOUT_S:.0f} s to arrive, or was the slowest of {self._max_bodies}"
        too_slow = InvalidRequestError(f"the body {slow}; send it without pauses", status=408)
        return await read_body(request, self.max_body, too_large=too_large, too_slow=too_slow, uploads=self._uploads)


class LargeRequests:
    """Prepares large requests one at a time, so that small ones do not wait; on one event loop."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._nbytes = 0

    async def run(self, nbytes: int, prepare: Callable[..., Result], *args: Any) -> Result:
        """Run `prepare(*args)` in a thread: immediately for a small request, else when it is this request's turn."""
        if nbytes <= LARGE_REQUEST_BYTES:
            return await _run_to_end(prepare, *args)
        if self._nbytes and self._nbytes + nbytes > _MAX_QUEUED_BYTES:
            raise QueueFullError(
                f"too many large requests: {self._nbytes:,} bytes are queued and this one has {nbytes:,}; "
                f"the limit is {_MAX_QUEUED_BYTES:,}. Try again later"
            )
        self._nbytes += nbytes
        try:
            async with self._turn:
                return await _run_to_end(prepare, *args)
        finally:
            self._nbytes -= nbytes


async def _run_to_end(prepare: Callable[..., Result], *args: Any) -> Result:
    """Run `prepare(*args)` in a thread. No thread can be stopped, so a cancellation takes effect when it has ended."""
    work = asyncio.ensure_future(run_in_threadpool(prepare, *args))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait({work})
        work.exception()  # marks it as seen: the client disconnected
        raise
