"""Large requests are prepared one at a time, so that small ones next to them need not wait."""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from starlette.concurrency import run_in_threadpool

from mlx_tq.server.errors import QueueFullError

Result = TypeVar("Result")

LARGE = 2**16  # bytes of a request; these take about a tenth of a second to tokenize
_MAX_BYTES = 2**23  # of all requests that are being prepared or wait for it


class LargeRequests:
    """The queue of large requests, on one event loop."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._nbytes = 0

    async def run(self, nbytes: int, prepare: Callable[..., Result], *args: Any) -> Result:
        """Call `prepare` with `args` in a thread when it is the turn of a request of `nbytes` bytes.

        Raises:
            QueueFullError: too many bytes wait.
        """
        if self._nbytes and self._nbytes + nbytes > _MAX_BYTES:
            raise QueueFullError(
                f"requests of {self._nbytes:,} bytes are being prepared and this one has {nbytes:,}; "
                f"the limit is {_MAX_BYTES:,}. Try again later"
            )
        self._nbytes += nbytes
        try:
            async with self._turn:
                return await run_in_threadpool(prepare, *args)
        finally:
            self._nbytes -= nbytes
