"""More at once than anyone needs: the service goes on, its health is answered before all else, its log stays small."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
from http_harness import answered, connections, open_files, slowest_answer, wait_for

from ..harness import IN_FULL_EACH_STORE, TOKEN

MEGABYTE = 10**6
HALF = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n"
SLOW = (
    b"POST /evict/write HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer %s\r\n"
    b"Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{" % TOKEN.encode()
)
ROOT = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
CHUNKED = b"POST /evict/write HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
EACH_TOKEN = pytest.mark.parametrize(
    "settings", [{"token": TOKEN}, pytest.param({}, marks=pytest.mark.full)], ids=["token", "no token"]
)


@EACH_TOKEN
@pytest.mark.parametrize("requests", [300, pytest.param(8, marks=pytest.mark.full)])
def test_clients_that_do_not_read(serve, settings, requests):
    """Opens as many connections as one address may have."""
    server = serve(**settings)
    before = server.resident_bytes()
    with connections(server.url, 256, ROOT * requests, receive_buffer=4096):
        assert slowest_answer(f"{server.url}/healthz") < 5
        assert server.write("s", ("text", 0, 1)).status_code == 201
        assert server.resident_bytes() < before + 100 * MEGABYTE
    assert len(server.log()) < MEGABYTE


@EACH_TOKEN
@pytest.mark.parametrize(
    "trailers",
    [b"X: x\r\n" * MEGABYTE, pytest.param(b"X: " + b"x" * 50 * MEGABYTE, marks=pytest.mark.full)],
    ids=["many", "long"],
)
def test_trailers_without_end(serve, settings, trailers):
    server = serve(**settings)
    before = server.resident_bytes()
    with connections(server.url, 4, CHUNKED + b"0\r\n") as made:
        for connection in made:
            with suppress(OSError):
                connection.sendall(trailers)
        assert slowest_answer(f"{server.url}/healthz") < 5
        assert server.resident_bytes() < before + 100 * MEGABYTE


def test_half_sent_heads(serve, times):
    with open_files(times(1280)):
        server = serve(token=TOKEN)
    with connections(server.url, times(2000), HALF):
        for n in range(10):
            assert server.http.get("/healthz").status_code == 200
            assert server.write("s", (f"text {n}", n, n + 1)).status_code == 201
    assert len(server.log()) < MEGABYTE


def test_slow_bodies(serve, times):
    server = serve(token=TOKEN, max_in_flight=times(64))
    with connections(server.url, times(200), SLOW) as made:
        wait_for(lambda: answered(made) == times(200) - times(64))  # the rest is arriving
        refused = server.write("s", ("text", 0, 1))
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert server.http.get("/healthz").status_code == 200


@IN_FULL_EACH_STORE
def test_many_clients_at_once(serve, times):
    """None is answered otherwise than by success or a refusal that says when to come back."""
    server = serve(max_in_flight=times(32) + 1)

    def call(client):
        statuses = set()
        for n in range(20):
            statuses.add(server.write(f"s{client}", (f"text {n}", n, n + 1)).status_code)
            asked = {"session_id": f"s{client}", "query": "text"}
            statuses.add(server.http.post("/evict/retrieve", json=asked).status_code)
            assert server.http.get("/healthz").status_code == 200
        return statuses

    with ThreadPoolExecutor(times(64) + 1) as clients:
        assert set().union(*clients.map(call, range(times(64) + 1))) <= {200, 201, 429}
    assert len(server.log()) < MEGABYTE
