"""The client with absent, hung, slow, failing and lying services: the caller continues soon."""

import json
import re
import threading
import time
import tracemalloc
from contextlib import ExitStack

import pytest
from bad_servers import CHUNK, MISBEHAVIORS, WRONG_SCHEMAS, BadServer, always, closed_port, hung, read_request, reply
from http_harness import wait_for

from mlx_tq.errors import ConfigError
from mlx_tq.rescue import RescueClient, TextSpan, open_service
from mlx_tq.rescue.client import CALL_S, LONGEST_PAUSE, MAX_FAILURES, CircuitBreaker

BOUND = 20  # seconds: tells a wait of 1 s from an endless one, also on a busy machine
SPANS = [TextSpan(start, start + 4, f"span {start}") for start in range(0, 40, 4)]


@pytest.fixture
def connect():
    """Return a function that makes a client of a URL, or of a server that it starts; both end after the test."""
    with ExitStack() as stack:

        def make_client(server, **options):
            url = server if isinstance(server, str) else stack.enter_context(BadServer(server)).url
            return stack.enter_context(RescueClient(open_service(url), **options))

        yield make_client


@pytest.mark.parametrize("server", [None, *MISBEHAVIORS.values()], ids=["refused", *MISBEHAVIORS])
def test_the_caller_continues(server, connect):
    client = connect(server or closed_port())
    began = time.monotonic()
    for _ in range(3):
        client.write("s", SPANS)
        assert client.retrieve("s", "what?", timeout=0.1) == []
    client.close(timeout=0.1)
    assert time.monotonic() - began < BOUND
    assert "Generation continues without" in client.take_warning()
    assert client.take_warning() is None
    stats = client.stats
    assert (stats.queries, stats.unanswered, stats.retrieved, stats.written) == (3, 3, 0, 0)
    assert stats.failures >= 1
    assert stats.queued + stats.refused == 3 * len(SPANS)


@pytest.mark.parametrize("answer", WRONG_SCHEMAS.values(), ids=WRONG_SCHEMAS)
def test_invalid_answers_are_rejected(answer, connect):
    client = connect(always(answer))
    assert client.retrieve("s", "what?") == []
    assert "not from a rescue service" in client.take_warning()
    assert client.stats.unanswered == 1


def test_valid_answers_wrong_tokens_and_invalid_urls(connect):
    spans = connect(always({"chunks": [CHUNK] * 9})).retrieve("s", "what?", top_k=8)
    assert [(span.start, span.stop, span.text) for span in spans] == [(0, 4, "a span")] * 8
    with BadServer(MISBEHAVIORS["401"]) as server:
        client = connect(server.url)
        assert client.retrieve("s", "what?") == []
        assert f"{server.url} does not accept the token; set RESCUE_TOKEN to its own" in client.take_warning()
    invalid = ("", "on", "127.0.0.1:5054", "ftp://127.0.0.1", "http://", "http://user:word@127.0.0.1", "http://x/?a=b")
    for url in invalid:
        with pytest.raises(ConfigError, match=r"it must be off, auto or a URL such as http://127\.0\.0\.1:5054"):
            open_service(url)


def test_memory_is_bounded_under_a_flood(connect):
    limit = 1_000_000
    client = connect(hung, max_queued=limit)
    tracemalloc.start()
    for number in range(200):
        client.write("s", [TextSpan(i, i + 1, f"{number} {i} ".ljust(1000, "x")) for i in range(100)])
    grown, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    stats = client.stats
    client.close(timeout=0.1)
    assert grown < 3 * limit
    assert stats.queued < limit / 1000
    assert stats.dropped == 200 * 100 - stats.queued
    assert "dropped" in client.take_warning()


def test_an_endless_answer_is_cut_off(connect):
    client = connect(MISBEHAVIORS["endless"])
    tracemalloc.start()
    assert client.retrieve("s", "what?", timeout=BOUND) == []
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 40_000_000
    assert "more than" in client.take_warning()


def test_failed_writes_are_repeated(connect):
    calls = []

    def recovers(connection, _):
        while request := read_request(connection):
            calls.append(request)
            status = "201 Created" if len(calls) > 2 else "503 Service Unavailable"
            reply(connection, b'{"accepted": 1}', status)

    many = [TextSpan(i, i + 1, f"<{i}>") for i in range(600)]
    client = connect(recovers)
    client.write("s", many)
    assert client.flush(BOUND)
    assert client.stats.written == 600
    assert client.stats.failures == 2
    assert [call.count(b'"text"') for call in calls[2:]] == [256, 256, 88]
    assert [int(n) for n in re.findall(rb"<(\d+)>", b"".join(calls[2:]))] == list(range(600))


def test_a_query_waits_for_earlier_writes(connect):
    order = []

    def slow_to_write(connection, _):
        while request := read_request(connection):
            is_write = b"/evict/write" in request
            time.sleep(0.3 if is_write else 0)
            order.append("write" if is_write else "query")
            reply(connection, b'{"accepted": 1, "chunks": []}')

    client = connect(slow_to_write)
    client.write("s", SPANS)
    client.retrieve("s", "what?", timeout=BOUND)
    assert order == ["write", "query"]


def test_temporary_sessions_are_renewed_until_they_are_forgotten(connect, monkeypatch):
    monkeypatch.setattr("mlx_tq.rescue.client.RENEW_S", 0.02)
    seen = []
    client = connect(always({"accepted": 1}, seen=seen))
    client.write("named", SPANS)
    for session_id in ("a", "b"):
        client.write(session_id, SPANS, temporary=True)
    assert client.flush(BOUND)

    def renewed():
        return {line.split()[1] for line in seen if line.startswith(b"POST /sessions/")}

    wait_for(lambda: renewed() == {b"/sessions/a/renew", b"/sessions/b/renew"})
    writes = {
        re.search(rb'"session_id": ?"(\w+)"', request)[1]: b"true" in request
        for request in seen
        if b"chunks" in request
    }
    assert writes == {b"named": False, b"a": True, b"b": True}
    assert client.forget("a", BOUND)
    wait_for_renewals(seen, "b", 2)  # a round that had begun still renews both
    seen.clear()
    wait_for_renewals(seen, "b", 2)
    assert renewed() == {b"/sessions/b/renew"}


def test_a_deletion_that_comes_too_late_is_not_made(connect):
    """It would delete what was written since."""
    seen, released = [], threading.Event()

    def waits(connection, _):
        while request := read_request(connection):
            seen.append(request)
            assert released.wait(BOUND)
            reply(connection, b'{"accepted": 1}', "201 Created")

    client = connect(waits)
    client.write("s", SPANS)
    wait_for(lambda: seen)
    assert not client.forget("s", 0.05)
    client.write("s", [TextSpan(50, 54, "later")])
    released.set()
    assert client.flush(BOUND)
    assert b"later" in seen[-1]
    time.sleep(0.2)  # for a deletion that should not come
    assert not [request for request in seen if request.startswith(b"DELETE")]


def wait_for_renewals(seen, session_id, count):
    """Wait for so many further renewals of a session."""
    line = f"POST /sessions/{session_id}/renew ".encode()

    def renewals():
        return sum(request.startswith(line) for request in list(seen))

    goal = renewals() + count
    wait_for(lambda: renewals() >= goal)


def test_a_session_that_the_service_has_forgotten_is_reported(connect, monkeypatch):
    monkeypatch.setattr("mlx_tq.rescue.client.RENEW_S", 0.02)
    seen = []

    def forgets(connection, _):
        while request := read_request(connection):
            seen.append(request)
            reply(connection, b'{"accepted": 1}', "404 Not Found" if b"/renew" in request else "201 Created")

    client = connect(forgets)
    client.write("s", SPANS, temporary=True)
    wait_for_renewals(seen, "s", 1)
    wait_for(lambda: (warning := client.take_warning()) and "has deleted the text" in warning)
    seen.clear()
    client.write("t", SPANS, temporary=True)
    wait_for_renewals(seen, "t", 1)
    assert not [request for request in seen if request.startswith(b"POST /sessions/s/renew")]


def test_a_session_of_which_nothing_was_stored_is_not_renewed(connect, monkeypatch):
    """The service would not know it, and the user would be warned of a loss."""
    monkeypatch.setattr("mlx_tq.rescue.client.RENEW_S", 0.02)
    seen = []

    def refuses(connection, _):
        while request := read_request(connection):
            seen.append(request)
            status = "201 Created" if b'"b"' in request or b"/b/" in request else "404 Not Found"
            reply(connection, b'{"accepted": 1, "detail": "no"}', status)

    client = connect(refuses)
    for session_id in ("a", "b"):
        client.write(session_id, SPANS, temporary=True)
    wait_for_renewals(seen, "b", 2)
    assert not [request for request in seen if request.startswith(b"POST /sessions/a/")]
    assert "has deleted" not in client.take_warning()  # but of the refusal


def test_the_circuit_breaker_opens(connect):
    now = 0.0
    breaker, pauses = CircuitBreaker(lambda: now), []
    for failure in range(1, 12):
        breaker.record(success=False)
        pauses.append(breaker.pause)
        assert breaker.is_open == (failure >= MAX_FAILURES)
    assert pauses == [min(LONGEST_PAUSE, 0.1 * 2**n) for n in range(11)]
    now = LONGEST_PAUSE
    assert not breaker.is_open
    breaker.record(success=False)
    assert breaker.is_open
    breaker.record(success=True)
    assert (breaker.is_open, breaker.pause) == (False, 0)
    with BadServer(hung) as server:
        client = connect(server.url)
        for _ in range(MAX_FAILURES + 3):  # pauses of 0.4, 0.8, 1.6 s
            client.retrieve("s", "what?", timeout=0.05)
        before = server.connections
        for _ in range(20):
            assert client.retrieve("s", "what?", timeout=BOUND) == []
        assert server.connections == before


def test_asking_for_the_embedder_never_stops_retrieval(connect):
    asked, is_ready = [], threading.Event()

    def starts(connection, _):
        while request := read_request(connection):
            asked.append(request.split()[1])
            if asked[-1] != b"/readyz":
                reply(connection, json.dumps({"chunks": [CHUNK]}).encode())
            elif is_ready.is_set():
                reply(connection, b'{"embedder": {"model": "hashing-1"}}')
            else:
                reply(connection, b"{}", "503 Service Unavailable")

    client = connect(starts)
    assert [client.embedder() for _ in range(MAX_FAILURES + 2)] == [None] * (MAX_FAILURES + 2)
    assert len(client.retrieve("s", "what?")) == 1
    assert (client.stats.failures, client.take_warning()) == (0, None)
    is_ready.set()
    asked.clear()
    assert [client.embedder() for _ in range(3)] == ["hashing-1"] * 3
    assert asked == [b"/readyz"]


def test_a_service_that_does_not_answer_is_not_asked_for_its_embedder(connect):
    with BadServer(hung) as server:
        client = connect(server.url)
        began = time.monotonic()
        assert client.embedder() is None
        assert time.monotonic() - began < CALL_S
        for _ in range(MAX_FAILURES + 3):  # pauses of 0.4, 0.8, 1.6 s
            client.retrieve("s", "what?", timeout=0.05)
        before = server.connections
        assert [client.embedder() for _ in range(20)] == [None] * 20
        assert server.connections == before


def test_the_token_is_sent_and_no_proxy_is_used(connect, monkeypatch):
    """A proxy of the environment would see the conversation."""
    seen = []
    with BadServer(hung) as proxy, BadServer(always({"chunks": []}, seen=seen)) as server:
        for name in ("HTTP_PROXY", "ALL_PROXY"):
            monkeypatch.setenv(name, proxy.url)
        monkeypatch.setenv("RESCUE_TOKEN", "a-token-of-sixteen")
        client = connect(server.url)
        client.retrieve("s", "what?")
        assert client.take_warning() is None
        assert proxy.connections == 0
    assert b"authorization: bearer a-token-of-sixteen" in seen[0].lower()


@pytest.mark.parametrize("text", ["nul \x00", "lone \ud800", "emoji 🦄", "x" * 10_000, "\x1b[31m"])
def test_any_text_can_be_written(text, connect):
    seen = []
    client = connect(always({"accepted": 1}, "201 Created", seen=seen))
    client.write("s", [TextSpan(0, 1, text)])
    client.retrieve("s", text)
    assert client.flush(BOUND)
    assert seen
    assert not [request for request in seen if b"\\u0000" in request or b"\\ud800" in request]


def test_closing_ends_the_thread_and_later_calls_do_nothing():
    before = threading.active_count()
    with BadServer(hung) as server:
        client = RescueClient(open_service(server.url))
        client.write("s", SPANS)
        client.close(timeout=0.1)
        client.close()
        client.write("s", SPANS)
        assert client.retrieve("s", "what?") == []
        assert not client.flush()
    wait_for(lambda: threading.active_count() <= before)
