"""Floods of connections and requests: both servers survive, answer health checks at once, and log little."""

import select
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import NamedTuple

import httpx
import postgres_server
import pytest
from cli.tools import EMBEDDED, FLOAT32, PACKED
from http_harness import ServerProcess, connections, open_files, wait_for
from rescue.harness import TOKEN
from rescue.harness import Server as RescueServer
from server.harness import Server as ModelServer

MEGABYTE = 10**6


class Target(NamedTuple):
    server: ServerProcess
    health: str
    path: str  # accepts POST
    work: Callable[[int], httpx.Response]  # an ordinary request, with a number


def write_and_retrieve(server, number):
    """Write a text and search for it; return the last response."""
    session = f"s{number}"
    written = server.write(session, ("text", number, number + 1))
    if not written.is_success:
        return written
    retrieved = server.http.post("/evict/retrieve", json={"session_id": session, "query": "text"})
    assert not retrieved.is_success or retrieved.json()["chunks"]
    return retrieved


@contextmanager
def running(kind, folder, key=None, capacity=None):
    """Run a server that accepts `capacity` requests at once."""
    with ExitStack() as stack:
        if kind == "model":
            limits = () if capacity is None else ("--decode-concurrency", 1, "--max-queue", capacity - 1)
            steps = ("--prefill-step-size", 512)  # measuring them takes seconds
            server = ModelServer(EMBEDDED, folder / "log", *PACKED, *FLOAT32, *steps, *limits, key=key)
            body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
            target = Target(server, "/health", "/v1/chat/completions", lambda n: server.post(**body, seed=n))
        else:
            settings = {"token": key} if key else {}
            settings |= {} if capacity is None else {"max_in_flight": capacity}
            if kind == "rescue on PostgreSQL":
                if missing := postgres_server.missing():
                    pytest.skip(missing)
                database = postgres_server.PostgresServer(fsync="off")
                stack.callback(database.stop)
                settings["store"] = database.database()
            server = RescueServer(folder / "data", **settings)
            target = Target(server, "/healthz", "/evict/write", partial(write_and_retrieve, server))
        stack.callback(server.stop)
        yield target


@pytest.fixture(scope="module", params=[TOKEN, pytest.param(None, marks=pytest.mark.full)], ids=["key", "no key"])
def key(request):
    return request.param


@pytest.fixture(scope="module", params=["model", pytest.param("rescue", marks=pytest.mark.full)])
def attacked(key, tmp_path_factory, request):
    with running(request.param, tmp_path_factory.mktemp("x"), key) as target:
        yield target


def check_memory_and_health(target, bytes_before):
    for _ in range(20):
        began = time.monotonic()
        assert httpx.get(f"{target.server.url}{target.health}").status_code == 200  # on a connection of its own
        assert time.monotonic() - began < 5
    assert target.server.resident_bytes() < bytes_before + 100 * MEGABYTE


@pytest.mark.parametrize("requests", [300, pytest.param(8, marks=pytest.mark.full)])
def test_clients_that_do_not_read(attacked, requests):
    """Opens as many connections as one address may have."""
    before = attacked.server.resident_bytes()
    get = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with connections(attacked.server.url, 256, get * requests, receive_buffer=4096):
        check_memory_and_health(attacked, before)
        assert attacked.work(0).is_success
    assert len(attacked.server.log()) < MEGABYTE


@pytest.mark.parametrize(
    "trailers",
    [b"X: x\r\n" * MEGABYTE, pytest.param(b"X: " + b"x" * 50 * MEGABYTE, marks=pytest.mark.full)],
    ids=["many", "long"],
)
def test_endless_trailers(attacked, trailers):
    before = attacked.server.resident_bytes()
    head = f"POST {attacked.path} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n"
    with connections(attacked.server.url, 4, head.encode()) as opened:
        for connection in opened:
            with suppress(OSError):
                connection.sendall(trailers)
        check_memory_and_health(attacked, before)


@pytest.fixture(scope="module", params=[10, pytest.param(1, marks=pytest.mark.full)], ids=["a tenth", "all"])
def divisor(request):
    """Return by what `make test` divides the counts."""
    return request.param


@pytest.fixture(
    scope="module",
    params=["model", *(pytest.param(name, marks=pytest.mark.full) for name in ("rescue", "rescue on PostgreSQL"))],
)
def flooded(divisor, tmp_path_factory, request):
    """Run a server with few open files, which accepts 40 requests at once."""
    with (
        open_files(1280 // divisor),
        running(request.param, tmp_path_factory.mktemp("x"), TOKEN, 40 // divisor) as target,
    ):
        yield target


def test_half_sent_heads(flooded, divisor):
    head = f"GET {flooded.health} HTTP/1.1\r\nHost: localhost\r\n"
    with connections(flooded.server.url, 2000 // divisor, head.encode()):
        for n in range(10):
            assert flooded.server.http.get(flooded.health).status_code == 200
            assert flooded.work(n).is_success
    assert len(flooded.server.log()) < MEGABYTE


def test_slow_bodies(flooded, divisor):
    """As many bodies as the capacity may arrive. For the next one the slowest is dropped."""
    head = f"POST {flooded.path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n"
    head += "Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
    with connections(flooded.server.url, 200 // divisor, head.encode()) as opened:
        poller = select.poll()
        for connection in opened:
            poller.register(connection, select.POLLIN)
        wait_for(lambda: len(poller.poll(0)) == len(opened) - 40 // divisor)  # that were answered or closed
        for n in range(10):
            assert flooded.work(n).is_success
        assert flooded.server.http.get(flooded.health).status_code == 200
    assert len(flooded.server.log()) < MEGABYTE


def test_many_clients_at_once(flooded, divisor):
    """Each request succeeds, or is refused with Retry-After."""

    def call(client):
        answers = []
        for _ in range(5):
            assert flooded.server.http.get(flooded.health).status_code == 200
            answers.append(flooded.work(client))
        assert all(answer.is_success or answer.headers["retry-after"] for answer in answers)
        return {answer.status_code for answer in answers}

    clients = 64 // divisor
    with ThreadPoolExecutor(clients) as pool:
        statuses = set().union(*pool.map(call, range(clients)))
    assert 200 in statuses
    assert statuses <= {200, 429, 503}
    assert len(flooded.server.log()) < MEGABYTE
