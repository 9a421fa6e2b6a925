"""Random requests of every shape get an answer or a 4xx, soon and whole: no 500, no hang, no broken stream."""

import json
import random
import secrets
import socket
from http.client import HTTPResponse
from typing import NamedTuple

import pytest
from cli.tools import copy_model

from mlx_tq.server.schemas import ChatRequest, CompletionRequest, EmbeddingRequest, ResponseRequest

LIMIT_S = 60  # for an answer of a few tokens, on a busy machine
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 5}}, "required": ["a"]}
CHAT = {
    "messages": [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "t", "tool_call_id": "1"},
        {"role": "user", "content": "hi"},
    ]
}
FORMATS = [
    {"type": "json_object"},
    {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}},
    {"type": "grammar", "syntax": "regex", "definition": "[ab]+"},
]
OPTIONS = {
    "stream": True, "max_tokens": 2, "temperature": 0.5, "top_p": 0.5, "top_k": 5, "min_p": 0.1, "seed": 1,
    "repetition_penalty": 1.1, "repetition_context_size": 5, "presence_penalty": 0.1, "frequency_penalty": 0.1,
    "logit_bias": {"5": 1}, "stop": ["a"], "n": 2,
}  # fmt: skip
ITEMS = [
    {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
    {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "1", "output": "o"},
    {"type": "reasoning"},
]
# By path: the model of the body, and valid bodies.
BODIES = {
    "/v1/chat/completions": (
        ChatRequest,
        [
            CHAT,
            {**CHAT, "stream": True, "stream_options": {"include_usage": True}},
            {**CHAT, "logprobs": True, "top_logprobs": 2},
            {**CHAT, "tools": [TOOL], "chat_template_kwargs": {"a": "b"}},
            {**CHAT, "tools": [TOOL], "tool_choice": "required"},
            {"messages": [*CHAT["messages"], {"role": "assistant", "content": "It"}]},
            *({"messages": CHAT["messages"][1:2], "response_format": form} for form in FORMATS),
        ],
    ),
    "/v1/completions": (CompletionRequest, [{"prompt": "hi"}, {"prompt": [[5, 6], [7]]}, {"prompt": ["a"]}]),
    "/v1/responses": (
        ResponseRequest,
        [
            {"input": "hi", "stream": True, "top_logprobs": 1, "include": ["message.output_text.logprobs"]},
            {"input": ITEMS, "instructions": "i", "metadata": {"a": "b"}},
            {"input": "hi", "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}},
            {"input": "hi", "tools": [{"type": "function", "name": "f", "parameters": {}}], "temperature": 0.5},
        ],
    ),
    "/v1/embeddings": (EmbeddingRequest, [{"input": ["a", "b"]}, {"input": "a", "encoding_format": "base64"}]),
}
INTEGERS = [0, 1, 2, -1, 3, 2**31, 2**63, 2**64, -(2**63), 10**30]
NUMBERS = [*INTEGERS, 0.5, -0.0, 5e-324, 1e-39, 1e308, float("nan"), float("inf")]
TEXTS = [
    *(
        "",
        "\0",
        "\ud800",
        "\U0001f984",
        "<|im_end|>",
        "<tool_call>",
        "{{ 1 }}",
        "system",
        "null",
        "((a*)*b",
        '{"a": ' * 60,
    ),
    *(character * 100_000 for character in "a9["),
]
KEYS = [
    "type",
    "role",
    "content",
    "name",
    "schema",
    "messages",
    "$ref",
    "allOf",
    "enum",
    "",
    "-1",
    "9" * 5000,
    "a" * 300,
]
LEAVES = [None, True, False, *NUMBERS, *TEXTS]
HEADERS = {
    "Host": ["[", "a]b[c", "evil.example", "", "localhost:x", "[::1]", "\xe9", "user@localhost", "localhost,localhost"],
    "Origin": ["null", "http://[", "http://localhost", "\xff", ""],
    "Authorization": ["Bearer", "Bearer \xe9", "Basic x", "\xff" * 100],
    "X-MLX-TQ-Session": ["s", "t", "", "a b", "../x", "x" * 65, "\xe9", "\x00"],
    "Content-Type": ["text/plain", "application/json; charset=utf-16", "multipart/form-data", "\xff"],
    "Content-Length": ["-1", "x", "0", "9" * 30, "1e3", "+5", "5, 5"],
    "Transfer-Encoding": ["chunked", "gzip", "chunked, chunked", "\xff"],
    "Accept-Encoding": ["gzip", "\xff"],
    "Expect": ["100-continue", "x"],
    "Connection": ["close", "upgrade", "keep-alive, close"],
    "Upgrade": ["websocket", "h2c"],
    "Range": ["bytes=0-1"],
    "X-Forwarded-For": ["evil.example"],
}
PATHS = [
    *("/", "/health", "/metrics", "/v1/models", "/v1/models/", "/v1/models/tools", "/v1/models/%ff%00", "/docs"),
    *("/v1/plan", "/v1/plan/", "/v1/sessions/s", "/v1/sessions/t", "/v1/sessions/%2e%2e%2fx", "/v1/\xff"),
    *("/v1/sessions/" + "x" * 300, "/v1/chat/completions?stream=true", "/v1/chat/completions/", "/?" + "a=" * 3000),
    *("//", "/..", "/%", "/%zz", "http://evil.example/v1/plan", "*"),
]
METHODS = ["GET", "GET", "GET", "POST", "DELETE", "PUT", "HEAD", "OPTIONS", "TRACE", "CONNECT", "get", "\xff"]


class Request(NamedTuple):
    method: str
    target: str
    headers: dict[str, str]
    body: bytes

    def to_bytes(self):
        head = [f"{self.method} {self.target} HTTP/1.1", *(f"{name}: {value}" for name, value in self.headers.items())]
        return "\r\n".join([*head, "", ""]).encode("latin-1") + self.body

    @property
    def is_framed(self):
        """Whether the header says how long the body is."""
        return self.headers["Content-Length"] == str(len(self.body)) and "Transfer-Encoding" not in self.headers


def parts_of(value, path=()):
    """Return the paths of all parts of a JSON value."""
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(found for key, child in children for found in parts_of(child, (*path, key)))]


def replaced(value, path, new):
    if not path:
        return new
    copied = value.copy()
    copied[path[0]] = replaced(value[path[0]], path[1:], new)
    return copied


def part_at(value, path):
    for key in path:
        value = value[key]
    return value


# Every part of every valid body: path of the request, body, path of the part.
PLACES = [(target, body, path) for target, (_, valid) in BODIES.items() for body in valid for path in parts_of(body)]


def value_like(rng, value):
    """Return a value of the type of `value`, which passes more checks than others."""
    if isinstance(value, bool | None):
        return rng.choice([True, False])
    if isinstance(value, int | float):
        return rng.choice(NUMBERS)
    if isinstance(value, str):
        return rng.choice(TEXTS)
    if isinstance(value, list):
        return rng.choice([[], value * 2, value * 30, [*value, *value[:1]]])
    key = rng.choice([*value, *KEYS])
    return rng.choice([{}, {**value, key: rng.choice(LEAVES)}, {**value, key: value}])


def any_value(rng, depth=0):
    kind = rng.random() * (4 - depth)
    if kind < 2:
        return rng.choice(LEAVES)
    if kind < 2.2:
        levels = rng.randrange(20, 300)
        return json.loads("[" * levels + "]" * levels)
    children = [any_value(rng, depth + 1) for _ in range(rng.randrange(4))]
    return children if kind < 3 else {rng.choice(KEYS): child for child in children}


def random_post(rng):
    """Return the path and the body of a request, made of valid ones: with other values, other or unknown fields."""
    target, body, path = rng.choice(PLACES)
    kind, _ = BODIES[target]
    for _ in range(rng.choice([0, 1, 1, 1, 1, 2, 3])):
        change = rng.choice(["like", "like", "like", "other", "field"])
        if change == "field" and isinstance(body, dict):
            body = {**body, rng.choice([*kind.model_fields, *kind.ignored, *KEYS]): any_value(rng)}
        else:
            body = replaced(body, path, value_like(rng, part_at(body, path)) if change == "like" else any_value(rng))
        path = rng.choice(parts_of(body))
    if isinstance(body, dict):
        names = [name for name in OPTIONS if name in kind.model_fields and name not in body]
        body |= {name: OPTIONS[name] for name in rng.sample(names, min(len(names), rng.randrange(4)))}
    content = json.dumps(body).encode()
    if rng.randrange(20) == 0:  # no JSON, or other JSON
        at = rng.randrange(len(content))
        content = content[:at] + rng.choice([b"", b"\xff", b'"', b"}", b"\x00", b"[" * 1000]) + content[at + 1 :]
    return target, content


def random_request(rng):
    headers = {"Host": "localhost"}
    if rng.randrange(5):
        method, (target, body) = "POST", random_post(rng)
    else:
        method, target, body = rng.choice(METHODS), rng.choice([*PATHS, *BODIES]), b""
    headers["Content-Length"] = str(len(body))
    if rng.randrange(5) == 0:
        headers |= {name: rng.choice(HEADERS[name]) for name in rng.sample(sorted(HEADERS), rng.randrange(4))}
    return Request(method, target, headers, body)


def send(url, request):
    """Return status, type and body of the response, or None where the connection ended without one.

    The client says that it sends no more, so that a body that is too short ends.
    """
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=LIMIT_S) as connection:
        connection.sendall(request.to_bytes())
        if not request.is_framed:
            connection.shutdown(socket.SHUT_WR)
        response = HTTPResponse(connection, method=request.method)
        try:
            response.begin()
            return response.status, response.headers.get_content_type(), response.read()
        except ConnectionError:  # it closed before it had read the body
            return None


def check(request, reply):
    """Check a response: its status, that an error has its shape, and that a stream has its end."""
    if reply is None:
        assert not request.is_framed
        return
    status, kind, body = reply
    assert not 300 <= status < 400, reply
    assert status < 500 or (status == 503 and request.target == "/v1/embeddings"), reply
    if status >= 400 and kind == "application/json" and request.method != "HEAD":
        assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}
        assert len(body) < 2000
    if kind == "text/event-stream":
        *_, last = body.decode().strip().split("\n\n")
        data = last.rpartition("data: ")[2]
        is_end = data == "[DONE]" or json.loads(data).get("type") in ("response.completed", "response.incomplete")
        assert is_end or '"error"' in data or "event: error" in last, last


@pytest.fixture(scope="module")
def fuzzed(start, service, tmp_path_factory):
    """Run a server with tools, sessions and rescue, whose answers are short."""
    template = "{% for tool in tools or [] %}<tool_call>{{ tool.function.name }}{% endfor %}{# tool_call.name #}"
    model = copy_model(tmp_path_factory.mktemp("models") / "tools", template=lambda old: template + old)
    flags = ("--dtype", "float32", "--max-tokens", "2", "--rescue", service.url)
    return start(*flags, model=model)


# The second takes a minute.
@pytest.mark.parametrize(("count", "seed"), [(60, 1), pytest.param(1500, None, marks=pytest.mark.full)])
def test_random_requests(fuzzed, count, seed):
    seed = secrets.randbits(32) if seed is None else seed
    rng = random.Random(seed)
    for number in range(count):
        request = random_request(rng)
        try:
            check(request, send(fuzzed.url, request))
        except Exception as error:
            raise AssertionError(f"request {number} of seed {seed}: {request}") from error
    assert "Traceback" not in fuzzed.log()
    assert fuzzed.http.get("/health").status_code == 200
