"""Floods of connections and requests: the server survives, /health answers first, and the log stays small."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
from http_harness import answered, connections, open_files, slowest_answer, wait_for

from .conftest import PACKED
from .harness import running

MEGABYTE = 10**6
QUEUE = 40  # requests that may wait while one runs
HALF = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
SLOW = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{"
ROOT = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
CHUNKED = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.fixture(scope="module", params=["a-key", pytest.param(None, marks=pytest.mark.full)], ids=["key", "no key"])
def attacked(folder, tmp_path_factory, request):
    with running(folder, tmp_path_factory.mktemp("x") / "log", *PACKED, key=request.param) as server:
        yield server


@pytest.mark.parametrize("requests", [300, pytest.param(8, marks=pytest.mark.full)])
def test_clients_that_do_not_read(attacked, requests):
    """Opens as many connections as one address may have."""
    before = attacked.resident_bytes()
    with connections(attacked.url, 256, ROOT * requests, receive_buffer=4096):
        assert slowest_answer(f"{attacked.url}/health") < 5
        assert attacked.chat("hi", max_tokens=1).usage.completion_tokens == 1
        assert attacked.resident_bytes() < before + 100 * MEGABYTE
    assert len(attacked.log()) < MEGABYTE


@pytest.mark.parametrize(
    "trailers",
    [b"X: x\r\n" * MEGABYTE, pytest.param(b"X: " + b"x" * 50 * MEGABYTE, marks=pytest.mark.full)],
    ids=["many", "long"],
)
def test_trailers_without_end(attacked, trailers):
    before = attacked.resident_bytes()
    with connections(attacked.url, 4, CHUNKED + b"0\r\n") as opened:
        for connection in opened:
            with suppress(OSError):
                connection.sendall(trailers)
        assert slowest_answer(f"{attacked.url}/health") < 5
        assert attacked.resident_bytes() < before + 100 * MEGABYTE


@pytest.fixture(scope="module", params=[10, pytest.param(1, marks=pytest.mark.full)], ids=["a tenth", "all"])
def flooded(folder, tmp_path_factory, request):
    """A server with few allowed open files, and the divisor of the full counts."""
    limits = ("--decode-concurrency", "1", "--max-queue", str(QUEUE // request.param))
    with (
        open_files(1280 // request.param),
        running(folder, tmp_path_factory.mktemp("x") / "log", *PACKED, *limits) as server,
    ):
        yield server, request.param


def test_half_sent_heads(flooded):
    server, share = flooded
    with connections(server.url, 2000 // share, HALF):
        for _ in range(10):
            assert server.http.get("/health").status_code == 200
        assert server.chat("hi", max_tokens=1).usage.completion_tokens == 1
    assert len(server.log()) < MEGABYTE


def test_slow_bodies(flooded):
    """As many clients as may wait or run may send at once; the next one gets status 429."""
    server, share = flooded
    with connections(server.url, 200 // share, SLOW) as opened:
        wait_for(lambda: answered(opened) == len(opened) - 1 - QUEUE // share)  # the rest is arriving
        assert server.http.get("/health").status_code == 200
        refused = server.post(messages=[{"role": "user", "content": "hi"}], max_tokens=1)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        assert refused.headers["retry-after"] == "1"
    assert len(server.log()) < MEGABYTE


def test_many_clients_at_once(flooded):
    """Each gets its answer, or a refusal with Retry-After."""
    server, share = flooded

    def call(client):
        assert server.http.get("/health").status_code == 200
        answer = server.post(messages=[{"role": "user", "content": f"hi {client}"}], max_tokens=2)
        assert answer.status_code == 200 or answer.headers["retry-after"]
        return answer.status_code

    clients = 64 // share
    with ThreadPoolExecutor(clients) as pool:
        statuses = set(pool.map(call, range(clients)))
    assert 200 in statuses
    assert statuses <= {200, 429, 503}
    assert len(server.log()) < MEGABYTE
