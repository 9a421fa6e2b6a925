"""Bad input: a typed error in the 4xx range, nothing stored, and the service still answers."""

import json
import socket
import time

import pytest

CHUNK = {"text": "t", "token_range": [0, 1], "layer": 0, "score": 0.0}


def body(**chunk):
    return {"session_id": "bad", "chunks": [CHUNK | chunk]}


def post(server, content, path="/evict/write"):
    raw = content if isinstance(content, bytes) else json.dumps(content).encode()
    return server.client.post(path, content=raw, headers={"content-type": "application/json"})


@pytest.fixture
def unharmed(shared):
    """After the bad input: nothing of it is stored, and a good call goes through."""
    yield shared
    assert shared.dump("bad")["session_total"] == 0
    assert shared.write("good", ("still alive", 0, 1)).status_code == 201
    assert shared.retrieve("good", "alive", hybrid_alpha=0)["chunks"]


WRONG = {
    "text is a number": body(text=7),
    "text is empty": body(text=""),
    "text is null": body(text=None),
    "text with NUL": body(text="a\0b"),
    "text with a lone surrogate": b'{"session_id": "bad", "chunks": [{"text": "\\ud800", "token_range": [0, 1]}]}',
    "text too long": body(text="x" * 8193),
    "range of one": body(token_range=[1]),
    "range of three": body(token_range=[1, 2, 3]),
    "range of strings": body(token_range=["1", "2"]),
    "range of floats": body(token_range=[0.5, 1.5]),
    "range backwards": body(token_range=[5, 4]),
    "range empty": body(token_range=[5, 5]),
    "range negative": body(token_range=[-1, 4]),
    "range huge": body(token_range=[0, 10**30]),
    "range of booleans": body(token_range=[False, True]),
    "layer is text": body(layer="3"),
    "layer is a boolean": body(layer=True),
    "layer below -1": body(layer=-2),
    "score NaN": b'{"session_id": "bad", "chunks": [{"text": "t", "token_range": [0, 1], "score": NaN}]}',
    "score Infinity": b'{"session_id": "bad", "chunks": [{"text": "t", "token_range": [0, 1], "score": 1e999}]}',
    "score is text": body(score="0.5"),
    "both dialects": body(tokens=[0]),
    "unknown field": body(extra=1),
    "no chunks": {"session_id": "bad", "chunks": []},
    "chunks is an object": {"session_id": "bad", "chunks": {}},
    "257 chunks": {"session_id": "bad", "chunks": [CHUNK] * 257},
    "one good, one bad": {"session_id": "bad", "chunks": [CHUNK, {"text": "t"}]},
    "no session": {"chunks": [CHUNK]},
    "session with a slash": {"session_id": "../etc", "chunks": [CHUNK]},
    "session with a newline": {"session_id": "bad\n", "chunks": [CHUNK]},
    "session empty": {"session_id": "", "chunks": [CHUNK]},
    "session too long": {"session_id": "s" * 65, "chunks": [CHUNK]},
    "session not ASCII": {"session_id": "sé", "chunks": [CHUNK]},
    "session is a list": {"session_id": ["bad"], "chunks": [CHUNK]},
    "not an object": [1],
    "null": None,
    "empty body": b"",
    "not JSON": b"{",
    "not UTF-8": b'{"session_id": "bad\xff"}',
    "an endless number": b'{"session_id": "bad", "chunks": [{"text": "t", "layer": ' + b"9" * 5000 + b"}]}",
    "deep nesting": b'{"session_id": ' + b"[" * 200_000 + b"]" * 200_000 + b"}",
    "a million tiny chunks": b'{"session_id": "bad", "chunks": [' + b",".join([b'{"a":1}'] * 1_000_000) + b"]}",
    "a million numbers for chunks": b'{"session_id": "bad", "chunks": [' + b",".join([b"1"] * 1_000_000) + b"]}",
}


@pytest.mark.parametrize("content", WRONG.values(), ids=WRONG.keys())
def test_a_bad_write(unharmed, content):
    began = time.monotonic()
    answer = post(unharmed, content)
    assert answer.status_code in (400, 422), answer.text
    error = answer.json()
    assert set(error) == {"detail", "code", "request_id"}
    assert error["code"] in ("invalid_request", "invalid_body")
    assert len(error["detail"]) < 1000
    assert time.monotonic() - began < 20


@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 0},
        {"top_k": 65},
        {"top_k": "8"},
        {"top_k": 1.5},
        {"hybrid_alpha": 1.1},
        {"hybrid_alpha": None},
        {"score_floor": 2},
        {"join": "no"},
        {"query": ""},
        {"query": "a\0"},
        {"query": "x" * 8193},
        {"exclude_ranges": [[1]]},
        {"exclude_ranges": [[0, 1]] * 4097},
        {"exclude_ranges": "all"},
        {"model": "../../model"},
    ],
    ids=lambda options: str(options)[:40],
)
def test_a_bad_question(unharmed, options):
    answer = post(unharmed, {"session_id": "good", "query": "q", **options}, "/evict/retrieve")
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid_request")


def test_two_different_sessions_are_refused(unharmed):
    answer = post(unharmed, body(), "/evict/write?session_id=other")
    assert answer.status_code == 422
    assert "two different sessions" in answer.json()["detail"]


@pytest.mark.parametrize(
    "query", ['"', "AND OR NOT", "a NEAR(b)", "text:x", "*", "^a", "-", "_", "' --", "é à 漢字", "😀"]
)
def test_a_question_is_words_and_no_query_language(unharmed, query):
    assert unharmed.client.post("/evict/retrieve", json={"session_id": "good", "query": query}).status_code == 200


@pytest.mark.parametrize("session", ["a%00b", "a%0a", "..%2f..%2fetc", "s" * 65, "%ff"])
@pytest.mark.parametrize(
    "call", [("DELETE", "/sessions/{}"), ("POST", "/sessions/{}/resume"), ("GET", "/evict/dump?session_id={}")]
)
def test_a_bad_session_in_the_address(unharmed, session, call):
    method, path = call
    answer = unharmed.client.request(method, path.format(session))
    assert answer.status_code in (404, 422), answer.text
    assert answer.json()["code"] in ("invalid_request", "no_such_route")


def test_a_body_over_the_limit_is_refused_before_it_is_parsed(unharmed):
    answer = post(unharmed, b" " * (10 * 2**20 + 1))
    assert (answer.status_code, answer.json()["code"]) == (413, "body_too_large")


def test_a_body_over_the_limit_without_a_length_is_cut_off(unharmed):
    def endless():
        for _ in range(11 * 2**10):
            yield b" " * 1024

    answer = unharmed.client.post("/evict/write", content=endless(), headers={"content-type": "application/json"})
    assert (answer.status_code, answer.json()["code"]) == (413, "body_too_large")


@pytest.mark.parametrize(
    "raw",
    [
        b"POST /evict/write HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{",
        b"POST /evict/write HTTP/1.1\r\nHost: localhost\r\nContent-Length: abc\r\n\r\n",
        b"\x16\x03\x01 not http\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"X: " + b"a" * 200_000 + b"\r\n\r\n",
    ],
    ids=["body cut short", "length is no number", "not HTTP", "huge header"],
)
def test_a_client_that_breaks_the_protocol(unharmed, raw):
    host, port = unharmed.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=5) as connection:
        connection.sendall(raw)


def test_caps_are_clear_and_store_nothing(serve):
    server = serve(embedder="none", max_session_spans=3, max_spans=5, max_sessions=2)
    server.write("a", ("1", 0, 1), ("2", 1, 2), ("3", 2, 3))
    full = server.write("a", ("4", 3, 4))
    assert (full.status_code, full.json()["code"]) == (413, "session_full")
    assert "RESCUE_MAX_SESSION_SPANS" in full.json()["detail"]
    assert server.write("a", ("1", 0, 1)).json() == {
        "accepted": 0,
        "session_total": 3,
    }  # nothing new, so nothing too much
    everywhere = server.write("b", ("1", 0, 1), ("2", 1, 2), ("3", 2, 3))
    assert (everywhere.status_code, everywhere.json()["code"]) == (507, "store_full")
    assert server.write("b", ("1", 0, 1)).status_code == 201
    third = server.write("c", ("1", 0, 1))
    assert (third.status_code, third.json()["code"]) == (507, "store_full")
    assert [s["session_total"] for s in server.client.get("/sessions").json()["sessions"]] == [1, 3]
