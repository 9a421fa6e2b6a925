"""Limits of connections and of log lines, with a minimal server and real sockets."""

import logging
import socket
import threading
import time
from contextlib import ExitStack, contextmanager

import pytest
import uvicorn
from http_harness import connections, wait_for
from starlette.requests import Request

from http_limits.connections import limited_connection
from http_limits.log_limit import MAX_LINES, LogLimit
from http_limits.request_checks import Uploads, read_body

HALF = b"GET / HTTP/1.1\r\nHost: x\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"
MAX_CONNECTIONS = 8
LARGE = 2**23


def get(path, *headers):
    return b"\r\n".join([b"GET %s HTTP/1.1" % path, b"Host: x", *headers, b"", b""])


class TooSlowError(Exception):
    pass


async def read_upload(scope, receive, uploads=Uploads(2)):  # noqa: B008  one for all requests
    try:
        body = await read_body(
            Request(scope, receive), LARGE, too_large=ValueError(), too_slow=TooSlowError(), uploads=uploads
        )
    except TooSlowError:
        return b"too slow"
    return b"%d" % len(body)


async def answer(scope, receive, send):
    """Respond at once, before the body has arrived, except for some paths."""
    path, body = scope["path"], b"ok"
    if path == "/slow":
        while (await receive())["type"] != "http.disconnect":
            pass
    if path == "/length":
        message, length = await receive(), 0
        while message["type"] == "http.request":
            length += len(message["body"])
            if not message["more_body"]:
                break
            message = await receive()
        body = b"%d" % length
    if path == "/upload":
        body = await read_upload(scope, receive)
    if path in ("/large", "/broken"):
        body = bytes(LARGE)
    headers = [] if path in ("/stream", "/broken") else [(b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    if path == "/stream":
        for _ in range(LARGE // 2**16):
            await send({"type": "http.response.body", "body": bytes(2**16), "more_body": True})
    await send({"type": "http.response.body", "body": body, "more_body": path == "/broken"})


@contextmanager
def serving(head_s=60.0, write_s=60.0):
    protocol = type("Small", (limited_connection(MAX_CONNECTIONS),), {"head_s": head_s, "write_s": write_s})
    config = uvicorn.Config(
        answer, http=protocol, log_config=None, lifespan="off", timeout_keep_alive=60, timeout_graceful_shutdown=1
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        running = uvicorn.Server(config)
        thread = threading.Thread(target=running.run, kwargs={"sockets": [listener]})
        thread.start()
        wait_for(lambda: running.started)
        try:
            with ExitStack() as stack:
                state = running.server_state

                def connect(sent, receive_buffer=None):
                    return stack.enter_context(connections(url, 1, sent, receive_buffer))[0]

                connect.tasks = state.tasks
                yield connect, state.connections
        finally:
            running.should_exit = True
            thread.join()


def read_to_end(client):
    """Return what the server sends until it closes the connection."""
    received = bytearray()
    try:
        while data := client.recv(2**16):
            received += data
    except ConnectionResetError:
        pass
    return bytes(received)


@pytest.mark.full
@pytest.mark.parametrize(
    "offer", [b"Upgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings", b"Connection: upgrade\r\nUPGRADE: websocket"]
)
@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("framing", ["length", "chunked"])
def test_an_offer_to_change_the_protocol_is_ignored(offer, together, framing):
    """Java's HTTP client offers HTTP/2 with every request."""
    body = b"x" * 100_000
    head = b"POST /length?q HTTP/1.1\r\nHost: x\r\n" + offer + b"\r\n"
    if framing == "length":
        parts = [head + b"Content-Length: %d\r\n\r\n" % len(body), body]
    else:
        parts = [head + CHUNKED, b"%x\r\n%s\r\n" % (len(body), body), b"0\r\n\r\n"]
    plain = b"POST /length HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc"
    with serving() as (connect, _):
        client = connect(b"")
        for part in [b"".join([*parts, plain])] if together else [*parts, plain]:
            client.sendall(part)
            time.sleep(0 if together else 0.05)
        client.sendall(get(b"/", b"Connection: close"))
        answers = read_to_end(client).split(b"HTTP/1.1 ")[1:]
    assert [answer.partition(b"\r\n\r\n")[2] for answer in answers] == [b"100000", b"3", b"ok"]


def test_the_longest_idle_connection_is_closed_for_a_request():
    with serving() as (connect, all_connections):
        half = []
        for count in range(1, 10 * MAX_CONNECTIONS):
            half.append(connect(HALF))
            wait_for(lambda count=count: len(all_connections) == min(count, MAX_CONNECTIONS // 2))
        for client in half[: -MAX_CONNECTIONS // 2]:
            read_to_end(client)
        assert connect(HALF + b"\r\n").recv(1000).startswith(b"HTTP/1.1 200")
        half[-1].sendall(b"\r\n")
        assert half[-1].recv(1000).startswith(b"HTTP/1.1 200"), "the newest connections stay open"


def test_a_request_that_runs_is_not_closed_for_another():
    with serving() as (connect, all_connections):
        running = [connect(HALF.replace(b"/ ", b"/slow ", 1) + b"\r\n") for _ in range(MAX_CONNECTIONS // 2)]
        wait_for(lambda: sum(bool(other.cycle) for other in all_connections) == MAX_CONNECTIONS // 2)
        read_to_end(connect(HALF))
        assert len(all_connections) == MAX_CONNECTIONS // 2
        running[0].close()
        wait_for(lambda: len(all_connections) < MAX_CONNECTIONS // 2)
        assert connect(HALF + b"\r\n").recv(1000).startswith(b"HTTP/1.1 200")


@pytest.mark.full
@pytest.mark.parametrize(
    "sent", [b"", HALF, HALF + b"\r\n" + HALF, HALF.replace(b"GET", b"POST") + b"Content-Length: 9\r\n\r\n1"]
)
def test_a_head_or_body_that_does_not_arrive_is_closed(sent):
    with serving(head_s=0.2) as (connect, all_connections):
        read_to_end(connect(sent))
        wait_for(lambda: not all_connections)


POST_UNREAD_BODY = HALF.replace(b"GET", b"POST") + CHUNKED  # answered before the body arrives
POST_READ_BODY = POST_UNREAD_BODY.replace(b"/", b"/length", 1)


ENDLESS = {  # name: (sent once, sent repeatedly)
    "header": (HALF + b"X: ", b"x"),
    "headers": (HALF, b"X:\r\n"),
    "URL": (b"GET /", b"x"),
    "empty lines": (b"", b"\r\n"),
    "chunk size": (POST_READ_BODY, b"0"),
    "chunk extension": (POST_READ_BODY + b"1;x=", b"x"),
    "trailer": (POST_READ_BODY + b"0\r\nX: ", b"x"),
    "trailers": (POST_READ_BODY + b"0\r\n", b"X: x\r\n"),
    "trailer of a refused body": (POST_UNREAD_BODY + b"0\r\nX: ", b"x"),
    "trailers of a refused body": (POST_UNREAD_BODY + b"0\r\n", b"X: x\r\n"),
    "trailer of a queued request": (get(b"/slow") + POST_READ_BODY + b"0\r\nX: ", b"x"),
    "pipelined requests": (get(b"/slow"), get(b"/")),
}


@pytest.mark.full
@pytest.mark.parametrize(("sent", "repeated"), ENDLESS.values(), ids=ENDLESS)
def test_endless_requests_are_closed(sent, repeated):
    with serving() as (connect, all_connections):
        client = connect(sent)
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            client.sendall(repeated * (2 * 10**7 // len(repeated)))
        wait_for(lambda: not all_connections)


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (HALF + b"X:\r\n" * 100 + b"\r\n", b"The request has more than 100 headers."),
        (POST_READ_BODY + b"0\r\nX: x\r\n\r\n", b"Trailers are not supported."),
        (HALF + b"X: " + b"x" * 2**16, b"The request head or chunk framing exceeds 65536 bytes."),
    ],
)
def test_a_refusal_gives_its_reason(sent, reason):
    with serving() as (connect, _):
        received = read_to_end(connect(sent))
        assert received.startswith(b"HTTP/1.1 400")
        assert received.endswith(b"\r\n\r\n" + reason)


@pytest.mark.parametrize("sent", [HALF + b"X:\r\n" * 99 + b"\r\n", HALF + b"X: " + b"x" * 64000 + b"\r\n\r\n"])
def test_a_large_head_is_accepted(sent):
    with serving() as (connect, _):
        assert connect(sent).recv(1000).startswith(b"HTTP/1.1 200")


def test_a_body_in_chunks_of_one_byte_arrives():
    chunks = 200_000
    with serving() as (connect, _):
        client = connect(POST_READ_BODY + b"1\r\nx\r\n" * chunks + b"0\r\n\r\n" + get(b"/", b"Connection: close"))
        received = read_to_end(client)
        assert received.count(b"HTTP/1.1 200") == 2
        assert b"\r\n\r\n%d" % chunks in received


def test_a_few_pipelined_requests_are_answered():
    with serving() as (connect, _):
        client = connect(get(b"/stream") + get(b"/") * 7 + get(b"/", b"Connection: close"))
        received = read_to_end(client)
        assert received.count(b"HTTP/1.1 200") == 9
        assert len(received) > LARGE


@pytest.mark.parametrize("pipelined", [b"no HTTP\r\n\r\n", get(b"/") * 9])
def test_an_error_is_not_written_into_another_response(pipelined):
    with serving() as (connect, _):
        client = connect(get(b"/stream"), receive_buffer=4096)
        wait_for(lambda: client.recv(1, socket.MSG_PEEK))
        client.sendall(pipelined)
        assert b"HTTP/1.1 400" not in read_to_end(client)


def test_disconnect_reaches_the_running_request_when_others_are_pipelined():
    with serving() as (connect, all_connections):
        client = connect(get(b"/slow") + get(b"/"))
        wait_for(lambda: connect.tasks)
        client.close()
        wait_for(lambda: not all_connections)
        wait_for(lambda: not connect.tasks, timeout=5)


@pytest.mark.full
@pytest.mark.parametrize(
    "sent",
    [
        get(b"/stream"),
        get(b"/large"),
        get(b"/large", b"Connection: close"),
        get(b"/large") + get(b"/") * 8,
        get(b"/broken"),
    ],
)
def test_a_client_that_does_not_read_its_response_is_closed(sent):
    with serving(head_s=0.1, write_s=0.1) as (connect, all_connections):
        assert connect(sent, receive_buffer=4096).recv(1)
        wait_for(lambda: not all_connections, timeout=5)
        wait_for(lambda: not connect.tasks, timeout=5)


@pytest.mark.full
@pytest.mark.parametrize("path", [b"/stream", b"/large"])
def test_a_slow_client_gets_its_whole_response(path):
    with serving(head_s=0.1, write_s=1.0) as (connect, _):
        client, received, began = connect(get(path), receive_buffer=2**16), 0, time.monotonic()
        while received < LARGE:
            data = client.recv(2**18)
            assert data, f"closed after {received} bytes"
            received += len(data)
            time.sleep(0.025)
        assert time.monotonic() - began > 2, "longer than both deadlines"


def is_blocked(connection):
    return connection.flow.write_paused or connection.transport.is_closing()


@pytest.mark.parametrize(
    "blocking", [get(b"/stream"), get(b"/large"), get(b"/large", b"Connection: close"), get(b"/broken")]
)
def test_longest_blocked_connection_is_closed_first(blocking):
    with serving() as (connect, all_connections):
        waiting, blocked = connect(HALF), []
        for count in range(1, MAX_CONNECTIONS // 2):
            blocked.append(connect(blocking, receive_buffer=4096))
            wait_for(lambda count=count: sum(map(is_blocked, list(all_connections))) == count)
        for client in blocked:
            name, newcomer = client.getsockname(), connect(get(b"/length"))
            assert newcomer.recv(1000).startswith(b"HTTP/1.1 200")
            assert name not in {other.client for other in list(all_connections)}
        waiting.sendall(b"\r\n")
        assert waiting.recv(1000).startswith(b"HTTP/1.1 200")


def upload(length):
    return HALF.replace(b"GET /", b"POST /upload") + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % length


def test_the_slowest_of_too_many_uploads_is_dropped():
    with serving() as (connect, _):
        large, slow = connect(upload(10**6) + b"x" * (10**6 - 1)), connect(upload(2) + b"x")
        wait_for(lambda: len(connect.tasks) == 2)
        time.sleep(0.2)
        for _ in range(3):  # what has arrived does not wait, and drops nothing
            assert read_to_end(connect(upload(2) + b"xx")).endswith(b"\r\n\r\n2")
        wait_for(lambda: len(connect.tasks) == 2)
        newest = connect(upload(2) + b"x")
        assert read_to_end(slow).endswith(b"\r\n\r\ntoo slow")
        for client, length in ((large, b"1000000"), (newest, b"2")):
            client.sendall(b"x")
            assert read_to_end(client).endswith(b"\r\n\r\n" + length)


def test_log_lines_of_one_place_are_limited_and_counted():
    now, messages = [0.0], []
    limit = LogLimit(lambda: now[0])

    def log(line):
        record = logging.LogRecord("x", logging.INFO, "file.py", line, "a %s", ("line",), None)
        if limit.filter(record):
            messages.append(record.getMessage())

    for _ in range(1000):
        log(1)
    log(2)
    now[0] = 60.0
    log(1)
    assert len(messages) == MAX_LINES + 2
    assert messages[0] == messages[-2] == "a line"
    assert messages[MAX_LINES - 1] == "a line (similar lines are dropped until the minute is over)"
    assert messages[-1] == "a line (700 similar lines were dropped before this one)"
