"""Ollama's API with its own client: chats, streams, tools, thinking, options, formats, models and errors."""

import base64
import json

import httpx
import ollama
import pytest

from mlx_tq.prompt_cache.memory import weights_nbytes

from .conftest import QUESTION
from .test_messages import CALL, TOOL, tokenizer  # noqa: F401 - a fixture
from .test_tool_calls import scripted  # noqa: F401 - a fixture

ASKED = {"model": "needle32:latest", "messages": [{"role": "user", "content": QUESTION}]}
RAW = {"prompt": "hi", "raw": True}
NO_TOOLS = "the chat template of needle32 does not show tools to the model"
IMAGE = base64.b64encode(b"picture").decode()


@pytest.fixture(scope="module")
def client(server):
    with ollama.Client(server.url, timeout=120) as connected:
        yield connected


@pytest.fixture
def scripted_client(scripted):  # noqa: F811
    """Return a client of the server whose model generates given texts, which runs in this process."""

    def forward(request):
        response = scripted.client.request(request.method, str(request.url), content=request.content)
        return httpx.Response(response.status_code, content=response.content)

    return ollama.Client("http://localhost", transport=httpx.MockTransport(forward))


def test_a_chat_and_its_stream(client):
    answer = client.chat(**ASKED)
    assert (answer.message.role, answer.message.content) == ("assistant", "417295")
    assert (answer.model, answer.done, answer.done_reason, answer.eval_count) == ("needle32:latest", True, "stop", 7)
    assert answer.total_duration > answer.eval_duration > 0
    *parts, last = client.chat(**ASKED, stream=True)
    assert "".join(part.message.content for part in parts) == "417295"
    assert len(parts) > 3
    assert not any(part.done for part in parts)
    assert (last.done, last.done_reason, last.message.content) == (True, "stop", "")
    assert (last.eval_count, last.prompt_eval_count) == (answer.eval_count, answer.prompt_eval_count)


def test_a_stream_is_the_default_and_has_a_line_for_each_part(server):
    response = server.post("/api/chat", **ASKED, keep_alive="5m")
    assert response.headers["content-type"] == "application/x-ndjson"
    assert "X-Ignored" not in response.headers
    lines = [json.loads(line) for line in response.text.splitlines()]
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]


def test_options(client):
    def content(**options):
        return client.chat(**ASKED, options={"num_predict": 12, **options}).message.content

    cut = client.chat(**ASKED, options={"num_predict": 3})
    assert (cut.message.content, cut.done_reason) == ("417", "length")
    assert content(stop=["95"]) == "4172"
    assert content(stop="", num_predict=-1, seed=-1, num_ctx=8192, repeat_last_n=-1, top_k=0) == "417295"
    assert content(repeat_penalty=10.0, repeat_last_n=0) == "417295"
    assert content(repeat_penalty=10.0, repeat_last_n=-1) != "417295"
    drawn = [content(temperature=5.0, seed=seed) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_formats(client):
    schema = {"type": "object", "properties": {"code": {"type": "string", "maxLength": 6}}, "required": ["code"]}
    schema["additionalProperties"] = False
    answer = client.chat(**ASKED, format=schema, options={"num_predict": 60})
    assert set(json.loads(answer.message.content)) == {"code"}
    assert client.chat(**ASKED, format="json", options={"num_predict": 8}).message.content.startswith("{")
    assert client.chat(**ASKED, format="").message.content == "417295"
    with pytest.raises(ollama.ResponseError, match=r"^format: Input should be 'json' or a JSON schema"):
        client._request(dict, "POST", "/api/chat", json={**ASKED, "format": "xml"})


def test_prompts(client):
    answer = client.generate("needle32", QUESTION)
    assert (answer.response, answer.done_reason) == ("417295", "stop")
    assert "".join(part.response for part in client.generate("needle32", QUESTION, stream=True)) == "417295"
    with_system = client.generate("needle32", QUESTION, system="Be brief.", options={"num_predict": 1})
    assert with_system.prompt_eval_count > answer.prompt_eval_count
    raw = client.generate("needle32", "The sky is", raw=True, options={"num_predict": 4})
    assert (raw.eval_count, raw.prompt_eval_count < 8) == (4, True)


def test_a_request_without_messages_loads_the_model(client):
    assert client.chat("needle32").done_reason == "load"
    assert client.generate("needle32").done_reason == "load"
    assert [part.done_reason for part in client.chat("needle32", stream=True)] == ["load"]


@pytest.mark.parametrize("stream", [pytest.param(False, marks=pytest.mark.full), True])
def test_thinking_and_calls(scripted, scripted_client, stream):  # noqa: F811
    """The next turn returns them; an argument is an object, not a text."""
    scripted.script(f"Hm.</think>So.{CALL}")
    asked = {**ASKED, "tools": [TOOL], "think": True}
    answers = scripted_client.chat(**asked, stream=stream)
    parts = [part.message for part in answers] if stream else [answers.message]
    assert "".join(part.thinking or "" for part in parts) == "Hm."
    assert "".join(part.content for part in parts) == "So."
    (call,) = [call for part in parts for call in part.tool_calls or []]
    assert (call.function.name, call.function.arguments) == ("add", {"a": 2})
    turn = {"role": "assistant", "content": "So.", "thinking": "Hm.", "tool_calls": [call.model_dump()]}
    result = {"role": "tool", "content": "4", "tool_name": "add"}
    scripted.script("</think>It is 4.")
    last = scripted_client.chat(**{**asked, "messages": [*ASKED["messages"], turn, result]})
    assert last.message.content == "It is 4."


def test_thinking_switches_the_template(scripted_client):
    """The template of the fixture opens the reasoning where it is enabled, which takes more tokens."""
    counts = {
        think: scripted_client.chat(**ASKED, think=think, options={"num_predict": 1}).prompt_eval_count
        for think in (False, True, "low")
    }
    assert counts[False] == counts["low"] < counts[True]


def test_models(client, scripted_client, loaded):
    (model,) = client.list().models
    assert (model.model, model.size, len(model.digest)) == ("needle32", weights_nbytes(loaded[0]), 64)
    (running,) = client.ps().models
    assert (running.model, running.size_vram) == ("needle32", model.size)
    shown = client.show("needle32")
    assert shown.modelinfo["mlx.context_length"] == 4096
    assert shown.capabilities == ["completion"]
    assert scripted_client.show("any").capabilities == ["completion", "tools", "thinking"]
    version = client._request_raw("GET", "/api/version").json()["version"]
    assert [int(part) for part in version.split(".")] >= [0, 6, 4]


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        (
            "/api/chat",
            {"messages": [{"role": "user", "content": "hi", "images": [IMAGE]}]},
            "messages.0.images: the mod",
        ),
        ("/api/generate", {"prompt": "hi", "images": [IMAGE]}, "images: the models of this server read text only; rem"),
        ("/api/chat", {"messages": [{"role": "king", "content": "hi"}]}, "messages.0.role: Input should be "),
        ("/api/chat", {**ASKED, "options": {"temperature": -1}}, "options.temperature: Input should be greater than"),
        ("/api/chat", {"messages": [{"role": "user", "content": "a b c " * 2000}]}, "This model's maximum context len"),
        ("/api/chat", {"model": ""}, "model: String should have at least 1"),
        ("/api/none", {}, "unknown route"),
        ("/api/chat", {**ASKED, "tools": [TOOL]}, f"{NO_TOOLS}. Remove tools, or start the server"),
        ("/api/generate", {**RAW, "options": {"stop": "a" * 257}}, "stop: String should have at most 256"),
        ("/api/generate", {**RAW, "format": "json"}, "format: not supported with raw; leave"),
        ("/api/generate", {**RAW, "think": True}, "think: not supported with raw; leave"),
        ("/api/generate", {**RAW, "system": "Hi."}, "system: not supported with raw; leave"),
        ("/api/generate", {**RAW, "logprobs": True}, "logprobs: not supported with raw; leave"),
    ],
)
def test_errors_are_one_text(server, path, body, message):
    response = server.post(path, **{"model": "needle32", **body})
    assert response.status_code in (400, 404)
    assert list(response.json()) == ["error"]
    assert response.json()["error"].startswith(message)
