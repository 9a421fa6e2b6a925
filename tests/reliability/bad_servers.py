"""Misbehaving servers on real sockets. Each is a function of one connection, run by `BadServer`."""

import json
import socket
import threading
from contextlib import suppress
from socketserver import ThreadingTCPServer

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


def ends_after(data):
    """Return a server that sends this and closes the connection."""

    def serve(connection, _):
        read_request(connection)
        connection.sendall(data)

    return serve


def never_ends(start, part, pause):
    """Return a server that sends `start` at once, and then `part` after every pause of so many seconds."""

    def serve(connection, closing):
        read_request(connection)
        connection.sendall(start)
        while not closing.wait(pause):
            connection.sendall(part)

    return serve


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
    "slow": never_ends(b"HTTP/1.1 200 OK\r\nX: ", b"x", 0.05),
    "slow body": never_ends(b"HTTP/1.1 200 OK\r\nContent-Length: 10000\r\n\r\n", b" ", 0.05),
    "500": always({"detail": "it broke"}, "500 Internal Server Error"),
    "503": always({"detail": "later"}, "503 Service Unavailable"),
    "401": always({"detail": "a token is needed"}, "401 Unauthorized"),
    "404": always({"detail": "Not Found"}, "404 Not Found"),
    "507": always({"detail": "the disk is full"}, "507 Insufficient Storage"),
    "redirect": always(b"", "302 Found", extra="Location: http://192.0.2.1/\r\n"),
    "wrong schema": always({"choices": []}),
    "killed in mid-answer": ends_after(b'HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{"chunks": [{"text": "half an'),
    "killed at once": ends_after(b""),
    "endless": never_ends(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n", b"x" * 65536, 0),
    "garbage": ends_after(b"SSH-2.0-OpenSSH_9.9\r\n"),
}


class BadServer(ThreadingTCPServer):
    """Runs `serve` for each connection, in its own thread."""

    daemon_threads, block_on_close = True, False

    def __init__(self, serve, address=("127.0.0.1", 0)):
        self.address_family = socket.AF_INET if isinstance(address, tuple) else socket.AF_UNIX
        super().__init__(address, None)
        self._serve, self._closing, self.connections = serve, threading.Event(), 0
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def finish_request(self, request, client_address):
        self.connections += 1
        with suppress(OSError):
            self._serve(request, self._closing)

    def __enter__(self):
        threading.Thread(target=self.serve_forever, args=[0.01], daemon=True).start()
        return self

    def __exit__(self, *_):
        self._closing.set()
        self.shutdown()
        self.server_close()


def closed_port():
    """Return a URL that refuses connections."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"http://127.0.0.1:{listener.getsockname()[1]}"
