"""Fields of other servers: those with a meaning are followed, others are named and change nothing."""

import json
import re

import pytest

from mlx_tq.server.api_errors import InvalidRequestError
from mlx_tq.server.prompt_builder import PromptBuilder
from mlx_tq.server.schemas import ChatRequest, ResponseRequest, parse

from .test_messages import tokenizer  # noqa: F401 - a fixture

HI = {"messages": [{"role": "user", "content": "hi"}]}
KEYS = {f"key{n}": 1 for n in range(50_000)}
THOUGHTFUL = "{{ messages[0].content }}{{ reasoning_effort }}{% if enable_thinking is false %}no{% endif %}"
PICKY = THOUGHTFUL + "{% if reasoning_effort == 'xhigh' %}{{ raise_exception('unknown effort') }}{% endif %}"
FORMAT = {"type": "json_schema", "json_schema": {"schema": {"type": "integer"}}}


def read(kind=ChatRequest, ignored=None, **body):
    return parse(kind, json.dumps(body).encode(), set() if ignored is None else ignored)


def test_unknown_fields_are_named_once_in_the_log_and_in_each_response(server):
    body = {**HI, "max_tokens": 3, "temprature": 1, "cache_control": {}, "stream_options": {"fast": 1}, "stream": True}
    plain = server.post(**HI, max_tokens=3)
    assert "X-Ignored" not in plain.headers
    for _ in range(2):
        response = server.post(**body)
        assert response.status_code == 200
        assert response.headers["X-Ignored"] == "cache_control, fast, temprature"
    assert server.log().count("temprature") == 1
    part = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}
    response = server.post(messages=[{"role": "user", "content": [part]}], max_tokens=3)
    assert response.headers["X-Ignored"] == "cache_control"
    assert response.json()["choices"] == plain.json()["choices"]


def test_many_and_long_names_stay_out_of_headers_and_log(server):
    response = server.post(**HI, **KEYS, **{"k" * 500_000: 1, "a\r\nb": 1}, max_tokens=1)
    assert response.status_code == 200
    assert len(response.headers["X-Ignored"]) < 2000
    assert len(server.log()) < 10**6


def test_strict_requests(start):
    server = start("--strict-requests")
    response = server.post(**HI, temprature=1)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "temprature")
    assert server.post(**HI, max_tokens=-1).status_code == 400
    assert server.post(**HI, max_tokens=1, reasoning_effort="low").status_code == 200


def test_reasoning_effort_has_its_effect_also_where_other_fields_are_refused():
    body = json.dumps({**HI, "reasoning_effort": "none"}).encode()
    assert parse(ChatRequest, body, None).chat_template_kwargs == {"enable_thinking": False}


def test_the_log_says_which_field_was_refused(server):
    assert server.post(**HI, tool_choice="must").status_code == 400
    assert re.search(
        r"POST /v1/chat/completions 400 \d+ ms, invalid_value \(tool_choice\)$", server.log(), re.MULTILINE
    )


@pytest.mark.parametrize(
    ("fields", "name", "value"),
    [
        ({"max_tokens": -1}, "max_tokens", None),
        ({"max_completion_tokens": -1}, "max_completion_tokens", None),
        ({"seed": -1}, "seed", None),
        ({"top_k": -1}, "top_k", None),
        ({"stop": ""}, "stop", None),
        ({"n_predict": 7}, "max_tokens", 7),
        ({"n_predict": 7, "max_tokens": 5}, "max_tokens", 5),
        ({"repeat_penalty": 1.5}, "repetition_penalty", 1.5),
        ({"enable_thinking": False}, "chat_template_kwargs", {"enable_thinking": False}),
        ({"thinking": {"type": "disabled"}}, "chat_template_kwargs", {"enable_thinking": False}),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, "chat_template_kwargs", {"enable_thinking": True}),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, "thinking_budget", 9),
        ({"reasoning": {"max_tokens": 9}}, "thinking_budget", 9),
        ({"reasoning": {"enabled": False}}, "chat_template_kwargs", {"enable_thinking": False}),
        ({"reasoning": {"effort": "none"}}, "chat_template_kwargs", {"enable_thinking": False}),
        ({"reasoning": {"effort": "high"}}, "chat_template_kwargs", {"reasoning_effort": "high"}),
        ({"reasoning_effort": "low"}, "chat_template_kwargs", {"reasoning_effort": "low"}),
        (
            {"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}},
            "chat_template_kwargs",
            {"enable_thinking": False},
        ),
    ],
)
def test_fields_with_a_meaning(fields, name, value):
    ignored = set()
    assert getattr(read(**HI, **fields, ignored=ignored), name) == value
    assert not ignored


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"structured_outputs": {"choice": ["a"]}}, "structured_outputs.choice: unsupported"),
        ({"structured_outputs": []}, None),
        ({"structured_outputs": 3}, "should be an object"),
        ({"guided_json": "{"}, "EOF"),
        ({"guided_json": 3}, "should be a JSON schema"),
        ({"guided_json": None, "structured_outputs": None, "n_predict": None, "thinking": 3, "reasoning": []}, None),
        ({"enable_thinking": "false"}, None),
    ],
)
def test_odd_values_are_errors_or_nothing(fields, words):
    if words is None:
        request = read(**HI, **fields)
        assert (request.response_format, request.chat_template_kwargs, request.max_tokens) == (None, None, None)
    else:
        with pytest.raises(InvalidRequestError, match=words):
            read(**HI, **fields)


@pytest.mark.parametrize("budget", [2**31, True, "9", -1])
def test_odd_budgets_of_responses(budget):
    request = read(ResponseRequest, input="hi", reasoning={"max_tokens": budget}).to_chat()
    assert request.thinking_budget == {2**31: 2**31 - 1, -1: 1}.get(budget)


@pytest.mark.parametrize(
    "fields", [{"guided_json": {"type": "integer"}}, {"structured_outputs": {"json": {"type": "integer"}}}]
)
def test_schemas_of_vllm(fields):
    assert read(**HI, **fields).response_format == read(**HI, response_format=FORMAT).response_format


def test_reasoning_of_responses():
    request = read(ResponseRequest, input="hi", reasoning={"effort": "none", "summary": "auto"}).to_chat()
    assert request.chat_template_kwargs == {"enable_thinking": False}


@pytest.mark.parametrize("field", ["functions", "grammar", "adapters", "web_search_options", "min_tokens"])
def test_fields_that_would_change_the_answer_are_refused(field):
    with pytest.raises(InvalidRequestError, match=f"^{field}: unsupported parameter"):
        read(**HI, **{field: {"a": 1}})
    assert read(**HI, **{field: None})


@pytest.mark.parametrize(
    ("template", "fields", "text"),
    [
        (THOUGHTFUL, {"reasoning_effort": "none"}, "hino"),
        (THOUGHTFUL, {"reasoning_effort": "xhigh"}, "hixhigh"),
        (PICKY, {"reasoning_effort": "xhigh"}, "hi"),
        (PICKY, {"reasoning_effort": "low"}, "hilow"),
    ],
)
def test_reasoning_reaches_the_template_unless_that_refuses_it(tokenizer, monkeypatch, template, fields, text):  # noqa: F811
    monkeypatch.setattr(tokenizer._tokenizer, "chat_template", template)
    prompt = PromptBuilder(tokenizer, {}).chat_prompt(read(**HI, **fields))
    assert tokenizer.decode(prompt.ids) == text


@pytest.mark.parametrize("arguments", ["{", "[" * 100_000, "9" * 5000, '{"a": 1', "not JSON"])
def test_a_call_that_is_no_json_does_not_end_a_conversation(server, arguments):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    talk = [*HI["messages"], {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "no"}]
    answer = server.post(messages=[*talk, *HI["messages"]], max_tokens=1)
    is_long = len(arguments) > 1000  # which the prompt shows, as the embedded model's template has no calls
    assert answer.status_code == (400 if is_long else 200)
    assert not is_long or answer.json()["error"]["code"] == "context_length_exceeded"
