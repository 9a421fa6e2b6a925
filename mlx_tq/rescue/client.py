"""A client of the rescue service that never stops generation.

One thread talks to the service. `write` leaves spans in a queue of bounded size and returns; `retrieve` waits until
what was written before is acknowledged and the service has answered, but no longer than it is told. Whatever goes
wrong, the caller goes on without: it finds nothing, the counters say so, and there is one warning to show.
"""

import asyncio
import sys
import threading
from collections import deque
from collections.abc import Coroutine, Sequence
from concurrent.futures import CancelledError
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from mlx_tq.errors import RescueError
from mlx_tq.rescue.service import Service
from mlx_tq.rescue.transport import RefusedError, Transport
from mlx_tq.rescue.wire import (
    MAX_CHUNKS,
    Embedded,
    Found,
    Range,
    TextSpan,
    read_embedded,
    read_found,
    read_written,
    retrieve_body,
    write_body,
)

T = TypeVar("T")

MAX_QUEUED = 16_000_000  # bytes of text
MAX_CALL = 1_000_000  # bytes of text in one call
CLOSE_S = 1.0
EMBED_S = 60.0  # a model may have to be loaded for it
_OVERHEAD = 200  # bytes of a queued span beside its text
_NOT_FOUND = 404


@dataclass(frozen=True)
class RescueStats:
    """What became of spans and questions.

    Attributes:
        written: spans that the service acknowledged.
        dropped: spans that found the queue full.
        refused: spans that the service did not take, such as at its cap.
        queued: spans not yet acknowledged.
        failures: calls that did not go through.
        asked: questions.
        unanswered: questions that the service did not answer in time, or that nobody waited for.
        found: spans in the answers.
    """

    written: int = 0
    dropped: int = 0
    refused: int = 0
    queued: int = 0
    failures: int = 0
    asked: int = 0
    unanswered: int = 0
    found: int = 0


class RescueClient:
    """Sends spans of any number of sessions to one service, and asks it questions; any thread may call it.

    Args:
        service: where it is (see `open_service`). The client stops it at the end if it started it.
        max_queued: bytes of text that may wait to be written; spans beyond are dropped and counted.
    """

    def __init__(self, service: Service, *, max_queued: int = MAX_QUEUED) -> None:
        self._service = service
        self._max_queued = max_queued
        self._lock = threading.Lock()
        self._queue: deque[tuple[str, TextSpan]] = deque()
        self._queued_bytes = 0
        self._accepted = 0
        self._stats = RescueStats()
        self._warning: str | None = None
        self._warned = False
        self._closed = False
        # Used on the thread's loop only.
        self._transport = Transport(service, self._trouble)
        self._settled = 0  # spans acknowledged, refused or purged, of those accepted
        self._loop = asyncio.new_event_loop()
        self._wake = asyncio.Event()
        self._stop = asyncio.Event()
        self._writing = asyncio.Lock()
        self._progress = asyncio.Condition()
        self._thread = threading.Thread(target=self._run, name="mlx_tq rescue", daemon=True)
        self._thread.start()

    # What callers use.

    def write(self, session_id: str, spans: Sequence[TextSpan]) -> None:
        """Queue spans for the service. Returns at once."""
        dropped = 0
        with self._lock:
            if self._closed:
                return
            for span in spans:
                size = _size(span)
                if self._queued_bytes + size > self._max_queued:
                    dropped += 1
                else:
                    self._queue.append((session_id, span))
                    self._queued_bytes += size
                    self._accepted += 1
        if dropped:
            self._count(dropped=dropped)
            self._complain(f"the queue of spans for the rescue service is full; {dropped} were dropped")
        with suppress(RuntimeError):  # closed meanwhile
            self._loop.call_soon_threadsafe(self._wake.set)

    def retrieve(
        self,
        session_id: str,
        query: str,
        *,
        top_k: int = 8,
        score_floor: float | None = None,
        exclude: Sequence[Range] = (),
        timeout: float = 1.0,
    ) -> list[Found]:
        """Spans of a session that a question needs, best first; nothing where the service does not answer in time.

        Args:
            session_id: whose spans.
            query: the question.
            top_k: how many at most.
            score_floor: least similarity, or None for what the embedder is known to need.
            exclude: ranges of positions; spans that lie wholly in one of them are left out.
            timeout: seconds that the caller waits at most, for earlier writes to arrive too.
        """
        body = retrieve_body(session_id, query, top_k=top_k, score_floor=score_floor, exclude=exclude)
        self._count(asked=1)
        found = self._wait(self._ask(body, timeout), timeout)
        if found is None:
            self._count(unanswered=1)
            return []
        self._count(found=len(found))
        return found[:top_k]

    async def embed(self, texts: Sequence[str]) -> Embedded:
        """Vectors of texts, `MAX_CHUNKS` at most, of which the service keeps nothing. For callers with a loop.

        Raises:
            RescueError: it cannot be reached, has no embedder, or did not answer in time.
        """
        call = self._transport.call("POST", "/embed", read_embedded, {"texts": list(texts)}, EMBED_S)
        try:
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call, self._loop))
        except RuntimeError as error:
            call.close()
            raise RescueError("the client of the rescue service is closed") from error

    def ready(self, timeout: float) -> bool:
        """Wait until the service is there; False if it is not by then.

        Raises:
            RescueError: it was to be started for us, and cannot be.
        """
        return self._wait(self._start(), timeout, raises=True) is not None

    def flush(self, timeout: float = CLOSE_S) -> bool:
        """Wait until all that was written is acknowledged; False if it is not by then."""
        return self._wait(self._written(), timeout) is not None

    def forget(self, session_id: str, timeout: float = CLOSE_S) -> bool:
        """Have the service delete all of a session; False if it did not say that it has."""
        return self._wait(self._forget(session_id), timeout) is not None

    @property
    def stats(self) -> RescueStats:
        """Counters so far."""
        with self._lock:
            return replace(self._stats, queued=len(self._queue))

    def take_warning(self) -> str | None:
        """What went wrong first, once: for the caller to show where it suits."""
        with self._lock:
            warning, self._warning = self._warning, None
            return warning

    def close(self, timeout: float = CLOSE_S) -> None:
        """Give what is queued a last chance, then end the thread, and the service if it was started for us."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self.flush(timeout)
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        self._service.stop()

    def __enter__(self) -> "RescueClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Between the threads.

    def _wait(self, call: Coroutine[Any, Any, T], timeout: float, *, raises: bool = False) -> T | None:
        """What a coroutine of the loop returns within the time, else None."""
        try:
            waiting = asyncio.run_coroutine_threadsafe(call, self._loop)
        except RuntimeError:  # closed
            call.close()
            return None
        try:
            return waiting.result(timeout)
        except RefusedError as error:
            self._trouble(str(error))
        except RescueError:
            if raises:
                raise
        except CancelledError:
            pass  # the client is being closed
        except TimeoutError:
            waiting.cancel()
            with suppress(RuntimeError):
                late = f"the rescue service did not answer within {timeout:g} s"
                self._loop.call_soon_threadsafe(self._transport.failed, late)
        return None

    def _count(self, **more: int) -> None:
        with self._lock:
            sums = {name: getattr(self._stats, name) + count for name, count in more.items()}
            self._stats = replace(self._stats, **sums)

    def _complain(self, message: str) -> None:
        with self._lock:
            if not self._warned:
                self._warned = True
                self._warning = f"{message.rstrip('.')}. Generation goes on without; rescue is tried again later."

    # On the thread's loop.

    def _run(self) -> None:
        with suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._main())
        self._loop.close()

    async def _main(self) -> None:
        async with self._transport.open():
            tasks = {asyncio.create_task(self._send()), asyncio.create_task(self._start())}
            await self._stop.wait()
            tasks |= asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _start(self) -> bool:
        """A service that is ours to start is started before it is needed."""
        try:
            await self._transport.locate()
        except RescueError as error:
            self._trouble(str(error))
            raise
        return True

    async def _send(self) -> None:
        """Write what is queued, the oldest first; what does not go through stays."""
        while True:
            await self._wake.wait()
            async with self._writing:
                session_id, batch = self._batch()
                if not batch:
                    self._wake.clear()
                    continue
                settled = await self._write(session_id, batch)
                with self._lock:
                    for _ in range(settled):
                        self._queued_bytes -= _size(self._queue.popleft()[1])
                await self._settle(settled)
            await asyncio.sleep(self._transport.breaker.pause)

    async def _write(self, session_id: str, batch: list[TextSpan]) -> int:
        """Write spans; returns how many need not be written again."""
        try:
            await self._transport.call("POST", "/evict/write", read_written, write_body(session_id, batch))
        except RefusedError as error:
            self._count(refused=len(batch))
            self._trouble(str(error))
        except RescueError:
            return 0
        else:
            self._count(written=len(batch))
        return len(batch)

    def _batch(self) -> tuple[str, list[TextSpan]]:
        """The oldest spans of the oldest session, as many as one call takes."""
        batch: list[TextSpan] = []
        with self._lock:
            session_id = self._queue[0][0] if self._queue else ""
            size = 0
            for owner, span in self._queue:
                size += _size(span)
                if owner != session_id or len(batch) == MAX_CHUNKS or (batch and size > MAX_CALL):
                    break
                batch.append(span)
        return session_id, batch

    async def _settle(self, count: int) -> None:
        async with self._progress:
            self._settled += count
            self._progress.notify_all()

    async def _written(self) -> bool:
        """Wait until all spans that are queued now are settled."""
        goal = self._accepted
        async with self._progress:
            await self._progress.wait_for(lambda: self._settled >= goal)
        return True

    async def _ask(self, body: dict[str, Any], timeout: float) -> list[Found]:
        if not self._transport.breaker.allows:
            raise RescueError("the rescue service failed several times; it is tried again later.")
        with suppress(TimeoutError):  # what is there already may be what is needed
            async with asyncio.timeout(timeout / 2):
                await self._written()
        return await self._transport.call("POST", "/evict/retrieve", read_found, body)

    async def _forget(self, session_id: str) -> bool:
        async with self._writing:
            with self._lock:
                kept = [entry for entry in self._queue if entry[0] != session_id]
                purged = len(self._queue) - len(kept)
                self._queue = deque(kept)
                self._queued_bytes = sum(_size(span) for _, span in kept)
            await self._settle(purged)
            try:
                return await self._transport.call("DELETE", f"/sessions/{session_id}", lambda _: True)
            except RefusedError as error:
                if error.status != _NOT_FOUND:
                    raise
                return True

    def _trouble(self, message: str) -> None:
        self._count(failures=1)
        self._complain(message)


def _size(span: TextSpan) -> int:
    return sys.getsizeof(span.text) + _OVERHEAD
