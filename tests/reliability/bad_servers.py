"""Misbehaving servers on real sockets. Each is a function of one connection, run by `BadServer`."""

import json
import socket
import threading
from contextlib import suppress

CHUNK = {"text": "a span", "token_range": [0, 4], "layer": -1, "score": 0.0, "similarity": 0.5}


def read_request(connection):
    """Return head and body of a request, or b"" when the client has disconnected."""
    data = b""
    while b"\r\n\r\n" not in data:
        if not (received := connection.recv(65536)):
            return b""
        data += received
    head, _, body = data.partition(b"\r\n\r\n")
    length = next((int(x.split(b":")[1]) for x in head.lower().split(b"\r\n") if x.startswith(b"content-length")), 0)
    while len(body) < length:
        body += connection.recv(65536)
    return head + b"\r\n\r\n" + body


def reply(connection, body, status="200 OK", length=None, extra=""):
    length = len(body) if length is None else length
    connection.sendall(f"HTTP/1.1 {status}\r\nContent-Length: {length}\r\n{extra}\r\n".encode() + body)


def always(body, status="200 OK", seen=None, **more):
    """Return a server with one answer; `seen` collects the requests."""
    payload = body if isinstance(body, bytes) else json.dumps(body).encode()

    def serve(connection, _):
        while request := read_request(connection):
            if seen is not None:
                seen.append(request)
            reply(connection, payload, status, **more)

    return serve


def hung(connection, closing):
    closing.wait()


def slow(connection, closing):
    """Send a byte of the head every 50 ms."""
    read_request(connection)
    for byte in b"HTTP/1.1 200 OK\r\nX: " + b"x" * 10_000:
        connection.sendall(bytes([byte]))
        if closing.wait(0.05):
            return


def slow_body(connection, closing):
    """Send the head at once, then a byte every 50 ms."""
    read_request(connection)
    reply(connection, b"", length=10_000)
    while not closing.wait(0.05):
        connection.sendall(b" ")


def killed_in_mid_answer(connection, _):
    read_request(connection)
    reply(connection, b'{"chunks": [{"text": "half an', length=1000)


def killed_at_once(connection, _):
    read_request(connection)


def endless(connection, closing):
    read_request(connection)
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n")
    while not closing.is_set():
        connection.sendall(b"x" * 65536)


def garbage(connection, _):
    read_request(connection)
    connection.sendall(b"SSH-2.0-OpenSSH_9.9\r\n")


# Invalid answers to a query.
WRONG_SCHEMAS = {
    "not JSON": b"<html>hello</html>",
    "no object": [1, 2],
    "nothing": {},
    "chunks is text": {"chunks": "all of them"},
    "a chunk is text": {"chunks": ["one"]},
    "no text": {"chunks": [{**CHUNK, "text": None}]},
    "no range": {"chunks": [{**CHUNK, "token_range": [1]}]},
    "a range backwards": {"chunks": [{**CHUNK, "token_range": [4, 0]}]},
    "a negative range": {"chunks": [{**CHUNK, "token_range": [-4, 2]}]},
    "a range of words": {"chunks": [{**CHUNK, "token_range": ["0", "4"]}]},
    "a similarity of words": {"chunks": [{**CHUNK, "similarity": "much"}]},
    "not a number": b'{"chunks": [{"text": "a", "token_range": [0, 1], "similarity": NaN}]}',
    "deep": b'{"chunks": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "an error as success": {"detail": "no", "code": "internal_error"},
}

MISBEHAVIORS = {
    "hung": hung,
    "slow": slow,
    "slow body": slow_body,
    "500": always({"detail": "it broke"}, "500 Internal Server Error"),
    "503": always({"detail": "later"}, "503 Service Unavailable"),
    "401": always({"detail": "a token is needed"}, "401 Unauthorized"),
    "404": always({"detail": "Not Found"}, "404 Not Found"),
    "507": always({"detail": "the disk is full"}, "507 Insufficient Storage"),
    "redirect": always(b"", "302 Found", extra="Location: http://192.0.2.1/\r\n"),
    "wrong schema": always({"choices": []}),
    "killed in mid-answer": killed_in_mid_answer,
    "killed at once": killed_at_once,
    "endless": endless,
    "garbage": garbage,
}


class BadServer:
    """Runs `serve` for each connection, in its own thread."""

    def __init__(self, serve):
        self._serve = serve
        self._closing = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.connections = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while not self._closing.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            threading.Thread(target=self._handle, args=(connection,), daemon=True).start()

    def _handle(self, connection):
        with connection, suppress(OSError):
            self._serve(connection, self._closing)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._closing.set()
        with suppress(OSError):  # close() alone does not end accept()
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


def closed_port():
    """Return a URL that refuses connections."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"http://127.0.0.1:{listener.getsockname()[1]}"
