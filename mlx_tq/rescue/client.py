"""A client of the rescue service that never stops generation.

`write` queues spans, which a worker thread sends. `retrieve` waits for earlier writes and for the response, at most for
its timeout. On any fault the caller continues without rescue; the client counts it and warns once.
"""

import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from mlx_tq.errors import RescueError, one_line
from mlx_tq.rescue import wire
from mlx_tq.rescue.locator import OFF, TOKEN_VARIABLE, Address, ServiceLocator, open_service, run_in_thread
from mlx_tq.rescue.wire import Embeddings, Range, RetrievedSpan, TextSpan

T = TypeVar("T")

MAX_QUEUED, MAX_BATCH = 16_000_000, 1_000_000  # bytes of text; a batch is one write
MAX_RESPONSE = 8_000_000  # bytes; 64 spans of 8,192 escaped characters fit many times
CALL_S, PROBE_S, EMBED_S, CLOSE_S = 5.0, 1.0, 60.0, 1.0  # an embedder may have to load its model
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 30.0  # seconds
RENEW_S = 300.0  # a third of the shortest lifetime that the service accepts
MAX_FAILURES = 3  # in a row, before the breaker opens
_SPAN_OVERHEAD = 200  # bytes of a queued span besides its text
_UNAUTHORIZED, _NOT_FOUND, _INSUFFICIENT_STORAGE = 401, 404, 507
_RETRYABLE = {408, 425, 429}


@dataclass(frozen=True)
class RescueStats:
    """Counters of a client."""

    written: int = 0  # spans that the service acknowledged
    dropped: int = 0  # spans that did not fit into the queue
    refused: int = 0  # spans that the service rejected, such as at its limit
    queued: int = 0  # spans not yet acknowledged
    failures: int = 0  # calls that failed
    queries: int = 0
    unanswered: int = 0  # queries without a response in time
    retrieved: int = 0  # spans in the responses


class RefusedError(RescueError):
    """The service rejects a request, and would reject it again."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class CircuitBreaker:
    """Spaces retries after failures by 0.1 s, then twice as long each time, up to 30 s.

    After three failures in a row it is open until the pause is over: callers then do not wait for the service.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failures = 0
        self._next_try = 0.0

    @property
    def pause(self) -> float:
        """Seconds until the next try."""
        return max(0.0, self._next_try - self._clock())

    @property
    def is_open(self) -> bool:
        return self._failures >= MAX_FAILURES and self.pause > 0

    def record(self, *, success: bool) -> None:
        self._failures = 0 if success else self._failures + 1
        pause = 0.0 if success else FIRST_PAUSE * 2 ** min(self._failures - 1, 30)
        self._next_try = self._clock() + min(LONGEST_PAUSE, pause)


class RescueClient(AbstractContextManager["RescueClient"]):
    """Sends spans of any number of sessions to one service and queries it; safe to call from any thread.

    It stops a private service when it is closed. Spans beyond `max_queued` bytes of text are dropped.
    """

    def __init__(self, service: ServiceLocator, *, max_queued: int = MAX_QUEUED) -> None:
        self._service, self._max_queued = service, max_queued
        self._locating = threading.Lock()  # guards the service and the HTTP client
        self._http: Any = None
        self._connected: Address | None = None  # where `_http` leads
        self._embedder: str | None = None
        self._breaker = CircuitBreaker()
        self._changed = threading.Condition()  # its lock guards what follows
        self._queue: list[tuple[str, TextSpan]] = []
        self._temporary: dict[str, bool] = {}  # until they are forgotten: whether the service has spans of them
        self._next_renewal = time.monotonic() + RENEW_S
        self._sending: str | None = None  # session whose batch, the first of the queue, is on its way
        self._settled = 0  # spans acknowledged, refused or forgotten so far
        self._counts: Counter[str] = Counter()
        self._warning: str | None = None
        self._has_warned = self._is_closed = False
        threading.Thread(target=self._run, name="mlx_tq rescue", daemon=True).start()

    def write(self, session_id: str, spans: Sequence[TextSpan], *, temporary: bool = False) -> None:
        """Queue spans for the service and return immediately.

        The service deletes a temporary session some time after this process has ended without deleting it. A write
        that is not temporary makes the session permanent.
        """
        dropped = 0
        with self._changed:
            if temporary:
                self._temporary.setdefault(session_id, False)
            else:
                self._temporary.pop(session_id, None)
            room = self._max_queued - sum(_queued_size(span) for _, span in self._queue)
            for span in spans if not self._is_closed else ():
                size = _queued_size(span)
                if size > room:
                    dropped += 1
                else:
                    self._queue.append((session_id, span))
                    room -= size
            self._changed.notify_all()
        if dropped:
            self._count(dropped=dropped)
            self._warn(f"the queue of spans for the rescue service is full; {dropped} were dropped")

    def retrieve(
        self,
        session_id: str,
        query: str,
        *,
        top_k: int = 8,
        score_floor: float | None = None,
        exclude: Sequence[Range] = (),
        timeout: float = 1.0,
    ) -> list[RetrievedSpan]:
        """Return the spans of a session that match a query, best first; none if there is no answer in time.

        Spans inside the ranges of positions `exclude` are left out. None for `score_floor` is the embedder's own.
        """
        longest = sorted(exclude, key=lambda span: span[0] - span[1])[: wire.MAX_EXCLUDED]
        body = {
            "session_id": session_id,
            "query": wire.clean(query),
            "top_k": min(top_k, wire.MAX_TOP_K),
            "score_floor": score_floor,
            "exclude_ranges": [list(span) for span in longest],
            "join": False,  # the session joins spans itself, within its own limit
        }

        def query_service() -> list[RetrievedSpan]:
            self.flush(timeout / 2)  # the query may need earlier spans only
            return self._request("POST", "/evict/retrieve", wire.parse_retrieved, body)[:top_k]

        self._count(queries=1)
        with suppress(RescueError):  # is reported
            if not self._breaker.is_open:
                spans = self._attempt(query_service, timeout)
                self._count(retrieved=len(spans))
                return spans
        self._count(unanswered=1)
        return []

    def embed(self, texts: Sequence[str]) -> Embeddings:
        """Return vectors of up to `MAX_CHUNKS` texts, which the service does not store; raises RescueError."""
        body = {"texts": list(texts)}
        return self._attempt(lambda: self._request("POST", "/embed", wire.parse_embeddings, body, EMBED_S), EMBED_S)

    def embedder(self) -> str | None:
        """Return the name of the service's embedder; None while no embedder is known.

        The service is asked until it names one; a failure is not counted, so that it does not stop retrieval.
        """
        if self._embedder is None and not self._breaker.is_open:
            ask = partial(self._request, "GET", "/readyz", wire.parse_embedder, seconds=PROBE_S)
            with suppress(RescueError, TimeoutError):
                self._embedder = run_in_thread(ask).result(PROBE_S)
        return self._embedder

    def ready(self, timeout: float) -> bool:
        """Return whether the service runs in time; raises RescueError if a private one cannot be started."""
        try:
            run_in_thread(self._locate).result(timeout)
        except TimeoutError:
            self._report(_late(timeout))
            return False
        return True

    def flush(self, timeout: float = CLOSE_S) -> bool:
        """Wait until all spans queued so far are acknowledged; return False if they are not in time."""
        with self._changed:
            goal = self._settled + len(self._queue)
            self._changed.wait_for(lambda: self._settled >= goal or self._is_closed, timeout)
            return self._settled >= goal and not self._is_closed

    def forget(self, session_id: str, timeout: float = CLOSE_S) -> bool:
        """Delete a session from the service; return False if it did not confirm that in time.

        Spans that are not yet sent are not sent any more, unless the time is over before they could be taken back.
        """

        def delete() -> bool:
            with self._changed:
                # A batch on its way would arrive after the deletion. After the timeout, the caller may write again.
                if not self._changed.wait_for(lambda: self._sending != session_id or self._is_closed, timeout):
                    raise _late(timeout)
                remaining = [entry for entry in self._queue if entry[0] != session_id]
                self._settled += len(self._queue) - len(remaining)
                self._queue = remaining
                self._temporary.pop(session_id, None)
                self._changed.notify_all()
            self._call_session("DELETE", f"/sessions/{session_id}")
            return True

        with suppress(RescueError):  # is reported
            return self._attempt(delete, timeout)
        return False

    @property
    def stats(self) -> RescueStats:
        with self._changed:
            return RescueStats(**self._counts, queued=len(self._queue))

    def take_warning(self) -> str | None:
        """Return the first fault, once, for the caller to show."""
        with self._changed:
            warning, self._warning = self._warning, None
            return warning

    def close(self, timeout: float = CLOSE_S) -> None:
        """Try to write what is queued, then end the worker, and the service if it is private."""
        self.flush(timeout)
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._service.stop()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        self._can_locate()  # a private service starts before it is needed
        while not self._is_closed:
            if time.monotonic() >= self._next_renewal:
                self._renew_sessions()
            if (batch := self._take_batch()) is None:
                continue
            is_settled = self._can_locate() and self._send(*batch)
            with self._changed:
                self._sending = None
                if is_settled:
                    self._settled += len(batch[1])
                    del self._queue[: len(batch[1])]
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._is_closed, self._breaker.pause)
        if self._http is not None:
            self._http.close()

    def _take_batch(self) -> tuple[str, list[TextSpan]] | None:
        """Wait for spans, and return the oldest of one session, as many as one call takes.

        Return None if none have come until the next renewal or the end.
        """
        with self._changed:
            wait_s = max(0.0, self._next_renewal - time.monotonic())
            self._changed.wait_for(lambda: self._queue or self._is_closed, wait_s)
            if self._is_closed or not self._queue:
                return None
            self._sending, size, batch = self._queue[0][0], 0, list[TextSpan]()
            for session_id, span in self._queue:
                size += _queued_size(span)
                if session_id != self._sending or len(batch) == wire.MAX_CHUNKS or (batch and size > MAX_BATCH):
                    break
                batch.append(span)
            return self._sending, batch

    def _renew_sessions(self) -> None:
        """Tell the service that this process still uses its temporary sessions; warn of one that it has deleted."""
        self._next_renewal = time.monotonic() + RENEW_S
        with self._changed:
            session_ids = [session_id for session_id, is_stored in self._temporary.items() if is_stored]
        with suppress(RescueError):  # is reported
            for session_id in session_ids:
                renew = partial(self._call_session, "POST", f"/sessions/{session_id}/renew")
                is_stored = self._attempt(renew, CALL_S)
                with self._changed:
                    if not is_stored and session_id in self._temporary:
                        self._temporary[session_id] = False
                        self._warning = "the rescue service has deleted the text evicted so far; it keeps later text."

    def _send(self, session_id: str, batch: list[TextSpan]) -> bool:
        """Write spans; return whether they are settled, so that they leave the queue."""
        chunks = [
            {"text": wire.clean(span.text), "token_range": [span.start, span.stop], "layer": -1, "score": 0.0}
            for span in batch
        ]
        body = {"session_id": session_id, "chunks": chunks, "temporary": session_id in self._temporary}
        try:
            self._attempt(lambda: self._request("POST", "/evict/write", wire.parse_accepted, body), CALL_S)
        except RefusedError:
            self._count(refused=len(batch))
        except RescueError:
            return False
        else:
            with self._changed:
                if session_id in self._temporary:
                    self._temporary[session_id] = True
            self._count(written=len(batch))
        return True

    def _can_locate(self) -> bool:
        """Locate the service in this thread: unlike a call, its start may take a minute."""
        try:
            self._locate()
        except RescueError as error:
            self._report(error)
            return False
        return True

    def _locate(self) -> Address:
        """Return the address of the service, which is started if it is private; one thread at a time does that."""
        with self._locating:
            if self._is_closed:
                raise RescueError("the client of the rescue service is closed")
            address = self._service.address()
            if address != self._connected:
                if self._http is not None:
                    self._http.close()
                self._http, self._connected = address.connect(), address
            return address

    def _request(
        self,
        method: str,
        path: str,
        parse: Callable[[bytes], T],
        body: dict[str, Any] | None = None,
        seconds: float = CALL_S,
    ) -> T:
        """Return what `parse` makes of the response. `seconds` is the time for each read and the whole body."""
        import httpx2  # loaded by `_locate`

        address, deadline = self._locate(), time.monotonic() + seconds
        headers = {**address.headers, "Accept-Encoding": "identity"}
        received = bytearray()
        try:
            request = self._http.stream(method, address.url + path, json=body, headers=headers, timeout=seconds)
            with request as response:
                for part in response.iter_raw():
                    received += part
                    if len(received) > MAX_RESPONSE or time.monotonic() > deadline:
                        break
        except (httpx2.HTTPError, httpx2.InvalidURL, OSError, RuntimeError) as error:  # RuntimeError: client is closed
            raise RescueError(f"the rescue service cannot be reached ({one_line(error)})") from error
        if len(received) > MAX_RESPONSE:
            raise RescueError(f"the rescue service answered more than {MAX_RESPONSE:,} bytes")
        _check_status(response.status_code, received, address)
        return parse(bytes(received))

    def _call_session(self, method: str, path: str) -> bool:
        """Make a call about a session; return False if the service does not have it."""
        try:
            return self._request(method, path, lambda _: True)
        except RefusedError as error:
            if error.status != _NOT_FOUND:
                raise
            return False

    def _attempt(self, call: Callable[[], T], timeout: float) -> T:
        """Make a call in another thread, so that the wait for it is bounded; report a failure and raise RescueError."""
        try:
            result = run_in_thread(call).result(timeout)
        except TimeoutError:
            error = _late(timeout)
            self._report(error)
            raise error from None
        except RescueError as error:
            self._report(error)
            raise
        self._breaker.record(success=True)
        return result

    def _report(self, error: RescueError) -> None:
        """Count a failed call; a refusal shows that the service works."""
        with self._changed:
            self._breaker.record(success=isinstance(error, RefusedError))
        self._count(failures=1)
        self._warn(str(error))

    def _warn(self, message: str) -> None:
        with self._changed:
            if not self._has_warned:
                self._has_warned = True
                self._warning = f"{message.rstrip('.')}. Generation continues without rescue, which is retried later."

    def _count(self, **more: int) -> None:
        with self._changed:
            self._counts.update(more)


def open_client(location: str) -> RescueClient | None:
    """Return a client of the service at a location, as `open_service` finds it, or None for "off"."""
    return None if location == OFF else RescueClient(open_service(location))


def _late(seconds: float) -> RescueError:
    return RescueError(f"the rescue service did not answer within {seconds:g} s")


def _check_status(status: int, body: bytes | bytearray, address: Address) -> None:
    """Raise RefusedError for a rejected request, or RescueError if a retry may succeed."""
    if 200 <= status < 300:
        return
    try:
        detail = json.loads(body)["detail"]
    except (ValueError, KeyError, TypeError, RecursionError):
        detail = "it does not say why"
    message = f"the rescue service answered {status} ({one_line(detail)})"
    if status == _UNAUTHORIZED:
        message = f"the rescue service at {address.url} does not accept the token; set {TOKEN_VARIABLE} to its own"
    if status in _RETRYABLE or (status >= 500 and status != _INSUFFICIENT_STORAGE):
        raise RescueError(message)
    raise RefusedError(message, status)


def _queued_size(span: TextSpan) -> int:
    return sys.getsizeof(span.text) + _SPAN_OVERHEAD
