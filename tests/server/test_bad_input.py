"""Invalid requests get a 4xx status and an error in OpenAI's shape that says what would be valid."""

import json
import time
from pathlib import Path

import pytest
from http_harness import connections, polled

from mlx_tq.__main__ import main

from .test_response_formats import schema_format

LINES = Path(__file__).with_name("refused.txt").read_text().split("# POST ")[1:]
REFUSED = [(part.split()[0], line) for part in LINES for line in part.splitlines()[1:] if line]


def error_of(response):
    """Return the error of a response, which has OpenAI's fields and no others."""
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


@pytest.mark.parametrize(("path", "line"), REFUSED)
def test_wrong_argument(server, path, line):
    body, param, words = line.split("  =>  ")
    content = body.replace("<5000>", "yes " * 5000).replace("<digits>", "9" * 5000)
    content = content.replace("<brackets>", "[" * 100_000)
    if "chat" in path and '"messages"' not in content:
        content = '{"messages": [{"role": "user", "content": "hi"}], ' + content[1:]
    for streamed in (content, content[:-1] + ', "stream": true}'):
        if streamed.startswith("{,") or streamed.count('"stream"') > 1:
            continue
        response = server.http.post(path, content=streamed)
        assert response.status_code == (404 if '"model"' in content else 400), response.text
        error = error_of(response)
        assert error["type"] == "invalid_request_error"
        assert words in error["message"]
        assert param in ("-", error["param"])


BAD_JSON = [b"", b"{", b"[]", b"3", b"null", b'"messages"', b"\xff\xfe", b"[" * 100_000, b'{"messages": "\\ud800"}']


@pytest.mark.parametrize("content", [*BAD_JSON, b'{"messages": [{"role": "user", "content": "\\ud800"}]}'])
def test_bad_json(server, content):
    response = server.http.post("/v1/chat/completions", content=content)
    assert response.status_code == 400
    assert error_of(response)["message"]


@pytest.mark.parametrize("template", ["{{", "{{ raise_exception('no') }}"])
def test_a_template_that_cannot_be_used(folder, template, capsys):
    assert main(["server", "--model", str(folder), "--port", "0", "--chat-template", template]) == 2
    assert "--chat-template cannot be used" in capsys.readouterr().err


def test_the_message_does_not_repeat_the_text(server):
    secret = "the queen of spades"
    response = server.post(messages=[{"role": secret, "content": secret}], max_tokens=secret)
    assert secret not in response.text
    assert secret not in server.log()


def test_huge_body(server):
    content = b'{"messages": [{"role": "user", "content": "' + b"a" * 10_000_001
    response = server.http.post("/v1/chat/completions", content=content)
    assert response.status_code == 413
    assert error_of(response)["code"] == "body_too_large"

    def chunks():  # without a length that could be read first
        for _ in range(200):
            yield b"a" * 100_000

    assert server.http.post("/v1/chat/completions", content=chunks()).status_code == 413


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/chat/completions", 405),
        ("POST", "/v1/models", 405),
        ("GET", "/v2", 404),
        ("GET", "/docs", 404),
        ("GET", "/v1/plan/", 404),
        ("POST", "/v1/completions/", 404),
    ],
)
def test_wrong_route(server, method, path, status):
    response = server.http.request(method, path, headers={"Host": "evil.example"})  # to which nothing redirects
    assert response.status_code == status
    assert error_of(response)["type"] == "invalid_request_error"


CHAT = {"messages": [{"role": "user", "content": "hi"}]}
PATH = "/v1/chat/completions"
KEYS = {f"key{n}": 1 for n in range(100_000)}
LISTS = [[]] * 100_000
LONG_KEY = {"properties": {"k" * 60_000: {"type": "strng"}}}
MANY_FAULTS = {
    "messages": (PATH, {"messages": [1] * 100_000}),
    "unknown keys of a format": (PATH, CHAT | {"response_format": {"type": "xml", **KEYS}}),
    "unknown keys of a part": (PATH, {"messages": [{"role": "user", "content": [{"type": "text", **KEYS}]}]}),
    "unknown keys of options": (PATH, CHAT | {"stream_options": KEYS}),
    "logit_bias": (PATH, CHAT | {"logit_bias": dict.fromkeys(KEYS, "high")}),
    "chat_template_kwargs": (PATH, CHAT | {"chat_template_kwargs": {key: [] for key in KEYS}}),
    "stop": (PATH, CHAT | {"stop": LISTS}),
    "tools": (PATH, CHAT | {"tools": LISTS}),
    "prompt": ("/v1/completions", {"prompt": LISTS}),
    "tokens": ("/v1/completions", {"prompt": [1] * 100_000 + ["a"] * 100_000}),
    "input of responses": ("/v1/responses", {"input": [{"type": "image"}] * 100_000}),
    "input of embeddings": ("/v1/embeddings", {"input": [None] * 100_000}),
    "a long type": (PATH, CHAT | {"response_format": {"type": "k" * 1_000_000}}),
    "a long key of a schema": (PATH, CHAT | {"response_format": schema_format(LONG_KEY)}),
    "large metadata": ("/v1/responses", {"input": "hi", "metadata": {"a": [[]] * 600_000}}),
    "a type that is a list": ("/v1/responses", {"input": [{"type": LISTS}]}),
}


@pytest.mark.parametrize(("path", "body"), MANY_FAULTS.values(), ids=MANY_FAULTS)
def test_many_faults(server, path, body):
    """The error names a few of them, and other requests are not delayed."""
    content = json.dumps(body, separators=(",", ":"))
    with polled(server, "/health") as health:
        started = time.monotonic()
        response = server.http.post(path, content=content)
        seconds = time.monotonic() - started
    assert response.status_code == 400
    assert len(error_of(response)["message"]) < 1000
    assert len(response.text) < 2000, "the name of the argument is short, too"
    assert seconds < 3
    assert max(health) < 2


def test_parsing_a_large_body_does_not_block_other_requests(server):
    content = b'{"model": "x", "prompt": [' + b",".join([b"1"] * 900_000) + b"]}"
    with polled(server, "/health") as health:
        assert server.http.post("/v1/completions", content=content).status_code == 400
    assert max(health) < 2


def test_a_faulty_request_whose_client_left_is_no_traceback_in_the_log(server):
    for size in (1, 10**5):
        body = b"[" * size
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % size
        for _ in range(50):
            with connections(server.url, 1, head + body):
                pass
    assert server.http.get("/health").status_code == 200
    assert "Traceback" not in server.log()
