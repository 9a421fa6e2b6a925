"""Forged requests, each with one hostile part: the service refuses or answers them, and neither fails nor hangs."""

import json
import random
import re
import socket
from urllib.parse import quote

from rescue_svc.schemas import Chunk, EmbedRequest, RetrieveRequest, WriteRequest

from .harness import IN_FULL_EACH_STORE, TOKEN

ANSWER_S = 20
NUMBERS = [0, -1, 1.5, 1e308, -1e308, 2**31, 2**40 + 1, 2**63, -(2**64), 10**30]
TEXTS = [
    "",
    "\0",
    "\ud800",
    "ok",
    "../..",
    "a" * 65,
    "x" * 9000,
    "é\u0301\u202e",
    "' OR 1=1 --",
    '"* NEAR(',
    "%00",
    "\r\n",
]
HOSTILE = [*NUMBERS, *TEXTS, None, True, [], {}, [[]], [None], [0, 1], [1, 0], ["a"] * 300, {"a": {"b": []}}]
HOSTILE += [float("nan"), float("inf"), [float("-inf"), 2], [[0, 1]] * 5000, [0] * 70_000]
CHUNK = {"text": "a text", "token_range": [0, 5]}
BODIES = {
    "/evict/write": {"session_id": "s", "chunks": [CHUNK]},
    "/evict/retrieve": {"session_id": "s", "query": "a text"},
    "/embed": {"texts": ["a text"]},
}
FIELDS = {"/evict/write": WriteRequest, "/evict/retrieve": RetrieveRequest, "/embed": EmbedRequest}
RAW_BODIES = [
    b"",
    b"{",
    b"null",
    b"[" * 100_000,
    b"\xff\xfe",
    b'{"session_id"',
    b"9" * 9000,
    b'{"a":1}' * 2,
    b"\0" * 50,
]
RAW_BODIES += [b'{"session_id": "s", "session_id": "t", "chunks": []}', b'"' + b"\\u0000" * 999 + b'"', b"-", b"1e999"]
CALLS = [
    ("GET", "/sessions"),
    ("GET", "/evict/dump?session_id={}"),
    ("GET", "/sessions/{}/spans"),
    ("GET", "/sessions/s/spans?first={}"),
    ("GET", "/sessions/s/spans?count={}"),
    ("DELETE", "/sessions/{}"),
    ("POST", "/sessions/{}/renew"),
    ("POST", "/sessions/{}/hibernate"),
    ("POST", "/sessions/{}/resume"),
    ("POST", "/evict/write?session_id={}"),
    *(("GET", path) for path in ("/", "/healthz", "/livez", "/readyz", "/metrics", "/openapi.json")),
]
PATHS = ["//", "/..", "/%2e%2e/%2e%2e/etc/passwd", "/sessions/%ff", "/sessions/%00", "*", "http://evil.example/", "/é"]
PATHS += [
    "/" + "a" * 60_000,
    "/sessions/" + "/" * 999,
    "/sessions/s/spans?" + "&" * 9000,
    "/?" + "a=b&" * 5000,
    "/#",
    "/;",
]
METHODS = ["PUT", "PATCH", "OPTIONS", "HEAD", "TRACE", "CONNECT", "FOO", "get", "POST"]
HEADER_VALUES = [
    "",
    " ",
    "[",
    "http://[",
    "a]b[c",
    "a" * 9000,
    "\x7f",
    "\xff\xfe",
    "é",
    "0",
    "-1",
    "9" * 400,
    ",;=",
    '"',
    "1e9",
]
HEADERS = ["Host", "Origin", "Authorization", "Content-Type", "Content-Length", "Transfer-Encoding", "Content-Encoding"]
HEADERS += [
    "X-Request-ID",
    "Expect",
    "Connection",
    "Upgrade",
    "Range",
    "Cookie",
    "Accept",
    "Forwarded",
    "X-Forwarded-For",
]
KINDS = ["text/plain", "application/json; charset=utf-16", "multipart/form-data", "application/x-www-form-urlencoded"]
FRAMING = (b"\r\nContent-Length: ", b"\r\nTransfer-Encoding: ", b"\r\nExpect: ", b"\r\nUpgrade: ")


def request(method, path, body=b"", **headers):
    standard = {"Host": "localhost", "Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
    standard |= {"Content-Length": str(len(body)), "Connection": "close"}
    lines = "".join(f"{name}: {value}\r\n" for name, value in (standard | headers).items())
    return f"{method} {path} HTTP/1.1\r\n{lines}\r\n".encode("utf-8", "surrogatepass") + body


def with_hostile_fields():
    for path, model in FIELDS.items():
        for value in HOSTILE:
            for field in (*model.model_fields, "unknown"):
                yield request("POST", path, json.dumps(BODIES[path] | {field: value}).encode())
            for field in (*Chunk.model_fields, "unknown") if path == "/evict/write" else ():
                content = {"session_id": "s", "chunks": [CHUNK, CHUNK | {field: value}]}
                yield request("POST", path, json.dumps(content).encode())
        for content in (*RAW_BODIES, *(json.dumps(BODIES[path]).encode()[:length] for length in range(1, 40, 3))):
            yield request("POST", path, content)
        for kind in KINDS:
            yield request("POST", path, json.dumps(BODIES[path]).encode(), **{"Content-Type": kind})


def with_hostile_addresses():
    for method, path in CALLS:
        for value in map(str, [*NUMBERS, *TEXTS[:2], *TEXTS[3:]]):
            yield request(method, path.format(quote(value, safe="")))
    for path in (*PATHS, *BODIES, "/sessions/s"):
        for method in METHODS:
            yield request(method, path)


def with_hostile_headers():
    for path, body in BODIES.items():
        for name in HEADERS:
            for value in (*HEADER_VALUES, "chunked", "identity, chunked", "100-continue", "h2c", "bytes=0-", "Basic ="):
                yield request("POST", path, json.dumps(body).encode(), **{name: value})
        for version in (b"HTTP/1.0", b"HTTP/0.9", b"HTTP/2.0", b"HTTP/9.9", b"HTTX/1.1", b""):
            yield request("POST", path, json.dumps(body).encode()).replace(b"HTTP/1.1", version, 1)


SHAPES = [*with_hostile_fields(), *with_hostile_addresses(), *with_hostile_headers()]


def lies_about_its_body(sent):
    """Return whether the service may have to wait for more of a body, or cannot tell where it ends."""
    head, _, body = sent.partition(b"\r\n\r\n")
    usual = b"Content-Length: %d\r\n" % len(body)
    return (
        usual not in head or any(name in head.replace(usual, b"") for name in FRAMING) or b" HTTP/1.1\r\n" not in head
    )


def answer(server, sent):
    """Return the status; None if the service closes the connection without one."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=ANSWER_S) as connection:
        connection.sendall(sent)
        if lies_about_its_body(sent):
            connection.shutdown(socket.SHUT_WR)
        try:
            received = connection.recv(100)
        except ConnectionResetError:
            received = b""
    status = re.match(rb"HTTP/1\.1 (\d{3}) ", received)
    assert status or not received, received
    return int(status[1]) if status else None


@IN_FULL_EACH_STORE
def test_forged_requests_are_answered(start_server, times):
    server = start_server(token=TOKEN, embedder="none")
    server.write("s", ("a text", 0, 5))
    count = max(75, times(1500))  # fewer do not show every status
    statuses = {sent: answer(server, sent) for sent in random.Random(5).sample(SHAPES, count)}
    refused = {100, 400, 401, 403, 404, 405, 408, 413, 422, 424}  # 100: continue; 424: no embedder
    assert {200, 201, 403, 404, 405, 422} <= {*statuses.values()} <= {200, 201, None} | refused
    assert all(lies_about_its_body(sent) for sent, status in statuses.items() if status is None)
    server.write("after", ("still alive", 0, 5))
    assert server.search("after", "alive", hybrid_alpha=0) == ["still alive"]
    assert not [line for line in server.lines() if line["level"] == "error"]
