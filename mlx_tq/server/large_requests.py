"""Prepare large requests one at a time, so that small ones do not wait."""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from starlette.concurrency import run_in_threadpool

from mlx_tq.server.errors import QueueFullError

Result = TypeVar("Result")

LARGE_REQUEST_BYTES = 2**16  # tokenizing takes about 0.1 s
_MAX_QUEUED_BYTES = 2**23  # of all requests in preparation or waiting for it


class LargeRequests:
    """The queue of large requests, on one event loop."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._nbytes = 0

    async def run(self, nbytes: int, prepare: Callable[..., Result], *args: Any) -> Result:
        """Run `prepare(*args)` in a thread: at once for a small request, else when it is this request's turn.

        Raises:
            QueueFullError: too many bytes wait.
        """
        if nbytes <= LARGE_REQUEST_BYTES:
            return await run_in_threadpool(prepare, *args)
        if self._nbytes and self._nbytes + nbytes > _MAX_QUEUED_BYTES:
            raise QueueFullError(
                f"too many large requests: {self._nbytes:,} bytes are queued and this one has {nbytes:,}; "
                f"the limit is {_MAX_QUEUED_BYTES:,}. Try again later"
            )
        self._nbytes += nbytes
        try:
            async with self._turn:
                return await run_in_threadpool(prepare, *args)
        finally:
            self._nbytes -= nbytes
