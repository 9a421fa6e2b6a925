"""What a client gets wrong is answered 4xx, in OpenAI's shape, with a word on what would be right."""

import json

import openai
import pytest

from mlx_tq.cli import main

USER = [{"role": "user", "content": "hi"}]
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{"}}

# Arguments of a chat; the argument that is named as being at fault; a word of the message.
WRONG = {
    "empty messages": ({"messages": []}, "messages", "at least 1"),
    "no messages": ({"messages": None}, "messages", "valid array"),
    "messages are text": ({"messages": "hi"}, "messages", "valid array"),
    "a message is text": ({"messages": ["hi"]}, "messages.0", "object"),
    "a message without role": ({"messages": [{"content": "hi"}]}, "messages.0.role", "required"),
    "an unknown role": ({"messages": [{"role": "king", "content": "hi"}]}, "messages.0.role", "'user'"),
    "content is a number": (
        {"messages": [{"role": "user", "content": 3}]}, "messages.0.content", "string or a valid array"
    ),
    "an image": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}]},
        "messages.0.content.0.type",
        "'text'",
    ),
    "a call that is no JSON": ({"messages": [*USER, {"role": "assistant", "tool_calls": [CALL]}]}, None, "not JSON"),
    "negative max_tokens": ({"max_tokens": -5}, "max_tokens", "greater than or equal to 1"),
    "zero max_tokens": ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
    "max_tokens is text": ({"max_tokens": "5"}, "max_tokens", "valid integer"),
    "max_tokens is true": ({"max_tokens": True}, "max_tokens", "valid integer"),
    "too many tokens": ({"max_tokens": 4096}, "max_tokens", "Ask for 4,"),
    "too many, by its other name": ({"max_completion_tokens": 4096}, "max_completion_tokens", "Ask for 4,"),
    "content is null": ({"messages": [{"role": "user", "content": None}]}, "messages.0.content", "needs a text"),
    "content is missing": ({"messages": [{"role": "user"}]}, "messages.0.content", "needs a text"),
    "negative temperature": ({"temperature": -0.1}, "temperature", "greater than or equal to 0"),
    "temperature is text": ({"temperature": "hot"}, "temperature", "valid number"),
    "top_p over 1": ({"top_p": 1.5}, "top_p", "less than or equal to 1"),
    "stream is text": ({"stream": "yes"}, "stream", "valid boolean"),
    "a stop that is a number": ({"stop": ["a", 3]}, "stop.1", "valid string"),
    "five stops": ({"stop": list("abcde")}, "stop", "at most 4"),
    "an empty stop": ({"stop": ""}, "stop", "stop: String should have at least 1 character"),
    "two answers": ({"n": 2}, "n", "Input should be 1"),
    "a bias for no token": ({"logit_bias": {"4096": 1}}, "logit_bias", "0 to 4095"),
    "a bias for a word": ({"logit_bias": {"king": 1}}, "logit_bias", "'king'"),
    "an infinite bias": ({"logit_bias": {"1": 1000}}, "logit_bias.1", "less than or equal to 100"),
    "a seed below zero": ({"seed": -1}, "seed", "greater than or equal to 0"),
    "too many logprobs": ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "less than or equal to 20"),
    "an unknown argument": ({"temprature": 1}, "temprature", "no such argument"),
    "a path of adapters": ({"adapters": "/etc"}, "adapters", "no such argument"),
    "a draft model": ({"draft_model": "mlx-community/x"}, "draft_model", "no such argument"),
    "JSON mode": ({"response_format": {"type": "json_object"}}, "response_format.type", "'text'"),
    "tools without a template": ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "no tools"),
    "a template of its own": ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, None, "may not set"),
    "an unknown model": ({"model": "gpt-9"}, "model", "needle32"),
    "a path as a model": ({"model": "/etc/passwd"}, "model", "not served"),
    "an over-long prompt": ({"messages": [{"role": "user", "content": "yes " * 5000}]}, "messages", "allows 4,096"),
}  # fmt: skip


def error_of(response):
    """The error of an answer, which has OpenAI's fields and no others."""
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("stream", [False, True])
def test_wrong_argument(server, name, stream):
    body, param, word = WRONG[name]
    response = server.post(**{"messages": USER, "stream": stream, **body})
    assert response.status_code == (404 if body.get("model") else 400), response.text
    error = error_of(response)
    assert error["type"] == "invalid_request_error"
    assert word in error["message"]
    if param:
        assert error["param"] == param


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize("name", ["temperature", "top_p", "presence_penalty"])
def test_numbers_that_are_none(server, name, number):
    content = f'{{"messages": {json.dumps(USER)}, "{name}": {number}}}'
    response = server.http.post("/v1/chat/completions", content=content)
    assert response.status_code == 400
    assert error_of(response)["param"] == name


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"3", b"null", b'"messages"', b"\xff\xfe", b'{"messages": "\\ud800"}', b"[" * 100_000,
     b'{"messages": [{"role": "user", "content": "\\ud800"}]}'],
)  # fmt: skip
def test_bad_json(server, content):
    response = server.http.post("/v1/chat/completions", content=content)
    assert response.status_code == 400
    assert error_of(response)["message"]


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({}, "required"),
        ({"prompt": ""}, "at least 1"),
        ({"prompt": []}, "at least 1"),
        ({"prompt": ["a", "b"]}, "several prompts are not supported"),
        ({"prompt": [4096]}, "0 to 4095"),
        ({"prompt": [-1]}, "0 to 4095"),
        ({"prompt": "hi", "echo": True}, "False"),
        ({"prompt": "hi", "best_of": 3}, "Input should be 1"),
        ({"prompt": [1] * 5000}, "allows 4,096"),
    ],
)
def test_wrong_completion(server, body, word):
    response = server.post("/v1/completions", **body)
    assert response.status_code == 400
    error = error_of(response)
    assert word in error["message"]
    assert error["param"] == next((name for name in ("echo", "best_of") if name in body), "prompt")


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

    try:
        assert server.http.post("/v1/chat/completions", content=chunks()).status_code == 413
    except openai.APIConnectionError:
        pytest.fail("the answer was lost")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/v1/chat/completions", 405), ("POST", "/v1/models", 405), ("GET", "/v2", 404), ("GET", "/docs", 404)],
)
def test_wrong_route(server, method, path, status):
    response = server.http.request(method, path)
    assert response.status_code == status
    assert error_of(response)["type"] == "invalid_request_error"


def test_the_client_raises_its_own_errors(server):
    with pytest.raises(openai.BadRequestError, match="temperature") as wrong:
        server.chat("hi", temperature=-1)
    assert (wrong.value.param, wrong.value.code) == ("temperature", "invalid_value")
    with pytest.raises(openai.BadRequestError, match="Shorten the prompt") as long:
        server.chat("yes " * 5000)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError) as unknown:
        server.chat("hi", model="gpt-9")
    assert unknown.value.code == "model_not_found"


def test_the_server_lives_on(server):
    """After everything above."""
    assert server.chat("The access code is 417295. What is the access code?").choices[0].message.content == "417295"
