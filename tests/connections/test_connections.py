"""The limits of connections, by themselves: a server of a few lines, asked through real sockets."""

import logging
import socket
import threading
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import uvicorn
from http_harness import wait_for

import rescue_svc
from mlx_tq import server
from rescue_svc import connections, log_limit

HALF = b"GET / HTTP/1.1\r\nHost: x\r\n"
MOST = 8


async def answer(scope, receive, send):
    """Answers at once, whether or not the body has arrived; /slow waits for the client to leave."""
    while scope["path"] == "/slow" and (await receive())["type"] != "http.disconnect":
        pass
    headers = [(b"content-length", b"2")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"ok"})


@contextmanager
def serving(head_s=60.0):
    protocol = type("Small", (connections.connections(MOST),), {"head_s": head_s})
    config = uvicorn.Config(answer, http=protocol, log_config=None, lifespan="off", timeout_keep_alive=60)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        running = uvicorn.Server(config)
        thread = threading.Thread(target=running.run, kwargs={"sockets": [listener]})
        thread.start()
        wait_for(lambda: running.started)
        try:
            with ExitStack() as stack:
                yield lambda sent: stack.enter_context(connected(address, sent)), running.server_state.connections
        finally:
            running.should_exit = True
            thread.join()


@contextmanager
def connected(address, sent):
    with socket.create_connection(address, timeout=60) as client:
        client.sendall(sent)
        yield client


def closed(client):
    """Wait until the server closes the connection, which it may have answered before."""
    try:
        while client.recv(1000):
            pass
    except ConnectionResetError:
        pass
    return True


def test_who_waited_longest_makes_room_for_a_request():
    with serving() as (connect, everyone):
        half = []
        for count in range(1, 10 * MOST):
            half.append(connect(HALF))
            wait_for(lambda count=count: len(everyone) == min(count, MOST // 2))
        assert all(closed(client) for client in half[: -MOST // 2])
        assert connect(HALF + b"\r\n").recv(1000).startswith(b"HTTP/1.1 200")
        half[-1].sendall(b"\r\n")
        assert half[-1].recv(1000).startswith(b"HTTP/1.1 200"), "the last ones are still waited for"


def test_a_request_that_runs_is_not_closed_for_another():
    with serving() as (connect, everyone):
        running = [connect(HALF.replace(b"/ ", b"/slow ", 1) + b"\r\n") for _ in range(MOST // 2)]
        wait_for(lambda: len([each for each in everyone if each.cycle]) == MOST // 2)
        assert closed(connect(HALF))
        assert len(everyone) == MOST // 2
        running[0].close()
        wait_for(lambda: len(everyone) < MOST // 2)
        assert connect(HALF + b"\r\n").recv(1000).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    "sent", [b"", HALF, HALF + b"\r\n" + HALF, HALF.replace(b"GET", b"POST") + b"Content-Length: 9\r\n\r\n1"]
)
def test_a_head_or_the_rest_of_a_body_that_does_not_arrive(sent):
    with serving(head_s=0.2) as (connect, everyone):
        client = connect(sent)
        assert closed(client)
        wait_for(lambda: not everyone)


def test_a_head_that_does_not_end():
    with serving() as (connect, _):
        client = connect(HALF + b"X: ")
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            client.sendall(b"x" * 10**8)


def test_lines_of_one_place_are_limited_and_counted():
    now, said = [0.0], []
    limit = log_limit.LogLimit(lambda: now[0])

    def log(line):
        record = logging.LogRecord("x", logging.INFO, "file.py", line, "a %s", ("line",), None)
        if limit.filter(record):
            said.append(record.getMessage())

    for _ in range(1000):
        log(1)
    log(2)
    now[0] = 60.0
    log(1)
    assert len(said) == log_limit.LINES + 2
    assert said[0] == said[-2] == "a line"
    assert said[log_limit.LINES - 1] == "a line (more lines like this are left out until a minute is over)"
    assert said[-1] == "a line (700 lines like this were left out before it)"


@pytest.mark.parametrize("name", ["connections.py", "log_limit.py"])
def test_both_packages_have_them_alike(name):
    mine, other = (Path(package.__file__).with_name(name).read_bytes() for package in (rescue_svc, server))
    assert mine == other
