"""Tool calls over HTTP: whatever a model writes, an answer ends as one, with calls that clients can read."""

import json
import re
from contextlib import contextmanager

import mlx.core as mx
import pytest

from .test_broken_answers import serving
from .test_messages import CALL, PARAMETERS, TOOL, tokenizer  # noqa: F401 - a fixture

NO_THINKING = ("--chat-template-args", '{"enable_thinking": false}')  # or prompts open the reasoning
FREE = {"type": "function", "function": {"name": "add", "parameters": {**PARAMETERS, "not": {}}}}  # has no grammar
END = 2  # the token that ends an answer
ADD = [("add", '{"a": 2}')]
BROKEN = '<tool_call>{"name": "add", "arguments": {"a": "\\ud800"}}</tool_call> and <tool_call>[]</tool_call>.'
ANSWERS = [  # of a model: text, reasoning, content, calls
    ('<tool_call>{"name": "add"}</tool_call>', "", "", [("add", "{}")]),
    (BROKEN, "", BROKEN, []),
    ("<think>Some write <tool_call> tags.</think>It is 4.", "Some write <tool_call> tags.", "It is 4.", []),
    (f"A <think> tag, a <tool_call> tag.{CALL}", "", "A <think> tag, a <tool_call> tag.", ADD),
]


class Scripted:
    """A server whose model generates given texts."""

    def __init__(self, encode):
        self._encode = encode
        self.tokens = []

    def forward(self, tokens, logits):
        """Replace the logits of a decode step."""
        if tokens.shape[1] > 1 or not self.tokens:
            return logits
        return mx.where(mx.arange(logits.shape[-1]) == self.tokens.pop(0), 0.0, -100.0)[None, None]

    def script(self, text):
        """Let the next answer be this text."""
        parts = re.findall("<|[^<]+", text)  # so that no mark becomes a control token
        self.tokens = [token for part in parts for token in self._encode(part)] + [END]

    def answers(self, text, tool=TOOL, **options):
        """Return reasoning, content, calls and finish of an answer: of chats and of responses, whole and streamed."""
        tools = [{"type": "function", **tool["function"]}]
        chat = {"messages": [{"role": "user", "content": "hi"}], "tools": [tool], **options}
        response = {"input": "hi", "tools": tools, **options}
        answers = []
        for path, body, read in (
            ("/v1/chat/completions", chat, read_chat),
            ("/v1/responses", response, read_response),
        ):
            for stream in (False, True):
                sent = self._post(text, path, {**body, "stream": stream})
                answers.append(read(events_of(sent.text) if stream else sent.json()))
        return answers

    def answer(self, text, **body):
        """Return the body of a chat's answer."""
        return self._post(text, "/v1/chat/completions", body).json()

    def _post(self, text, path, body):
        self.script(text)
        sent = self.client.post(path, json=body)
        assert sent.status_code == 200, sent.text
        return sent


def events_of(text):
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def read_chat(body):
    if isinstance(body, dict):
        (choice,) = body["choices"]
        deltas, finish = [choice["message"]], choice["finish_reason"]
    else:
        choices = [choice for event in body for choice in event["choices"]]
        deltas, finish = [choice["delta"] for choice in choices], choices[-1]["finish_reason"]
    calls = [call["function"] for delta in deltas for call in delta.get("tool_calls", [])]
    texts = ["".join(delta.get(name) or "" for delta in deltas) for name in ("reasoning", "content")]
    return *texts, [(call["name"], call["arguments"]) for call in calls], finish == "tool_calls"


def read_response(body):
    if isinstance(body, list):
        body = body[-1]["response"]
    items = body["output"]
    texts = [
        "".join(item["content"][0]["text"] for item in items if item["type"] == kind)
        for kind in ("reasoning", "message")
    ]
    calls = [(item["name"], item["arguments"]) for item in items if item["type"] == "function_call"]
    assert body["status"] == "completed"
    return *texts, calls, bool(calls)


@contextmanager
def scripting(loaded):
    """Let the model generate what the yielded server is given; around the server, which patches the model, too."""
    kind = type(loaded[0])
    forward = kind.__call__
    server = Scripted(loaded[1].encode)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            kind, "__call__", lambda self, ids, *args, **kw: server.forward(ids, forward(self, ids, *args, **kw))
        )
        yield server


@contextmanager
def scripted_server(loaded, tokenizer, *flags):  # noqa: F811
    with scripting(loaded) as server, serving((loaded[0], tokenizer), *flags) as (_, server.client):
        yield server


@pytest.fixture(scope="module")
def scripted(loaded, tokenizer):  # noqa: F811
    with scripted_server(loaded, tokenizer, *NO_THINKING) as server:
        yield server


@pytest.mark.parametrize(
    "answer", [ANSWERS[0], *(pytest.param(answer, marks=pytest.mark.full) for answer in ANSWERS[1:])]
)
def test_calls_and_mentions_of_marks(scripted, answer):
    text, reasoning, content, calls = answer
    assert scripted.answers(text, FREE) == [(reasoning, content, calls, bool(calls))] * 4


@pytest.mark.parametrize("parallel", [pytest.param(True, marks=pytest.mark.full), False])
def test_calls_in_parallel(scripted, parallel):
    calls = (2 if parallel else 1) * ADD
    assert scripted.answers(f"Two.{CALL}{CALL}", parallel_tool_calls=parallel) == [("", "Two.", calls, True)] * 4


def test_reasoning_before_a_call_is_kept_for_clients_that_drop_it(scripted):
    question = {"role": "user", "content": "hi"}
    answer = scripted.answer(f"<think>Let me add these two.</think>{CALL}", messages=[question], tools=[TOOL])
    message = answer["choices"][0]["message"]
    assert message["reasoning"] == message["reasoning_content"] == "Let me add these two."
    (call,) = message["tool_calls"]

    def prompt_tokens(call, question=question, **fields):
        said = {"role": "assistant", "content": None, "tool_calls": [call], **fields}
        tool = {"role": "tool", "tool_call_id": call["id"], "content": "4"}
        return scripted.answer("4", messages=[question, said, tool], tools=[TOOL])["usage"]["prompt_tokens"]

    sent = prompt_tokens(call, reasoning_content=message["reasoning"])
    assert prompt_tokens(call) == sent
    other = {**call, "function": {"name": "add", "arguments": '{"a": 3}'}}
    assert prompt_tokens(other) < sent, "what another call of this id was thought about"
    others = {"role": "user", "content": "ho"}
    assert prompt_tokens(call, others) < prompt_tokens(call, others, reasoning_content=message["reasoning"]), (
        "another conversation"
    )
    system, earlier = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "what came before"})
    for before in (system, earlier):  # of the same last question
        said = {"role": "assistant", "content": None, "tool_calls": [call]}
        tool = {"role": "tool", "tool_call_id": call["id"], "content": "4"}
        counts = [
            scripted.answer("4", messages=[before, question, {**said, **fields}, tool], tools=[TOOL])["usage"]
            for fields in ({}, {"reasoning_content": message["reasoning"]})
        ]
        assert counts[0]["prompt_tokens"] < counts[1]["prompt_tokens"]


@pytest.mark.parametrize("options", [{"tool_choice": "none"}, pytest.param({"tools": None}, marks=pytest.mark.full)])
def test_without_tools_there_are_no_calls(scripted, options):
    assert scripted.answers(f"<think>Hm.</think>A {CALL}", **options) == [("Hm.", f"A {CALL}", [], False)] * 4


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "tools": [TOOL]}),
        ("/v1/responses", {"input": "hi", "tools": [{"type": "function", **TOOL["function"]}]}),
    ],
)
def test_a_template_without_tools_is_named(server, path, body):
    response = server.post(path, **body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "tools")
    assert "the chat template of needle32 does not show tools" in error["message"]
    assert "--chat-template" in error["message"]
