"""Anthropic's Messages API, with its own client: answers, streams, thinking, tools, errors, and what prompts become."""

import json
import re

import anthropic
import httpx2
import pytest
from starlette.testclient import TestClient

from mlx_tq.server import messages_answer
from mlx_tq.server.app import Api
from mlx_tq.server.guard import Guard
from mlx_tq.server.messages_schemas import MessagesRequest
from mlx_tq.server.model_pool import ModelPool, PooledModel
from mlx_tq.server.prompt_builder import PromptBuilder
from mlx_tq.server.schemas import parse, without_none

from .conftest import QUESTION
from .test_broken_answers import serving
from .test_messages import CALL, PARAMETERS, tokenizer  # noqa: F401 - a fixture
from .test_tool_calls import scripted  # noqa: F401 - a fixture

KEY = "correct-horse-battery"
MODEL = "claude-opus-5-5"
TOOL = {"name": "add", "description": "Adds.", "input_schema": PARAMETERS}
ASKED = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 32, "model": MODEL}


def connect(url, **options):
    return anthropic.Anthropic(base_url=url, max_retries=0, timeout=120, **{"api_key": "none", **options})


@pytest.fixture(scope="module")
def client(server):
    with connect(server.url) as connected:
        yield connected


@pytest.fixture(scope="module")
def locked(start):
    """Run a server with an API key and short prefill steps."""
    return start(steps=("--prefill-step-size", 64), key=KEY)


@pytest.fixture
def scripted_client(scripted):  # noqa: F811
    """Return a client of the server whose model generates given texts, which runs in this process."""

    def forward(request):
        response = scripted.client.request(
            request.method, str(request.url), content=request.content, headers=dict(request.headers)
        )
        return httpx2.Response(response.status_code, content=response.content, headers=dict(response.headers))

    transport = anthropic.DefaultHttpxClient(transport=httpx2.MockTransport(forward))
    with connect("http://localhost", http_client=transport) as connected:
        yield connected


def chat_messages(**body):
    """Return the messages of the chat that a body becomes."""
    request = parse(MessagesRequest, json.dumps({"messages": [{"role": "user", "content": "hi"}], **body}).encode())
    return [without_none(message) for message in request.to_chat().messages]


def content_of(message):
    """Return the blocks of a message, without the ids of calls, which are random."""
    return [block.to_dict() | ({"id": ""} if block.type == "tool_use" else {}) for block in message.content]


def test_an_answer(client):
    answer = client.messages.create(**ASKED)
    (block,) = answer.content
    assert (block.type, block.text, answer.role, answer.type) == ("text", "417295", "assistant", "message")
    assert (answer.stop_reason, answer.stop_sequence, answer.model, answer.id[:4]) == (
        "end_turn", None, "needle32", "msg_",
    )  # fmt: skip
    usage = answer.usage
    assert (usage.output_tokens, usage.cache_creation_input_tokens) == (7, 0)
    cut = client.messages.create(**{**ASKED, "max_tokens": 3})
    assert (cut.content[0].text, cut.stop_reason) == ("417", "max_tokens")
    stopped = client.messages.create(**ASKED, stop_sequences=["5x", "72", "no"])
    assert (stopped.content[0].text, stopped.stop_reason, stopped.stop_sequence) == ("41", "stop_sequence", "72")
    beta = client.beta.messages.create(**ASKED, betas=["context-1m-2025-08-07"], metadata={"user_id": "a"})
    assert beta.content[0].text == "417295"


def test_a_stream_equals_the_answer(client):
    whole = client.messages.create(**ASKED, stop_sequences=["95"])
    with client.messages.stream(**ASKED, stop_sequences=["95"]) as stream:
        kinds = [event.type for event in stream if event.type != "text"]
        final = stream.get_final_message()
    delta = ["content_block_delta"] * 4
    assert kinds == [
        "message_start", "content_block_start", *delta, "content_block_stop", "message_delta", "message_stop"
    ]  # fmt: skip
    assert content_of(final) == content_of(whole) == [{"type": "text", "text": "4172"}]
    assert (final.stop_reason, final.stop_sequence) == (whole.stop_reason, whole.stop_sequence)
    assert final.usage.output_tokens == whole.usage.output_tokens
    assert (
        final.usage.input_tokens + final.usage.cache_read_input_tokens
        == client.messages.count_tokens(model=MODEL, messages=ASKED["messages"]).input_tokens
    )


def test_counted_tokens_are_those_of_the_prompt(client):
    body = {"model": MODEL, "system": "Be brief.", "messages": ASKED["messages"]}
    usage = client.messages.create(**body, max_tokens=1).usage
    counted = client.messages.count_tokens(**body).input_tokens
    assert counted == usage.input_tokens + usage.cache_read_input_tokens
    billed = f"x-anthropic-billing-header: cc_version=2.1.{counted}; cc_entrypoint=cli;"
    blocks = [{"type": "text", "text": text} for text in (billed, "Be brief.")]
    assert client.messages.count_tokens(**{**body, "system": blocks}).input_tokens == counted


def test_usage_is_scaled_to_the_context_that_a_client_assumes(loaded, server):
    """The server's is 4,096 tokens; other APIs report what there is."""
    path, count = "/v1/messages", "/v1/messages/count_tokens"
    plain, counted = (server.post(at, **ASKED).json() for at in (path, count))
    with serving(loaded, "--scale-usage", "40960") as (_, http):
        scaled, scaled_count = (http.post(at, json=ASKED).json() for at in (path, count))
        chat = http.post("/v1/chat/completions", json={"messages": ASKED["messages"]}).json()
        again = http.post(path, json=ASKED).json()["usage"]
    tokens = counted["input_tokens"]
    assert scaled_count["input_tokens"] == 10 * tokens
    for usage in (scaled["usage"], again):
        assert usage["input_tokens"] + usage["cache_read_input_tokens"] == 10 * tokens
    assert again["cache_read_input_tokens"] > tokens
    assert scaled["usage"]["output_tokens"] == plain["usage"]["output_tokens"]
    assert chat["usage"]["prompt_tokens"] == tokens


def test_a_second_turn_reuses_the_cache(client):
    system = [{"type": "text", "text": "Answer in one word. " * 20, "cache_control": {"type": "ephemeral"}}]
    first = client.messages.create(**ASKED, system=system)
    conversation = [
        *ASKED["messages"],
        {"role": "assistant", "content": [block.to_dict() for block in first.content]},
        {"role": "user", "content": "And once more?"},
    ]
    second = client.messages.create(**{**ASKED, "messages": conversation}, system=system).usage
    assert second.cache_read_input_tokens >= first.usage.input_tokens + first.usage.cache_read_input_tokens - 8
    assert 0 < second.input_tokens < 40


@pytest.mark.parametrize("stream", [pytest.param(False, marks=pytest.mark.full), True])
def test_thinking_text_and_calls_are_blocks(scripted, scripted_client, stream):  # noqa: F811
    """Space between them is no block, and the next turn returns all of them. The prompt opens the thinking."""
    scripted.script(f"Hm.</think>\n\nSo.{CALL}\n")
    body = {**ASKED, "max_tokens": 400, "tools": [TOOL], "thinking": {"type": "adaptive"}}
    if stream:
        with scripted_client.messages.stream(**body) as events:
            kinds = [event.delta.type for event in events if event.type == "content_block_delta"]
            answer = events.get_final_message()
        assert list(dict.fromkeys(kinds)) == ["thinking_delta", "signature_delta", "text_delta", "input_json_delta"]
    else:
        answer = scripted_client.messages.create(**body)
    assert content_of(answer) == [
        {"type": "thinking", "thinking": "Hm.", "signature": "mlx_tq"},
        {"type": "text", "text": "\n\nSo."},
        {"type": "tool_use", "id": "", "name": "add", "input": {"a": 2}},
    ]
    assert answer.stop_reason == "tool_use"
    result = {"type": "tool_result", "tool_use_id": answer.content[2].id, "content": [{"type": "text", "text": "4"}]}
    turn = [{"role": "assistant", "content": answer.to_dict()["content"]}, {"role": "user", "content": [result]}]
    scripted.script("</think>It is 4.")
    last = scripted_client.messages.create(**{**body, "messages": [*ASKED["messages"], *turn]})
    assert (content_of(last), last.stop_reason) == ([{"type": "text", "text": "It is 4."}], "end_turn")


def test_a_long_call_pings(scripted, scripted_client, monkeypatch):  # noqa: F811
    """The prefill pings as well."""
    pings = []
    for seconds in (60, 0):
        monkeypatch.setattr(messages_answer, "_PING_S", seconds)
        scripted.script(CALL[:30])
        with scripted_client.messages.with_streaming_response.create(**ASKED, tools=[TOOL], stream=True) as response:
            pings.append(response.read().decode().count("event: ping\n"))
    assert pings[0] < 3 < 10 < pings[1]


def test_thinking_switches_the_template(scripted_client, scripted):  # noqa: F811
    """The template of the fixture opens the reasoning where it is enabled, which takes more tokens."""
    count = {
        kind: scripted_client.messages.count_tokens(
            model=MODEL, messages=ASKED["messages"], thinking={"type": kind, **budget}
        ).input_tokens
        for kind, budget in (("disabled", {}), ("enabled", {"budget_tokens": 1024}), ("adaptive", {}))
    }
    assert count["disabled"] < count["enabled"] == count["adaptive"]


def test_prefill_pings_take_the_place_of_comments(locked):
    """The progress of chats is in comments, which the timeouts of Anthropic's clients do not see."""
    texts = {}
    for path in ("/v1/chat/completions", "/v1/messages"):
        prompt = f"{path[4:6]} {'one two three ' * 150}"
        body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": 2, "stream": True}
        texts[path] = locked.post(path, **body).text
    comments = texts["/v1/chat/completions"].count(": prefill ")
    assert texts["/v1/messages"].count('event: ping\ndata: {"type": "ping"}\n\n') == comments > 3
    assert ": prefill" not in texts["/v1/messages"]


def test_keys(locked):
    """The client sends its keys as bearers; earlier versions of it, and Claude Code, send `api_key` as x-api-key."""
    for credentials in ({"api_key": KEY}, {"api_key": None, "auth_token": KEY}):
        with connect(locked.url, **credentials) as client:
            assert client.messages.count_tokens(model=MODEL, messages=ASKED["messages"]).input_tokens
    with connect(locked.url, api_key=f"{KEY}x") as client, pytest.raises(anthropic.AuthenticationError) as raised:
        client.messages.create(**ASKED)
    assert raised.value.body["error"]["type"] == "authentication_error"
    for key, status in ((KEY, 200), (f"{KEY}x", 401), ("", 401)):
        headers = {"Authorization": "", "x-api-key": key}
        response = locked.http.post("/v1/messages/count_tokens", json=ASKED, headers=headers)
        assert response.status_code == status


def says(content):
    return {"messages": [{"role": "user", "content": content}]}


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
RESULT = {"type": "tool_result", "tool_use_id": "a", "content": [IMAGE]}
REFUSED = {  # part of a body, and of the message
    "image": (says([IMAGE]), "messages.0.content.0.type: image blocks are not supported, because the model reads only"),
    "image in a result": (says([RESULT]), "messages.0.content.0.content.0.type: image blocks are not supported"),
    "block": (says([{"type": "a"}]), "messages.0.content.0: its type should be one of 'text', "),
    "no block": (says([]), "messages.0.content: List should have at least 1 item"),
    "no text": ({"messages": [{"role": "system", "content": ""}]}, "the messages have no text"),
    "no tools": ({"tool_choice": {"type": "any"}}, "tool_choice: needs tools in the request"),
    "schema": ({"tools": [{"name": "add"}]}, "tools.0.input_schema: Field required"),
    "thinking": ({"thinking": {"type": "on"}}, "thinking.type: Input should be 'enabled', 'adaptive' or 'disabled'"),
    "too long": (says("a b c " * 2000), r"prompt is too long: \d{4,5} tokens > 4095 maximum$"),
    "far too long": (says("a" * 500_000), r"prompt is too long: \d{5} tokens > 4095 maximum$"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(client, name):
    part, message = REFUSED[name]
    with pytest.raises(anthropic.BadRequestError) as raised:
        client.messages.create(**{**ASKED, **part})
    body = raised.value.body
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    assert set(body["error"]) == {"type", "message"}
    assert re.match(message, body["error"]["message"])


def test_an_error_in_a_stream(scripted, scripted_client, monkeypatch):  # noqa: F811
    def fail(self, **options):
        raise RuntimeError("a secret")

    monkeypatch.setattr(messages_answer.MessagesAnswer, "end_events", fail)
    scripted.script("It")
    with pytest.raises(anthropic.APIError, match="internal error") as raised:
        list(scripted_client.messages.create(**ASKED, stream=True))
    assert raised.value.body == {
        "type": "error",
        "error": {"type": "api_error", "message": "internal error; see the server's log"},
    }


def test_unknown_models_and_routes(server):
    """Any name will do where one model is served; where two are, a name has to be one of theirs."""
    api = Api(ModelPool([PooledModel(name, lambda: None) for name in "ab"]), Guard(None, [], 10**6, 8))
    response = TestClient(api.app([], lambda: None), "http://localhost").post("/v1/messages", json=ASKED)
    error = {"type": "not_found_error", "message": f"the model '{MODEL}' is not served; this server has a, b"}
    assert (response.status_code, response.json()) == (404, {"type": "error", "error": error})
    wrong_method = server.http.get("/v1/messages")
    assert (wrong_method.status_code, wrong_method.json()["error"]["type"]) == (405, "invalid_request_error")


def test_system_texts_are_joined():
    billed = [{"type": "text", "text": "x-anthropic-billing-header: cc_version=2;"}, {"type": "text", "text": "A"}]
    messages = [
        {"role": "system", "content": "B"},
        {"role": "user", "content": "hi"},
        {"role": "system", "content": [{"type": "text", "text": "C"}]},
    ]
    assert chat_messages(system=billed, messages=messages) == [
        {"role": "system", "content": "A\n\nB"},
        {"role": "user", "content": "hi"},
        {"role": "system", "content": "C"},
    ]


def test_counters_of_tokens_are_stripped():
    counter = "<total_tokens>1200 tokens left</total_tokens>"
    result = {"type": "tool_result", "tool_use_id": "a", "content": f"4\n{counter}", "is_error": True}
    blocks = [result, {"type": "text", "text": f"hi\n{counter}\n"}, {"type": "text", "text": counter}]
    assert chat_messages(messages=[{"role": "user", "content": [*blocks, {"type": "text", "text": "you"}]}]) == [
        {"role": "tool", "tool_call_id": "a", "content": "Error: 4"},
        {"role": "user", "content": "hi\nyou"},
    ]
    padded = "hi" + 10**6 * " " + "you"  # in linear time
    assert chat_messages(messages=[{"role": "user", "content": padded}]) == [{"role": "user", "content": padded}]
    inside = f"{counter} is a counter"
    assert chat_messages(messages=[{"role": "user", "content": inside}]) == [{"role": "user", "content": inside}]


def test_messages_of_one_role_in_a_row_are_one():
    call = {"type": "tool_use", "id": "a", "name": "add", "input": {"a": 2}}
    thinking = {"type": "thinking", "thinking": "Hm.", "signature": "s"}
    redacted = {"type": "redacted_thinking", "data": "x"}
    text = {"type": "text", "text": "So", "citations": None}
    messages = [
        {"role": "user", "content": "one"},
        {"role": "user", "content": "two"},
        {"role": "assistant", "content": [thinking, redacted, text]},
        {"role": "assistant", "content": [{**text, "text": "."}, call]},
    ]
    user, assistant = chat_messages(messages=messages)
    assert user["content"] == "one\ntwo"
    assert (assistant["content"], assistant["reasoning"]) == ("So.", "Hm.")
    assert assistant["tool_calls"][0].function.arguments == {"a": 2}


def test_thoughts_reach_the_template(tokenizer, monkeypatch):  # noqa: F811
    template = "{% for m in messages %}{{ m['reasoning_content'] }}|{{ m['content'] }};{% endfor %}"
    monkeypatch.setattr(tokenizer._tokenizer, "chat_template", template)
    blocks = [{"type": "thinking", "thinking": "Hm.", "signature": ""}, {"type": "text", "text": "So."}]
    messages = [*ASKED["messages"], {"role": "assistant", "content": blocks}, {"role": "user", "content": "Why?"}]
    request = parse(MessagesRequest, json.dumps({"messages": messages}).encode())
    assert "Hm.|So.;" in tokenizer.decode(PromptBuilder(tokenizer, {}).chat_prompt(request.to_chat()).ids)


def test_tools_of_anthropics_servers_are_left_out():
    tools = [{"type": "web_search_20250305", "name": "web_search", "max_uses": 5}, {"type": "custom", **TOOL}]
    request = parse(MessagesRequest, json.dumps({"messages": ASKED["messages"], "tools": tools}).encode())
    function = {"name": "add", "description": "Adds.", "parameters": PARAMETERS}
    assert request.to_chat().callable_tools == [{"type": "function", "function": function}]
    choice = {"tool_choice": {"type": "none"}, "tools": [TOOL], "messages": ASKED["messages"]}
    assert parse(MessagesRequest, json.dumps(choice).encode()).to_chat().callable_tools == []
