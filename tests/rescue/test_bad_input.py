"""Invalid requests get a typed 4xx error, store nothing and leave the service responsive."""

import json
import time

import pytest
from http_harness import polled

from rescue_svc.schemas import MAX_TOKENS

from .harness import IN_FULL_EACH_STORE

CHUNK = {"text": "t", "token_range": [0, 1], "layer": 0, "score": 0.0}
# What a field of a chunk must not be.
BAD_FIELDS = {
    "text": [7, "", None, "a\0b", "x" * 8193],
    "token_range": [[1], [1, 2, 3], ["1", "2"], [0.5, 1.5], [5, 4], [5, 5], [-1, 4], [0, 10**30], [False, True]],
    "layer": ["3", True, -2],
    "score": ["0.5"],
    "tokens": [[0]],  # both dialects
    "unknown": [1],
}
BAD_SESSIONS = ["../etc", "bad\n", "", "s" * 65, "sé", ["bad"]]
BAD_CHUNKS = {"none": [], "an object": {}, "257": [CHUNK] * 257, "one good, one bad": [CHUNK, {"text": "t"}]}
RAW = {
    "text with a lone surrogate": b'{"session_id": "bad", "chunks": [{"text": "\\ud800", "token_range": [0, 1]}]}',
    "score NaN": b'{"session_id": "bad", "chunks": [{"text": "t", "token_range": [0, 1], "score": NaN}]}',
    "score Infinity": b'{"session_id": "bad", "chunks": [{"text": "t", "token_range": [0, 1], "score": 1e999}]}',
    "not an object": b"[1]",
    "null": b"null",
    "empty body": b"",
    "not JSON": b"{",
    "not UTF-8 in a text": b'{"session_id": "bad\xff"}',
    "not UTF-8 at the start": b"\xff\xfe",
    "an endless number": b'{"session_id": "bad", "chunks": [{"text": "t", "layer": ' + b"9" * 5000 + b"}]}",
    "deep nesting": b'{"session_id": ' + b"[" * 200_000 + b"]" * 200_000 + b"}",
    "a million tiny chunks": b'{"session_id": "bad", "chunks": [' + b",".join([b'{"a":1}'] * 1_000_000) + b"]}",
    "a million numbers for chunks": b'{"session_id": "bad", "chunks": [' + b",".join([b"1"] * 1_000_000) + b"]}",
}
BAD_WRITES = {
    **{
        f"{field} {str(value)[:20]!r}": {"session_id": "bad", "chunks": [CHUNK | {field: value}]}
        for field, values in BAD_FIELDS.items()
        for value in values
    },
    **{f"session {str(name)[:20]!r}": {"session_id": name, "chunks": [CHUNK]} for name in BAD_SESSIONS},
    **{f"chunks: {what}": {"session_id": "bad", "chunks": chunks} for what, chunks in BAD_CHUNKS.items()},
    "no session": {"chunks": [CHUNK]},
    **RAW,
}


def post(service, content, path="/evict/write"):
    raw = content if isinstance(content, bytes) else json.dumps(content).encode()
    return service.http.post(path, content=raw, headers={"content-type": "application/json"})


@pytest.fixture
def unharmed(shared):
    """Check after bad input that nothing of it is stored and that a valid call succeeds."""
    yield shared
    assert shared.dump("bad")["session_total"] == 0
    assert shared.write("good", ("still alive", 0, 1)).status_code == 201
    assert shared.search("good", "alive", hybrid_alpha=0)


@pytest.mark.parametrize("content", BAD_WRITES.values(), ids=BAD_WRITES)
@IN_FULL_EACH_STORE
def test_a_bad_write(unharmed, content):
    answer = post(unharmed, content)
    error = answer.json()
    assert set(error) == {"detail", "code", "request_id"}
    assert (answer.status_code, error["code"]) in ((400, "invalid_body"), (422, "invalid_request")), answer.text
    assert len(error["detail"]) < 1000


BAD_OPTIONS = {
    "top_k": [0, 65, "8", 1.5],
    "hybrid_alpha": [1.1, None],
    "score_floor": [2],
    "join": ["no"],
    "query": ["", "a\0", "x" * 8193],
    "exclude_ranges": [[[1]], [[0, 1]] * 4097, "all"],
    "model": ["../../model"],
}


@pytest.mark.parametrize(("option", "values"), BAD_OPTIONS.items())
@IN_FULL_EACH_STORE
def test_a_bad_question(unharmed, option, values):
    for value in values:
        answer = post(unharmed, {"session_id": "good", "query": "q", option: value}, "/evict/retrieve")
        assert (answer.status_code, answer.json()["code"]) == (422, "invalid_request"), value


@IN_FULL_EACH_STORE
def test_a_query_has_no_syntax(unharmed):
    for query in ('"', "AND OR NOT", "a NEAR(b)", "text:x", "*", "^a", "-", "_", "' --", "é à 漢字", "😀"):
        assert post(unharmed, {"session_id": "good", "query": query}, "/evict/retrieve").status_code == 200, query


@pytest.mark.parametrize("session", ["a%00b", "a%0a", "..%2f..%2fetc", "s" * 65, "%ff"])
@pytest.mark.parametrize("call", ["DELETE /sessions/{}", "POST /sessions/{}/resume", "GET /evict/dump?session_id={}"])
@IN_FULL_EACH_STORE
def test_a_bad_session_in_the_address(unharmed, session, call):
    answer = unharmed.http.request(*call.format(session).split())
    assert answer.status_code in (404, 422), answer.text
    assert answer.json()["code"] in ("invalid_request", "no_such_route")


@pytest.mark.parametrize("has_length", [True, False])
@IN_FULL_EACH_STORE
def test_a_body_over_the_limit_is_refused_or_cut_off(unharmed, has_length):
    content = b" " * (10 * 2**20 + 1) if has_length else (b" " * 1024 for _ in range(11 * 2**10))
    answer = unharmed.http.post("/evict/write", content=content, headers={"content-type": "application/json"})
    assert ("content-length" in answer.request.headers) == has_length
    assert (answer.status_code, answer.json()["code"]) == (413, "body_too_large")


def chunk_of(*token_lists):
    """Return a write of one chunk for each list of tokens, which are JSON."""
    return f'{{"chunks": [{",".join(f"""{{"text": "t", "tokens": [{tokens}]}}""" for tokens in token_lists)}]}}'


KEYS = ",".join(f'"key{n}": 1' for n in range(500_000))
TOKENS, FLOATS = ",".join(["1"] * MAX_TOKENS), ",".join(["1.0"] * MAX_TOKENS)
# Bodies that take long to validate: path, content, status.
LARGE = {
    "unknown fields": ("/evict/write", f"{{{KEYS}}}", 422),
    "unknown fields of a chunk": ("/evict/write", f'{{"chunks": [{{{KEYS}}}]}}', 422),
    "unknown fields of a query": ("/evict/retrieve", f'{{"query": "q", {KEYS}}}', 422),
    "texts": ("/embed", f'{{"texts": [{",".join(["1"] * 1_000_000)}]}}', 422),
    "ranges": ("/evict/retrieve", f'{{"query": "q", "exclude_ranges": [{",".join(["[]"] * 1_000_000)}]}}', 422),
    "too many tokens": ("/evict/write", chunk_of(",".join([TOKENS] * 30)), 422),
    "wrong tokens": ("/evict/write", chunk_of(",".join(["[]"] * 60_000)), 422),
    "tokens": ("/evict/write?session_id=large", chunk_of(*[TOKENS] * 60), 201),
    "floats": ("/evict/write?session_id=large", chunk_of(*[FLOATS] * 30), 201),
    "a long name": ("/evict/write", f'{{"{"k" * 5_000_000}": 1}}', 422),
}


@pytest.mark.full
def test_large_bodies_and_queries_do_not_delay_others(start_server):
    server = start_server(embedder="none")
    for what, (path, content, status) in LARGE.items():
        with polled(server, "/healthz") as health:
            began = time.monotonic()
            answer = post(server, content.encode(), path)
            seconds = time.monotonic() - began
        assert answer.status_code == status, f"{what}: {answer.text}"
        assert len(answer.text) < 1500, what
        assert seconds < 5, what
        assert max(health) < 2, what
    with polled(server, "/healthz") as health:
        for query in ("session_id=a&" * 4000, "a=" + "&" * 50_000, "x=1&" * 12_000):
            assert server.http.get(f"/evict/dump?{query}").status_code in (200, 422)
    assert max(health) < 1
