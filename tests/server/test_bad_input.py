"""What a client gets wrong is answered 4xx, in OpenAI's shape, with a word on what would be right."""

from pathlib import Path

import pytest

from mlx_tq.cli import main

LINES = Path(__file__).with_name("refused.txt").read_text().split("# POST ")[1:]
REFUSED = [(part.split()[0], line) for part in LINES for line in part.splitlines()[1:] if line]


def error_of(response):
    """The error of an answer, which has OpenAI's fields and no others."""
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


@pytest.mark.parametrize(("path", "line"), REFUSED)
def test_wrong_argument(server, path, line):
    """As an answer and as a stream."""
    asked, param, word = line.split("  =>  ")
    content = asked.replace("<5000>", "yes " * 5000)
    if "chat" in path and '"messages"' not in content:
        content = '{"messages": [{"role": "user", "content": "hi"}], ' + content[1:]
    for streamed in (content, content[:-1] + ', "stream": true}'):
        if streamed.startswith("{,") or streamed.count('"stream"') > 1:
            continue
        response = server.http.post(path, content=streamed)
        assert response.status_code == (404 if '"model"' in content else 400), response.text
        error = error_of(response)
        assert error["type"] == "invalid_request_error"
        assert word in error["message"]
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
    [("GET", "/v1/chat/completions", 405), ("POST", "/v1/models", 405), ("GET", "/v2", 404), ("GET", "/docs", 404)],
)
def test_wrong_route(server, method, path, status):
    response = server.http.request(method, path)
    assert response.status_code == status
    assert error_of(response)["type"] == "invalid_request_error"
