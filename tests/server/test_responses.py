"""/v1/responses with the openai client: the same answers as a chat's, as items and events."""

import json

import numpy as np
import openai
import pytest
from openai.types.responses import CompactedResponse, ResponseStreamEvent
from pydantic import TypeAdapter

from mlx_tq.prompt_cache.archive import ArchivedBlock
from mlx_tq.prompt_cache.recall import BlockScore
from mlx_tq.server.answers import Choice, ResponseAnswer
from mlx_tq.server.api_errors import InvalidRequestError
from mlx_tq.server.job import Piece
from mlx_tq.server.schemas import ResponseRequest, parse, use_response_names
from mlx_tq.session.restore import RecallResult

from .conftest import QUESTION
from .test_messages import CALL, TOOL, tokenizer  # noqa: F401 - a fixture
from .test_response_formats import CODE
from .test_tool_calls import events_of, scripted  # noqa: F401 - a fixture

FUNCTION = {"type": "function", **TOOL["function"]}


@pytest.fixture
def create(server):
    return lambda **body: server.openai.responses.create(**{"model": "default_model", "input": QUESTION, **body})


def test_a_response(create):
    response = create(instructions="Be brief.", metadata={"a": "b"}, store=True, reasoning={"effort": "low"})
    assert (response.output_text, response.status, response.object) == ("417295", "completed", "response")
    (message,) = response.output
    assert (message.role, message.status, message.content[0].annotations) == ("assistant", "completed", [])
    usage = response.usage
    assert (usage.output_tokens, usage.total_tokens) == (7, usage.input_tokens + 7)
    assert (response.metadata, response.instructions) == ({"a": "b"}, "Be brief.")
    cut = create(max_output_tokens=3)
    assert (cut.output_text, cut.status, cut.incomplete_details.reason) == ("417", "incomplete", "max_output_tokens")
    logprobs = create(include=["message.output_text.logprobs"], top_logprobs=2).output[0].content[0].logprobs
    assert [len(entry.top_logprobs) for entry in logprobs] == [2] * 7
    schema = {"type": "json_schema", "name": "code", "schema": CODE, "strict": True}
    assert set(json.loads(create(text={"format": schema}, max_output_tokens=60).output_text)) == {"code"}


def test_a_conversation_of_items_equals_one_of_messages(create, server):
    """Clients send back the items that they received."""
    first = create()
    items = [{"role": "user", "content": QUESTION}, *(item.to_dict() for item in first.output)]
    parts = [{"type": "input_text", "text": "And once more?"}]
    reasoning = {"type": "reasoning", "id": "rs_1", "summary": []}
    again = create(input=[*items, reasoning, {"role": "user", "content": parts}])
    same = server.chat(QUESTION, {"role": "assistant", "content": "417295"}, "And once more?")
    assert again.output_text == same.choices[0].message.content
    assert again.usage.input_tokens == same.usage.prompt_tokens


def test_a_stream(create):
    events = list(create(stream=True))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type.endswith("text.delta")) == "417295"
    assert events[-1].response.output_text == "417295"
    assert (events[0].response.status, events[-1].response.usage.output_tokens) == ("in_progress", 7)
    usage = [*create(stream=True)][-1].response.usage  # of the same prompt once more
    assert usage.input_tokens > usage.input_tokens_details.cached_tokens > usage.input_tokens // 2
    assert [*create(stream=True, max_output_tokens=2)][-1].type == "response.incomplete"


def test_an_error_names_the_argument_as_it_was_sent(create):
    schema = {"properties": {"response_format": {"not": {}}}}
    with pytest.raises(openai.BadRequestError) as raised:
        create(text={"format": {"type": "json_schema", "schema": schema}})
    path = "text.format.schema.properties.response_format"
    assert (raised.value.param, raised.value.body["message"].startswith(f"{path}: ")) == (path, True)
    partial = InvalidRequestError("response_format cannot be combined with that", "response_format")
    use_response_names(partial)
    assert (str(partial), partial.param) == ("text.format cannot be combined with that", "text.format")


@pytest.mark.parametrize("size", [1, *(pytest.param(size, marks=pytest.mark.full) for size in (7, 1000))])
def test_reasoning_content_and_calls_are_items(tokenizer, size):  # noqa: F811
    """Every event is valid for the openai client, which can send the items back."""
    request = parse(ResponseRequest, json.dumps({"input": "hi", "tools": [FUNCTION]}).encode())
    answer = ResponseAnswer("m", [Choice(tokenizer, "reasoning", [TOOL])], 5, str, request=request)
    text = f"I add.</think>Let me see.{CALL}{CALL}"
    pieces = [Piece(text[start : start + size]) for start in range(0, len(text), size)]
    block = BlockScore(ArchivedBlock(np.arange(40), 0, 0, 0, lambda: None), 1.0, 0, True)
    pieces.append(Piece("", finish_reason="stop", recalled=RecallResult((5, 6), (9,), (block,), seconds=0.002)))
    events = [*answer.start_events(), *(event for piece in pieces for event in answer.add(piece))]
    events = json.loads(json.dumps([*events, *answer.end_events(usage=False)]))
    for event in events:
        TypeAdapter(ResponseStreamEvent).validate_python(event)
    body = answer.body()
    counts = {"tokens": 3, "by_search": 1, "archived": 40}
    assert body["recalled"] == {**counts, "ranges": [[5, 7], [9, 10]], "partial": False, "ms": 2.0}
    assert [item["type"] for item in body["output"]] == ["reasoning", "message", "function_call", "function_call"]
    reasoning, message, call, _ = body["output"]
    assert (reasoning["content"][0]["text"], message["content"][0]["text"]) == ("I add.", "Let me see.")
    assert (call["name"], call["arguments"], body["status"]) == ("add", '{"a": 2}', "completed")
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == json.loads(json.dumps(body["output"]))
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "4"}
    next_body = {"input": [{"role": "user", "content": "hi"}, *body["output"], output], "tools": [FUNCTION]}
    *_, assistant, tool = parse(ResponseRequest, json.dumps(next_body).encode()).to_chat().messages
    assert (assistant.content, len(assistant.tool_calls), tool.tool_call_id) == ("Let me see.", 2, call["call_id"])
    assert assistant.reasoning_content == "I add."


# As Codex sends them: tools of a namespace, a custom tool, and one that OpenAI's servers run.
CODEX_TOOLS = [
    {"type": "namespace", "name": "math", "description": "", "tools": [{**FUNCTION, "defer_loading": True}]},
    {"type": "custom", "name": "patch", "description": "Apply.", "format": {"type": "text"}},
    {"type": "web_search", "external_web_access": False},
]


def test_tools_of_codex_are_functions_for_the_model_and_their_own_for_the_client(tokenizer):  # noqa: F811
    ignored = set()
    body = {"input": "hi", "tools": CODEX_TOOLS, "client_metadata": {"a": "b"}, "truncation": "auto"}
    request = parse(ResponseRequest, json.dumps(body).encode(), ignored)
    assert {"web_search"} <= ignored <= {"web_search", "defer_loading", "format"}
    tools = [tool["function"] for tool in request.to_chat().callable_tools]
    assert [tool["name"] for tool in tools] == ["math__add", "patch"]
    assert tools[1]["parameters"]["required"] == ["input"]
    answer = ResponseAnswer(
        "m", [Choice(tokenizer, "normal", [{"function": tool} for tool in tools])], 5, str, request=request
    )
    calls = ({"name": "math__add", "arguments": {"a": 2}}, {"name": "patch", "arguments": {"input": "+1\n"}})
    text = "".join(f"<tool_call>{json.dumps(call)}</tool_call>" for call in calls)
    events = [*answer.start_events(), *answer.add(Piece(text, finish_reason="stop")), *answer.end_events(usage=False)]
    for event in json.loads(json.dumps(events)):
        TypeAdapter(ResponseStreamEvent).validate_python(event)
    function, custom = answer.body()["output"]
    assert (function["type"], function["namespace"], function["name"]) == ("function_call", "math", "add")
    assert (custom["type"], custom["name"], custom["input"]) == ("custom_tool_call", "patch", "+1\n")
    outputs = [
        {"type": "function_call_output", "call_id": function["call_id"], "output": "4"},
        {"type": "custom_tool_call_output", "call_id": custom["call_id"], "output": "done"},
    ]
    items = [{"role": "user", "content": "hi"}, function, custom, *outputs, {"type": "web_search_call", "id": "w"}]
    *_, assistant, first, second = parse(ResponseRequest, json.dumps({"input": items}).encode()).to_chat().messages
    functions = [call.function for call in assistant.tool_calls]
    assert [call.name for call in functions] == ["math__add", "patch"]
    assert functions[1].arguments == {"input": "+1\n"}
    assert (first.content, second.content) == ("4", "done")


TALK = [
    {"role": "user", "content": "Add 2 and 2."},
    {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "4"},
]


def test_a_result_without_a_call_is_told_by_the_user():
    """Codex sends one when the model has called its tool `create_goal`."""
    goal = {"type": "function_call_output", "name": "goal_objective", "namespace": "agent", "output": "Add all."}
    items = [*TALK, goal, {"type": "function_call_output", "output": "Now."}]
    *_, tool, named, unnamed = parse(ResponseRequest, json.dumps({"input": items}).encode()).to_chat().messages
    assert (tool.role, tool.tool_call_id) == ("tool", "c")
    assert [(message.role, message.content) for message in (named, unnamed)] == [
        ("user", "goal_objective: Add all."),
        ("user", "Now."),
    ]


def test_a_conversation_is_compacted(scripted):  # noqa: F811
    """Its user messages stay, and a summary is the rest; it continues from there."""
    scripted.script("<think>Hm.</think>\nThe sum is 4.\n")
    body = {"input": TALK, "tools": [FUNCTION], "instructions": "Be brief.", "stream": True}
    response = scripted.client.post("/v1/responses/compact", json=body).json()
    compacted = CompactedResponse.construct(**response)  # as the openai client does
    user, summary = compacted.output
    assert (compacted.object, user.role, user.content[0].text) == ("response.compaction", "user", "Add 2 and 2.")
    assert (summary.type, summary.encrypted_content) == ("compaction", "The sum is 4.")
    assert compacted.usage.output_tokens > compacted.usage.output_tokens_details.reasoning_tokens > 0
    items = [*response["output"], {"role": "user", "content": "And 3?"}]
    messages = parse(ResponseRequest, json.dumps({"input": items}).encode()).to_chat().messages
    assert [message.role for message in messages] == ["user"] * 3
    assert messages[1].content.endswith("The sum is 4.")
    plain, without_tools = (
        scripted.client.post("/v1/responses/input_tokens", json=body | more).json()["input_tokens"]
        for more in ({}, {"tools": []})
    )
    assert compacted.usage.input_tokens > plain + 50, "the model is asked for the summary"
    assert compacted.usage.input_tokens_details.cached_tokens == 0
    scripted.script("It is 4.")
    again = scripted.client.post("/v1/responses", json={**body, "stream": False}).json()["usage"]
    assert again["input_tokens_details"]["cached_tokens"] > without_tools - 16, "the prompts share the conversation"


def test_a_trigger_in_the_input_makes_the_answer_one_compaction(scripted):  # noqa: F811
    scripted.script("<think>Hm.</think>The sum is 4.")
    body = {"input": [*TALK, {"type": "compaction_trigger"}], "tools": [FUNCTION], "stream": True}
    events = events_of(scripted.client.post("/v1/responses", json=body).text)
    for event in events:
        TypeAdapter(ResponseStreamEvent).validate_python(event)
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds == ["created", "in_progress", "output_item.added", "output_item.done", "completed"]
    (item,) = events[-1]["response"]["output"]
    assert (events[3]["item"], item["encrypted_content"]) == (item, "The sum is 4.")


def test_an_answer_without_a_summary_is_an_error(scripted):  # noqa: F811
    scripted.script(f"<think>Hm.</think>{CALL}")
    response = scripted.client.post("/v1/responses/compact", json={"input": TALK, "tools": [FUNCTION]})
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (500, "model_error")
    assert "the model wrote no summary" in error["message"]


def test_tokens_are_counted(server):
    counted = server.post("/v1/responses/input_tokens", input="hi", instructions="Be kind.").json()
    answered = server.post("/v1/responses", input="hi", instructions="Be kind.", max_output_tokens=1).json()
    assert counted == {"object": "response.input_tokens", "input_tokens": answered["usage"]["input_tokens"]}


def test_a_summary_is_a_text_whatever_the_answers_are(scripted):  # noqa: F811
    scripted.script("<think>Hm.</think>The sum is 4.")
    choice, text = {"type": "function", "name": "add"}, {"format": {"type": "json_object"}}
    body = {"input": TALK, "tools": [FUNCTION], "tool_choice": choice, "text": text}
    (_, summary) = scripted.client.post("/v1/responses/compact", json=body).json()["output"]
    assert summary["encrypted_content"] == "The sum is 4."


def test_a_summary_without_its_end_is_an_error(scripted):  # noqa: F811
    scripted.script("<think>Hm.</think>The sum of two and two is 4.")
    response = scripted.client.post("/v1/responses/compact", json={"input": TALK, "max_output_tokens": 8})
    assert response.status_code == 500
    assert "did not end within 8 tokens; raise max_output_tokens" in response.json()["error"]["message"]


def test_a_required_call_after_reasoning_is_refused_as_that(scripted):  # noqa: F811
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]}
    body = {"input": [*TALK, thought], "tools": [FUNCTION], "tool_choice": "required"}
    response = scripted.client.post("/v1/responses", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith("tool_choice cannot be combined with reasoning at the end")
