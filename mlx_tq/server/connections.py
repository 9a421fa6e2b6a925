"""Where connections come in, how many there may be, and how long one may take to say what it wants.

`mlx_tq/server` and `rescue_svc` share no code, and have this file alike.
"""

import asyncio
import resource
import socket
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

BACKLOG = 128  # connections that are taken from the system at a time
HEAD_S = 10.0
MAX_HEAD = 2**16  # bytes
_RESERVED = 5 * BACKLOG  # descriptors of files, and of connections that were just taken or are about to be closed


class Connection(HttpToolsProtocol):
    """A connection that is closed when the head of its request takes too long to arrive.

    Where there are too many, the one that has waited longest for its request makes room. So a client that sends its own
    at once is answered, whatever others leave half sent.

    Attributes:
        most: connections in all; of one address there may be half as many.
        head_s: seconds from the connection, or the answer before, to the end of the head.
    """

    most = 512
    head_s = HEAD_S
    _in_head = False
    _head_bytes = 0
    _deadline: asyncio.TimerHandle | None = None

    @property
    def _waits(self) -> bool:
        return self._deadline is not None and not self.transport.is_closing()

    def connection_made(self, transport: Any) -> None:
        """Take it, and let another go where there are too many."""
        super().connection_made(transport)
        self._wait()
        everyone = [other for other in self.connections if isinstance(other, Connection)]
        mine = [other for other in everyone if (other.client or "?")[0] == (self.client or "?")[0]]
        if len(mine) > self.most // 2:
            self._make_room(mine)
        elif len(everyone) > self.most:
            self._make_room(everyone)

    def _make_room(self, others: list["Connection"]) -> None:
        waiting = [other for other in others if other._waits and other is not self]
        min(waiting, key=lambda other: other._deadline.when() if other._deadline else 0, default=self)._drop()

    def _wait(self) -> None:
        self._deadline = self.loop.call_later(self.head_s, self._drop)

    def _wait_no_more(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _drop(self) -> None:
        if self.transport.get_write_buffer_size():
            self.transport.close()  # once its answer was read
        else:
            self.connections.discard(self)  # now, as it is counted before the loop comes to close it
            self.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Parse what arrived; a head that never ends is not kept."""
        began = self._in_head
        super().data_received(data)
        if began and self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD:
                self._drop()

    def on_message_begin(self) -> None:
        """Note that a head begins."""
        super().on_message_begin()
        self._in_head, self._head_bytes = True, 0

    def on_headers_complete(self) -> None:
        """Begin with the request."""
        self._in_head = False
        self._wait_no_more()
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        """Wait for the next request; what is left of a body that was refused has to arrive in the same time."""
        super().on_response_complete()
        if self.cycle.response_complete:
            self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget it."""
        self._wait_no_more()
        super().connection_lost(exc)


def connections(wanted: int) -> type[Connection]:
    """Return the protocol for so many connections, or fewer where the system's limit of open files cannot be raised."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + _RESERVED
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    room = wanted if soft == resource.RLIM_INFINITY else max(2, min(wanted, soft - _RESERVED))
    return type("Connection", (Connection,), {"most": room})


def listening_socket(host: str, port: int) -> socket.socket:
    """Return a socket on which clients are already waited for.

    Raises:
        OSError: the address is unknown or taken.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    # asyncio turns Nagle's algorithm off only where the protocol is named; with it each answer waits 40 ms.
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener
