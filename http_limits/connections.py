"""Limits of client connections: how many, how long a client may take, and how much of a request is buffered."""

import asyncio
import math
import resource
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

from httptools import HttpParserError
from uvicorn import Config, Server
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from http_limits.request_parser import RequestParser

CONNECTIONS = 512  # or four for each request that may be in progress, if that is more
BACKLOG = 128  # connections accepted in one iteration of the event loop
MIN_WRITE_BYTES = 2**14
MAX_HEAD = 2**16  # bytes
MAX_HEADERS = 100
MAX_PIPELINED = 8
# Otherwise the kernel buffers megabytes for a client that does not read. Linux reports the socket writable again at
# half this value, so we see progress in steps of MIN_WRITE_BYTES.
_MAX_UNSENT_IN_KERNEL = 2 * MIN_WRITE_BYTES
_PARSE_CHUNK_BYTES = 2**14  # one read may be 16 times as large and is checked in between
_RESERVED = 5 * BACKLOG  # file descriptors for files, and for connections that were just accepted or are closing


class Connection(HttpToolsProtocol):
    """An HTTP connection with deadlines for reading and writing and a bound on what is buffered."""

    parser: RequestParser  # type: ignore[assignment]  # uvicorn's, which ours has the methods of
    max_connections: int  # in all; one address may have half as many
    head_s = 10.0  # from the connection, or from the previous response, to the end of the request head
    write_s = 30.0  # in which a client has to accept `MIN_WRITE_BYTES` bytes, or the rest
    _in_head = False
    _pending_bytes = 0  # received since the parser last completed a part of a request
    _head_timer: asyncio.TimerHandle  # cancelled while no request is awaited
    _write_timer: asyncio.TimerHandle
    _unsent_bytes: float = math.inf  # at the last write check, if the connection was blocked
    _blocked_since = 0.0
    _running_cycle: RequestResponseCycle | None = None
    _error_message = ""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.parser = RequestParser(self)
        self._set_option(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _MAX_UNSENT_IN_KERNEL)
        self._head_timer = self.loop.call_later(self.head_s, self._close)
        self._write_timer = self.loop.call_later(self.write_s, self._check_write_progress)
        all_connections = [other for other in self.connections if isinstance(other, Connection)]
        same_address = [other for other in all_connections if (other.client or "?")[0] == (self.client or "?")[0]]
        if len(same_address) > self.max_connections // 2:
            self._choose_victim(same_address)._abort()
        elif len(all_connections) > self.max_connections:
            self._choose_victim(all_connections)._abort()

    def _set_option(self, level: int, name: int, value: int | bytes) -> None:
        with suppress(OSError):  # on macOS, if the client has closed the connection
            self.transport.get_extra_info("socket").setsockopt(level, name, value)

    def _choose_victim(self, connections: list["Connection"]) -> "Connection":
        """Return the connection to close for this one.

        It is the one that is blocked on writing the longest, else the one whose request has the nearest deadline, else
        the one with the most pipelined requests, else this one.
        """
        others = [other for other in connections if other is not self]
        blocked = [other for other in others if other._is_blocked_or_closing]
        if blocked:
            return min(blocked, key=lambda other: other._blocked_since)
        waiting = [other for other in others if not other._head_timer.cancelled()]
        if waiting:
            return min(waiting, key=lambda other: other._head_timer.when())
        pipelining = [other for other in others if other.pipeline]
        return max(pipelining, key=lambda other: len(other.pipeline), default=self)

    @property
    def _is_blocked_or_closing(self) -> bool:
        return self.flow.write_paused or self.transport.is_closing()

    def _check_write_progress(self) -> None:
        """Abort a blocked connection whose client accepted too little since the last check."""
        unsent = self.transport.get_write_buffer_size() if self._is_blocked_or_closing else 0
        if unsent and unsent > self._unsent_bytes - MIN_WRITE_BYTES:
            self._abort()
        else:
            self._unsent_bytes = unsent or math.inf
            self._write_timer = self.loop.call_later(self.write_s, self._check_write_progress)

    def _close(self) -> None:
        if self.transport.get_write_buffer_size():
            self.transport.close()  # after the client has read the rest, which has a deadline, too
        else:
            self._abort()

    def _abort(self) -> None:
        # `connection_lost` runs later; a connection accepted until then would still count this one.
        self.connections.discard(self)
        if self.transport.get_write_buffer_size():
            # Send RST; otherwise the kernel keeps offering its unsent bytes to the client.
            self._set_option(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        # In pieces, so that little is buffered before a limit is checked.
        for start in range(0, len(data), _PARSE_CHUNK_BYTES):
            piece = data[start : start + _PARSE_CHUNK_BYTES]
            self._pending_bytes += len(piece)
            super().data_received(piece)
            if self._pending_bytes > MAX_HEAD and not self.transport.is_closing():
                self.send_400_response(f"The request head or chunk framing exceeds {MAX_HEAD} bytes.")
            if self.transport.is_closing():
                return

    def _refuse(self, reason: str) -> NoReturn:
        """Stop the parser from one of its callbacks; uvicorn then calls `send_400_response`."""
        self._error_message = reason
        raise HttpParserError(reason)

    def send_400_response(self, msg: str) -> None:
        """Send a 400 and close. During another response, only abort: the client would read the 400 as part of it."""
        running = self._running_cycle
        if running is None or running.response_complete or (running.more_body and not running.response_started):
            super().send_400_response(self._error_message or msg)
        else:
            self._abort()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_head:
            self._refuse("Trailers are not supported.")  # nothing reads them
        if len(self.headers) >= MAX_HEADERS:
            self._refuse(f"The request has more than {MAX_HEADERS} headers.")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.parser.offers_upgrade:
            return
        if len(self.pipeline) >= MAX_PIPELINED:
            self._refuse(f"More than {MAX_PIPELINED} requests are pipelined.")
        self._in_head = False
        self._pending_bytes = 0
        self._head_timer.cancel()
        super().on_headers_complete()
        if not self.pipeline:
            self._running_cycle = self.cycle

    def on_body(self, body: bytes) -> None:
        self._pending_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.offers_upgrade:
            return
        self._pending_bytes = 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        if self.pipeline:
            self._running_cycle = self.pipeline[-1][0]  # uvicorn starts the next pipelined request below
        super().on_response_complete()
        self._blocked_since = self.loop.time()
        if self.cycle.response_complete:
            # The rest of a refused body has to arrive in the same time as the next head.
            self._head_timer.cancel()
            self._head_timer = self.loop.call_later(self.head_s, self._close)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._blocked_since = self.loop.time()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._unsent_bytes = math.inf

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_timer.cancel()
        self._write_timer.cancel()
        # uvicorn marks only the last pipelined request as disconnected.
        if self._running_cycle is not None and not self._running_cycle.response_complete:
            self._running_cycle.disconnected = True
            self._running_cycle.message_event.set()
        super().connection_lost(exc)


def limited_connection(max_connections: int) -> type[Connection]:
    """Return the protocol class for `max_connections`, or fewer if the limit of open files cannot be raised."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = max_connections + _RESERVED
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft != resource.RLIM_INFINITY:
        max_connections = max(2, min(max_connections, soft - _RESERVED))
    return type("Connection", (Connection,), {"max_connections": max_connections})


def open_listener(host: str, port: int) -> socket.socket:
    """Return a listening socket; raises OSError if the address is unknown or taken."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    # asyncio turns Nagle's algorithm off only if the protocol is given; with it each response is delayed by 40 ms.
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def server_config(app: Any, max_requests: int, **options: Any) -> Config:
    """Return uvicorn's configuration for an app with up to `max_requests` requests in progress."""
    protocol = limited_connection(max(CONNECTIONS, 4 * max_requests))
    logs: dict[str, Any] = {"log_config": None, "access_log": False, "server_header": False}
    return Config(app, http=protocol, ws="none", backlog=BACKLOG, **logs, **options)


class ListeningServer(Server):
    """A server that calls `on_listening` when it accepts connections."""

    def __init__(self, config: Config, on_listening: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_listening = on_listening

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_listening()


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
