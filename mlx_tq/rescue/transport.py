"""One call to the rescue service: bounded in time and size, and counted by the circuit breaker."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from mlx_tq.errors import RescueError
from mlx_tq.rescue.breaker import Breaker
from mlx_tq.rescue.service import TOKEN_VARIABLE, Address, Service
from mlx_tq.rescue.wire import MAX_ANSWER, http_errors

T = TypeVar("T")

CALL_S = 5.0  # the longest that one call may take, a slow answer included
_LATER = {408, 425, 429}  # besides 5xx: the same call may go through later
_FULL = 507  # it will not
_UNAUTHORIZED = 401


class RefusedError(RescueError):
    """The service answered, and will not do what was asked however often it is asked."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Transport:
    """Calls of one client; used on one event loop.

    Args:
        service: where it is.
        failed: told what went wrong, each time.
    """

    def __init__(self, service: Service, failed: Callable[[str], None]) -> None:
        self.breaker = Breaker()
        self._service = service
        self._told = failed
        self._http: Any = None
        self._locating: asyncio.Task[Address] | None = None

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Connections live until this ends."""
        import httpx2  # a quarter of a second, which no caller waits for

        # No proxies and passwords from the environment: the text is for this service alone.
        async with httpx2.AsyncClient(trust_env=False, timeout=None) as self._http:
            yield

    async def call(
        self,
        method: str,
        path: str,
        read: Callable[[bytes], T],
        body: dict[str, Any] | None = None,
        seconds: float = CALL_S,
    ) -> T:
        """What `read` makes of the answer, which may take so many seconds.

        Raises:
            RefusedError: the service will not.
            RescueError: it did not, or not in time, or not in words that `read` knows.
        """
        try:
            address = await self.locate()
            async with asyncio.timeout(seconds):
                found = read(await self._exchange(method, address, path, body))
        except RefusedError:
            self.breaker.worked()
            raise
        except RescueError as error:
            self.failed(str(error))
            raise
        except TimeoutError:
            raise self.failed(f"the rescue service did not answer within {seconds:g} s") from None
        except http_errors() as error:
            raise self.failed(f"the rescue service cannot be reached ({_short(error)})") from error
        self.breaker.worked()
        return found

    async def locate(self) -> Address:
        """Where the service is; one start at a time, which outlives whoever waits for it.

        Raises:
            RescueError: it was to be started, and cannot be.
        """
        if self._locating is None or self._locating.done():
            self._locating = asyncio.create_task(self._service.address(self._http))
            self._locating.add_done_callback(lambda task: task.cancelled() or task.exception())
        return await asyncio.shield(self._locating)

    def failed(self, message: str) -> RescueError:
        """Count a failure; returns the error to raise."""
        self.breaker.failed()
        self._told(message)
        return RescueError(message)

    async def _exchange(self, method: str, address: Address, path: str, body: dict[str, Any] | None) -> bytes:
        headers = {**address.headers, "Content-Type": "application/json", "Accept-Encoding": "identity"}
        content = None if body is None else json.dumps(body).encode()
        async with self._http.stream(method, address.url + path, content=content, headers=headers) as response:
            answer = bytearray()
            async for part in response.aiter_raw():
                answer += part
                if len(answer) > MAX_ANSWER:
                    raise RescueError(f"the rescue service answered more than {MAX_ANSWER:,} bytes")
        status = response.status_code
        if 200 <= status < 300:
            return bytes(answer)
        said = f"the rescue service answered {status} ({_detail(answer)})"
        if status == _UNAUTHORIZED:
            said = f"the rescue service at {address.url} does not take the token; set {TOKEN_VARIABLE} to its own"
        if status in _LATER or (status >= 500 and status != _FULL):
            raise RescueError(said)
        raise RefusedError(said, status)


def _detail(answer: bytearray) -> str:
    """What the service says is wrong, cut to a line."""
    try:
        detail = json.loads(answer)["detail"]
    except (ValueError, KeyError, TypeError, RecursionError):
        detail = "it does not say why"
    return " ".join(str(detail).split())[:240]


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:240] or type(error).__name__
