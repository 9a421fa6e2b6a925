"""Calls that follow a grammar: those that are required, of one tool or any, and those that the model opens itself."""

import asyncio
import json
import sys

import jsonschema_rs
import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tool_parsers import gemma4, json_tools

from mlx_tq.grammar.call_grammar import GENERIC_FORM, CallForm
from mlx_tq.grammar.constraint import Grammars
from mlx_tq.grammar.sandbox import CompileLimits, GrammarChecker
from mlx_tq.models import load
from mlx_tq.server import answer_grammars
from mlx_tq.server.answer_grammars import AnswerGrammars
from mlx_tq.server.answers import Choice
from mlx_tq.server.api_errors import InvalidRequestError
from mlx_tq.server.grammar_queue import GrammarQueue
from mlx_tq.server.job import Piece
from mlx_tq.server.messages_schemas import MessagesRequest
from mlx_tq.server.prompt_builder import PromptBuilder
from mlx_tq.server.schemas import ChatRequest, ResponseRequest, parse

from .test_messages import CALL, TOOL, prompt_of, tokenizer  # noqa: F401 - a fixture
from .test_response_formats import CODE, schema_format
from .test_tool_calls import events_of, read_chat, read_response, scripted_server

# As Qwen2.5's: mlx-lm infers the form of the calls from it.
TEMPLATE = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}{% for tool_call in message.tool_calls or [] %}{% set tool_call = tool_call.function %}
<tool_call>
{"name": "{{ tool_call.name }}", "arguments": {{ tool_call.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
COLOR = {"enum": ["red", "green"]}
PICK = {"type": "object", "properties": {"color": COLOR}, "required": ["color"]}
PAINT = {"type": "object", "properties": {"color": {"$ref": "#/$defs/c"}}, "required": ["color"], "$defs": {"c": COLOR}}
PARAMETERS = {"pick": PICK, "paint": PAINT}
FUNCTIONS = [{"name": name, "parameters": parameters} for name, parameters in PARAMETERS.items()]
TOOLS = [{"type": "function", "function": function} for function in FUNCTIONS]
ASKED = [{"role": "user", "content": "Red or green?"}]
ONE = {"parallel_tool_calls": False}
NEW_FORM = CallForm("a_later_parser", gemma4.tool_call_start, gemma4.tool_call_end, gemma4.parse_tool_call)
NOT_STRICT = {"type": "function", "function": {"name": "odd", "parameters": {"properties": {"a": {"not": {}}}}}}


@pytest.fixture(scope="module")
def calling(start):
    """Run a server whose template shows tools."""
    return start("--chat-template", TEMPLATE)


@pytest.fixture(scope="module")
def scripted(loaded):
    """Run a server in this process whose model generates given texts; no token of its tokenizer is a mark of calls."""
    inner = load()[1]._tokenizer
    inner.add_tokens(["<think>", "</think>"])
    inner.chat_template = TEMPLATE
    marks = {"tool_call_start": "<tool_call>", "tool_call_end": "</tool_call>"}
    wrapper = TokenizerWrapper(inner, tool_parser=json_tools.parse_tool_call, **marks)
    with scripted_server(loaded, wrapper) as server:
        yield server


def read_message(body):
    if isinstance(body, list):
        starts = [event["content_block"] for event in body if event["type"] == "content_block_start"]
        inputs = [event["delta"]["partial_json"] for event in body if event.get("delta", {}).get("partial_json")]
        (reason,) = [event["delta"]["stop_reason"] for event in body if event["type"] == "message_delta"]
        calls = [(block["name"], text) for block, text in zip(starts, inputs, strict=True)]
        return "", "", calls, reason == "tool_use"
    blocks = body["content"]
    calls = [(block["name"], json.dumps(block["input"])) for block in blocks]
    return "", "", calls, body["stop_reason"] == "tool_use"


CHAT = ("/v1/chat/completions", {"messages": ASKED, "tools": TOOLS, **ONE}, read_chat)
RESPONSE = (
    "/v1/responses",
    {"input": ASKED, "tools": [{"type": "function", **f} for f in FUNCTIONS], **ONE},
    read_response,
)
MESSAGE = (
    "/v1/messages",
    {
        "messages": ASKED,
        "tools": [{"name": f["name"], "input_schema": f["parameters"]} for f in FUNCTIONS],
        "max_tokens": 200,
    },
    read_message,
)
ALLOWED = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "pick"}]}
CHOICES = {
    "required": (CHAT, "required", None),
    "named": (CHAT, {"type": "function", "function": {"name": "paint"}}, "paint"),
    "allowed": (RESPONSE, ALLOWED, "pick"),
    "any": (MESSAGE, {"type": "any", "disable_parallel_tool_use": True}, None),
    "tool": (MESSAGE, {"type": "tool", "name": "pick"}, "pick"),
}
QUICK = (("required", False), ("allowed", False), ("any", True))


@pytest.mark.parametrize(
    ("kind", "stream"),
    [
        pytest.param(kind, stream, marks=[] if (kind, stream) in QUICK else pytest.mark.full)
        for kind in CHOICES
        for stream in (False, True)
    ],
)
def test_a_call_is_made(calling, kind, stream):
    (path, body, read), choice, name = CHOICES[kind]
    response = calling.post(path, **body, tool_choice=choice, stream=stream)
    assert response.status_code == 200, response.text
    _, content, ((called, arguments),), is_call = read(events_of(response.text) if stream else response.json())
    assert (content, is_call) == ("", True)
    assert called in ([name] if name else [*PARAMETERS])
    jsonschema_rs.validate(PARAMETERS[called], json.loads(arguments))


def test_a_model_whose_template_shows_no_tools(server):
    """The tools are in the system message. smolagents sends content as parts; pydantic-ai sends one output tool."""
    said = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c", "function": {"name": "pick", "arguments": "{}"}}],
    }
    result = {"role": "tool", "tool_call_id": "c", "content": "color is missing"}
    options = {"stop": ["Observation:", "Calling tools:"], "max_tokens": 200}
    question = {"role": "user", "content": [{"type": "text", "text": "Red or green?"}]}
    answer = server.chat(question, said, result, tools=TOOLS[:1], tool_choice="required", **ONE, **options).choices[0]
    (call,) = answer.message.tool_calls
    assert (call.function.name, answer.finish_reason, answer.message.content) == ("pick", "tool_calls", None)
    jsonschema_rs.validate(PICK, json.loads(call.function.arguments))


def test_calls_and_results_as_text(tokenizer, monkeypatch):  # noqa: F811
    monkeypatch.setattr(
        tokenizer._tokenizer, "chat_template", "{% for m in messages %}[{{ m.role }}|{{ m.content }}]{% endfor %}"
    )
    call = {"id": "c", "function": {"name": "add", "arguments": '{"a": 2}'}}
    said = {"role": "assistant", "content": "Hm.", "tool_calls": [call]}
    conversation = [{"role": "system", "content": "Be kind."}, *ASKED, said, {"role": "tool", "content": "4"}, *ASKED]
    text = tokenizer.decode(prompt_of(tokenizer, *conversation, tools=TOOLS[:1], tool_choice="required").ids)
    head, *turns = text.split("][")
    assert head.startswith("[system|You can call these functions:\n" + json.dumps(FUNCTIONS[0]))
    assert head.endswith("\n\nBe kind.")
    called = '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>'
    assert turns == [
        "user|Red or green?", f"assistant|Hm.\n{called}",
        "user|<tool_response>\n4\n</tool_response>\n\nRed or green?]",
    ]  # fmt: skip


def test_a_call_that_the_model_opens_ends_as_a_valid_one(scripted):
    for stream in (False, True):
        scripted.script('<think>A <tool_call> mark.</think>I see. <tool_call>{"color red')
        body = {"messages": ASKED, "tools": TOOLS, "stream": stream, **ONE}
        sent = scripted.client.post("/v1/chat/completions", json=body)
        reasoning, content, ((name, arguments),), is_call = read_chat(events_of(sent.text) if stream else sent.json())
        assert (reasoning, content, is_call) == ("A <tool_call> mark.", "I see. ", True)
        jsonschema_rs.validate(PARAMETERS[name], json.loads(arguments))


def test_several_calls_and_text_between_them(scripted):
    call = '<tool_call>\n{"name": "pick", "arguments": {"color": "red"}}\n</tool_call>'
    answer = scripted.answer(f"Two.{call}\n{call} Done.", messages=ASKED, tools=TOOLS)["choices"][0]["message"]
    assert ([c["function"]["name"] for c in answer["tool_calls"]], answer["content"]) == (["pick"] * 2, "Two. Done.")


def test_allowed_tools_are_the_only_ones(scripted):
    allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "paint"}}]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    text = '<tool_call>{"name": "pick", "arguments": {"color": "red"}}</tool_call>'
    answer = scripted.answer(text, messages=ASKED, tools=TOOLS, tool_choice=choice, **ONE)
    (call,) = answer["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "paint"


def test_a_mark_that_is_mentioned(scripted):
    text = "The mark `<tool_call>` opens a call."
    message = scripted.answer(text, messages=ASKED, tools=TOOLS)["choices"][0]["message"]
    assert (message["content"], message.get("tool_calls")) == (text, None)


def test_allowed_tools_without_a_grammar(tokenizer):  # noqa: F811
    """A call of another tool stays content."""
    for names, is_call in ((["pick"], False), (["add"], True), (None, True)):
        choice = Choice(tokenizer, tools=[TOOL], names=names)
        message = choice.add(Piece(CALL, finish_reason="stop"))
        assert (message.content, len(message.tool_calls)) == (("", 1) if is_call else (CALL, 0))


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize("state", ["normal", "reasoning"])
def test_a_mark_inside_of_a_format(tokenizer, size, state):  # noqa: F811
    """Only an answer that begins with the mark has calls."""
    reasoning = "Hm.</think>" if state == "reasoning" else ""
    for text, content, calls in ((f'{{"a": "{CALL}"}}', f'{{"a": "{CALL}"}}', 0), (f"\n{CALL}\n{CALL}", "", 2)):
        choice = Choice(tokenizer, state, [TOOL], constrained=True)
        answer = reasoning + text
        for start in range(0, len(answer), size):
            choice.add(Piece(answer[start : start + size]))
        choice.add(Piece("", finish_reason="stop"))
        message = choice.message
        assert (message.content, len(message.tool_calls)) == (content, calls)
        assert message.reasoning == reasoning.removesuffix("</think>")


@pytest.mark.parametrize("starts_call", [False, True])
def test_tools_together_with_a_format(scripted, starts_call):
    text = CALL if starts_call else '{"code": "123456" and more'
    tool = {"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {"enum": [2]}}}}}
    answer = scripted.answer(text, messages=ASKED, tools=[tool], response_format=schema_format(CODE), **ONE)
    message = answer["choices"][0]["message"]
    if starts_call:
        assert message["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 2}'}
        assert message["content"] is None
    else:
        jsonschema_rs.validate(CODE, json.loads(message["content"]))


def test_a_tool_without_a_grammar(calling):
    """A required call is refused; one that the model may make goes on without, which the log says once."""
    response = calling.post(messages=ASKED, tools=[*TOOLS, NOT_STRICT], tool_choice="required")
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "tools")
    assert "no grammar can be built for tool 'odd': parameters.properties.a: Unimplemented keys" in error["message"]
    for _ in range(2):
        assert calling.post(messages=ASKED, tools=[*TOOLS, NOT_STRICT], max_tokens=2).status_code == 200
    assert calling.log().count("tool calls are not constrained: no grammar can be built for tool 'odd'") == 1


def test_a_form_without_a_grammar(tokenizer):  # noqa: F811
    """Required calls of a parser that mlx-lm may add are refused, others are free."""
    grammars = Grammars(tokenizer)
    compile_for = compiler(grammars, NEW_FORM)
    try:
        assert compile_for() is compile_for(tool_choice="auto") is None
        for fields, param in (
            ({"tool_choice": "required"}, "tool_choice"),
            ({"response_format": schema_format(CODE)}, "response_format"),
        ):
            with pytest.raises(InvalidRequestError, match="parser a_later_parser") as refused:
                compile_for(**fields)
            assert refused.value.param == param
    finally:
        grammars.close()


def compiler(grammars, form=GENERIC_FORM):
    """Return a function that compiles the grammar of a request with tools."""
    made = AnswerGrammars(GrammarQueue(grammars, 4), lambda: form, {}, allow_lark=False)

    def compile_for(**fields):
        body = json.dumps({"messages": ASKED, "tools": TOOLS, **fields}).encode()
        return asyncio.run(made.compile(parse(ChatRequest, body), "client"))

    return compile_for


def test_a_sandbox_that_does_not_start(tokenizer, monkeypatch):  # noqa: F811
    """Calls that the model may make go on without a grammar; a form without one is refused without compiling."""
    monkeypatch.setattr(sys, "executable", "/bin/false")
    grammars = Grammars(tokenizer)
    try:
        assert compiler(grammars)() is None
        with pytest.raises(RuntimeError, match="the process that checks grammars"):
            compiler(grammars)(tool_choice="required")
        with pytest.raises(InvalidRequestError, match="parser a_later_parser"):
            compiler(grammars, NEW_FORM)(tool_choice="required")
    finally:
        grammars.close()


def test_a_limit_that_was_exceeded_once(tokenizer, monkeypatch):  # noqa: F811
    monkeypatch.setattr(answer_grammars, "_RETRY_S", 0.0)
    grammars = Grammars(tokenizer)
    text = str(tokenizer._tokenizer.backend_tokenizer.to_str())
    limited = GrammarChecker(text, [2], CompileLimits(mask_seconds=-1.0))  # which any mask exceeds
    compile_for = compiler(grammars)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(grammars, "_checker", limited)
            assert compile_for() is None
        assert compile_for() is not None
    finally:
        limited.close()
        grammars.close()


def test_a_template_with_calls_that_cannot_be_parsed(tokenizer):  # noqa: F811
    """It shows the tools itself, and a required call has the generic form."""
    builder = PromptBuilder(TokenizerWrapper(tokenizer._tokenizer), {})
    body = {"messages": ASKED, "tools": TOOLS, "tool_choice": "required"}
    prompt = builder.chat_prompt(parse(ChatRequest, json.dumps(body).encode()))
    assert tokenizer.decode(prompt.ids).count('"pick"') == 1
    assert builder.call_form.start == "<tool_call>"


FUNCTION = {"type": "function", "function": {"name": "pick"}}


@pytest.mark.parametrize(
    ("choice", "mode", "names"),
    [
        ("none", "none", None),
        ("any", "required", None),
        ({"type": "auto"}, "auto", None),
        (FUNCTION, "required", ["pick"]),
        ({"type": "function", "name": "pick"}, "required", ["pick"]),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [FUNCTION]}}, "auto", ["pick"]),
    ],
)
def test_choices(choice, mode, names):
    chat = parse(ChatRequest, json.dumps({"messages": ASKED, "tools": TOOLS, "tool_choice": choice}).encode())
    assert (chat.tool_choice.mode, chat.tool_choice.names) == (mode, names)
    assert chat.has_one_call == (mode == "required" and bool(names))


def test_choices_of_other_apis():
    namespace = {"type": "namespace", "name": "art", "tools": [{"type": "function", **FUNCTIONS[0]}]}
    choice = {"type": "function", "name": "pick", "namespace": "art"}
    body = {"input": "hi", "tools": [namespace], "tool_choice": choice}
    assert parse(ResponseRequest, json.dumps(body).encode(), set()).to_chat().tool_choice.names == ["art__pick"]
    body = {**MESSAGE[1], "tool_choice": {"type": "tool", "name": "nick"}}
    with pytest.raises(InvalidRequestError, match=r"^tool_choice: 'nick' is not one of the tools: pick, paint"):
        parse(MessagesRequest, json.dumps(body).encode(), set()).to_chat()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tool_choice": "must", "tools": TOOLS}, "should be 'none', 'auto', 'required'"),
        ({"tool_choice": {"type": "function"}, "tools": TOOLS}, "should be 'none', 'auto', 'required'"),
        ({"tool_choice": {"type": "web_search"}, "tools": TOOLS}, "should be 'none', 'auto', 'required'"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}, "tools": TOOLS}, "should be 'none'"),
        (
            {
                "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": [], "name": "f"}]},
                "tools": TOOLS,
            },
            "'f' is not one of the tools",
        ),
        ({"tool_choice": "required"}, "tool_choice: needs tools in the request"),
        ({"tool_choice": FUNCTION, "tools": TOOLS[1:]}, "'pick' is not one of the tools: paint"),
    ],
)
def test_choices_that_are_refused(fields, words):
    with pytest.raises(InvalidRequestError, match=words) as refused:
        parse(ChatRequest, json.dumps({"messages": ASKED, **fields}).encode())
    assert refused.value.param == "tool_choice"
