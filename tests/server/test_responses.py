"""/v1/responses by the openai client: the same answers as a chat's, in items and events."""

import json

import numpy as np
import openai
import pytest
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from mlx_tq.prompt_cache.archive import Extent
from mlx_tq.prompt_cache.places import Places
from mlx_tq.prompt_cache.recall import Scored
from mlx_tq.server.answers import Answer, MessageReader
from mlx_tq.server.errors import InvalidRequestError
from mlx_tq.server.jobs import Piece
from mlx_tq.server.response_schemas import ResponseRequest, in_own_names
from mlx_tq.server.responses import ResponseAnswer
from mlx_tq.server.schemas import parse
from mlx_tq.session.recall import Recalled

from .test_formats import CODE
from .test_messages import CALL, TOOL, tokenizer  # noqa: F401 - a fixture

ASKED = "The access code is 417295. What is the access code?"
FUNCTION = {"type": "function", **TOOL["function"]}


@pytest.fixture
def create(server):
    return lambda **body: server.openai.responses.create(**{"model": "default_model", "input": ASKED, **body})


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
    said = create(include=["message.output_text.logprobs"], top_logprobs=2).output[0].content[0].logprobs
    assert [len(entry.top_logprobs) for entry in said] == [2] * 7
    held = {"type": "json_schema", "name": "code", "schema": CODE, "strict": True}
    assert set(json.loads(create(text={"format": held}, max_output_tokens=60).output_text)) == {"code"}


def test_a_conversation_of_items_is_that_of_messages(create, server):
    """Whoever keeps the conversation sends back the items that came, as the client's `to_dict` gives them."""
    first = create()
    items = [{"role": "user", "content": ASKED}, *(item.to_dict() for item in first.output)]
    parts = [{"type": "input_text", "text": "And once more?"}]
    again = create(
        input=[*items, {"type": "reasoning", "id": "rs_1", "summary": []}, {"role": "user", "content": parts}]
    )
    same = server.chat(ASKED, {"role": "assistant", "content": "417295"}, "And once more?")
    assert again.output_text == same.choices[0].message.content
    assert again.usage.input_tokens == same.usage.prompt_tokens


def test_a_stream(create):
    """What the client puts together from the events is the response; each event says its number and its place."""
    events = list(create(stream=True))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type.endswith("text.delta")) == "417295"
    assert events[-1].response.output_text == "417295"
    assert (events[0].response.status, events[-1].response.usage.output_tokens) == ("in_progress", 7)
    assert [*create(stream=True, max_output_tokens=2)][-1].type == "response.incomplete"


@pytest.mark.parametrize(
    ("body", "place"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": []}, "input"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input.0.content.0.type",
        ),
        ({"input": [{"type": "web_search_call"}]}, "input.0"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"background": True}, "background"),
        ({"temperature": -1}, "temperature"),
    ],
)
def test_what_cannot_be_met(create, body, place):
    with pytest.raises(openai.BadRequestError) as raised:
        create(**body)
    assert raised.value.param == place


@pytest.mark.parametrize(
    ("body", "place", "says"),
    [
        ({"text": {"format": {"type": "json_schema", "schema": {"properties": {"response_format": {"not": {}}}}}}},
         "text.format.schema.properties.response_format", "text.format.schema.properties.response_format: "),
        ({"text": {"format": {"type": "json_object", "schema": {"type": "strng"}}}}, "text.format.schema", "strng"),
        ({"input": "word " * 9000}, "input", "the model allows 4,096"),
    ],
)  # fmt: skip
def test_an_error_names_the_argument_as_it_was_sent(create, body, place, says):
    """Not as the chat that a response is would call it."""
    with pytest.raises(openai.BadRequestError) as raised:
        create(**body)
    assert raised.value.param == place
    assert says in raised.value.body["message"]
    both = in_own_names(InvalidRequestError("tools and response_format exclude each other", "response_format"))
    assert (str(both), both.param) == ("tools and text.format exclude each other", "text.format")


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_thoughts_words_and_calls_are_items(tokenizer, size):  # noqa: F811
    """In pieces of any size; every event is one that the client knows, and its request may follow with the items."""
    asked = parse(ResponseRequest, json.dumps({"input": "hi", "tools": [FUNCTION]}).encode())
    inner = Answer("m", [MessageReader(tokenizer, "reasoning", [TOOL])], 5)
    answer = ResponseAnswer(inner, asked)
    text = f"I add.</think>Let me see.{CALL}{CALL}"
    events = answer.opening()
    for start in range(0, len(text), size):
        events += answer.add(Piece(text[start : start + size]), str)
    block = Scored(Extent(np.arange(40), 0, 0, Places(0)), 1.0, 0, True)
    last = Piece("", finish="stop", recalled=Recalled((5, 6), (9,), (block,), seconds=0.002))
    events = json.loads(json.dumps([*events, *answer.add(last, str), *answer.closing(usage=False)]))
    for event in events:
        TypeAdapter(ResponseStreamEvent).validate_python(event)
    whole = answer.whole()
    assert whole["recalled"] == {"tokens": 3, "by_meaning": 1, "ranges": [[5, 7], [9, 10]], "archived": 40, "ms": 2.0}
    assert [item["type"] for item in whole["output"]] == ["reasoning", "message", "function_call", "function_call"]
    thought, said, call, _ = whole["output"]
    assert (thought["content"][0]["text"], said["content"][0]["text"]) == ("I add.", "Let me see.")
    assert (call["name"], call["arguments"], whole["status"]) == ("add", '{"a": 2}', "completed")
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == json.loads(json.dumps(whole["output"]))
    given = {"type": "function_call_output", "call_id": call["call_id"], "output": "4"}
    back = {"input": [{"role": "user", "content": "hi"}, *whole["output"], given], "tools": [FUNCTION]}
    *_, assistant, tool = parse(ResponseRequest, json.dumps(back).encode()).chat().messages
    assert (assistant.content, len(assistant.tool_calls), tool.tool_call_id) == ("Let me see.", 2, call["call_id"])


def test_an_input_without_messages_is_refused(server):
    answer = server.post("/v1/responses", input=[{"type": "reasoning"}])
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input")
