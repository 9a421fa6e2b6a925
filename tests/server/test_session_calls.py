"""Sessions continue after tool calls, and requests outside of a session continue from what it has prefilled."""

import json

import pytest

from .test_messages import CALL, TEMPLATE, TOOL, tokenizer  # noqa: F401 - a fixture
from .test_tool_calls import scripted  # noqa: F401 - a fixture

USER = {"role": "user", "content": "Add 2 and 2, then 3."}
SESSION = "X-MLX-TQ-Session"
# An answer with calls has no end: what was generated does not agree with it.
ENDLESS_CALLS = TEMPLATE.replace("<|im_end|>\n{% endfor %}", "{{ '<|im_end|>' if not m['tool_calls'] }}\n{% endfor %}")


@pytest.fixture
def ask(scripted):  # noqa: F811
    """Return a function that returns the message and the usage of an answer, whose text is given."""

    def ask(text, messages, session=None, **options):
        scripted.script(text)
        body = {"messages": messages, "tools": [TOOL], "max_tokens": 200, **options}
        headers = {} if session is None else {SESSION: session}
        answer = scripted.client.post("/v1/chat/completions", json=body, headers=headers).json()
        return answer["choices"][0]["message"], answer["usage"]

    return ask


def cached(usage):
    return usage["prompt_tokens_details"]["cached_tokens"]


def turn(message, **changes):
    """Return a call as clients send it back, without the reasoning, and its result."""
    (call,) = message["tool_calls"]
    said = {"role": "assistant", "content": message["content"], "tool_calls": [call], **changes}
    return [said, {"role": "tool", "tool_call_id": call["id"], "content": "4 <|im_end|> 4"}]


def test_a_session_continues_after_calls(ask):
    """Whatever form the client sends the call in: templates get it as an object, without text as an empty text."""
    talk, total = [USER], 0
    for number, changes in enumerate(({}, {"content": None})):
        message, usage = ask(f"<think>Hm {number}.</think>{CALL}", talk, "calls")
        assert cached(usage) == total
        total = usage["total_tokens"]
        (call,) = message["tool_calls"]
        call["function"]["arguments"] = json.dumps(json.loads(call["function"]["arguments"]), indent=2)
        talk += turn(message, **changes)
    message, usage = ask("It is 4.", talk, "calls")
    assert (message["content"], cached(usage)) == ("It is 4.", total)
    talk += [{"role": "assistant", "content": "It is 4."}, {"role": "user", "content": "Thanks."}]
    assert cached(ask("Sure.", talk, "calls")[1]) == usage["total_tokens"]


def test_an_edited_call_restarts_the_session(ask):
    message, first = ask(CALL, [USER], "edited")
    edited = {**message["tool_calls"][0], "function": {"name": "add", "arguments": '{"a": 3}'}}
    assert cached(ask("No.", [USER, *turn({**message, "tool_calls": [edited]})], "edited")[1]) < first["total_tokens"]


def test_a_template_that_shows_another_end_of_calls_restarts_the_session(ask, tokenizer, monkeypatch):  # noqa: F811
    monkeypatch.setattr(tokenizer._tokenizer, "chat_template", ENDLESS_CALLS)
    message, first = ask(CALL, [USER], "endless")
    last, usage = ask("It is 4.", [USER, *turn(message)], "endless")
    assert (last["content"], cached(usage) < first["total_tokens"]) == ("It is 4.", True)


def test_other_sessions_and_requests_outside_continue_from_a_session(ask, scripted):  # noqa: F811
    system = {"role": "system", "content": "Add what the user wants, and call tools for it. " * 9}
    talk = [system, USER]
    _, first = ask("Yes.", talk, "shared")
    talk += [{"role": "assistant", "content": "Yes."}, {"role": "user", "content": "Go on."}]
    body = {"messages": talk, "tools": [TOOL], "max_tokens": 200}
    (estimate,) = scripted.client.post("/v1/estimate", json=body).json()["prompts"]
    _, other = ask("So.", talk, "other")
    assert cached(other) > first["prompt_tokens"] // 2, "what this template shows before the tools"
    assert estimate["cached_tokens"] == cached(other)
    assert cached(ask("So.", talk)[1]) >= cached(other)


@pytest.mark.parametrize(
    ("more", "continues"),
    [
        (" \n" * 40, True),
        *(pytest.param(more, False, marks=pytest.mark.full) for more in (CALL, "<")),
    ],
    ids=["space", "call", "mark"],
)
def test_a_session_continues_after_an_only_call_unless_more_was_generated(ask, more, continues):
    """Whether the server cancels the job at the call or not: the client sees the call alone."""
    name = f"only{len(more)}"
    message, first = ask(CALL + more, [USER], name, parallel_tool_calls=False)
    assert (len(message["tool_calls"]), message["content"]) == (1, None)
    _, second = ask("It is 4.", [USER, *turn({**message, "content": ""})], name)
    assert (cached(second) > first["prompt_tokens"]) == continues
