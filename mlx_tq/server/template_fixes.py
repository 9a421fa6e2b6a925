"""`TemplateFix`: conversations that some chat templates reject, and how each is rewritten for those templates."""

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import NamedTuple

from mlx_tq.server.system_messages import Message

_SHORT_ID = 9  # characters, the only length that Mistral's templates accept


class TemplateFix(NamedTuple):
    """`example` is a conversation that templates may reject; `convert` rewrites that part of any conversation."""

    example: list[Message]
    convert: Callable[[Sequence[Message]], list[Message]]


def join_users(messages: Sequence[Message]) -> list[Message]:
    """Return messages in which consecutive user messages are one."""
    joined: list[Message] = []
    for message in messages:
        if message["role"] == "user" and joined and joined[-1]["role"] == "user":
            joined[-1] = {**joined[-1], "content": f"{joined[-1]['content']}\n\n{message['content']}"}
        else:
            joined.append(message)
    return joined


def fold_into_results(messages: Sequence[Message]) -> list[Message]:
    """Return messages in which a user message after a tool result ends that result, marked as the user's."""
    folded: list[Message] = []
    for message in messages:
        if message["role"] == "user" and folded and folded[-1]["role"] == "tool":
            text = f"{folded[-1]['content']}\n\n<user>\n{message['content']}\n</user>"
            folded[-1] = {**folded[-1], "content": text}
        else:
            folded.append(message)
    return folded


def write_arguments(messages: Sequence[Message]) -> list[Message]:
    """Return messages in which the arguments of calls are JSON."""

    def write(call: Message) -> Message:
        function = call["function"]
        arguments = json.dumps(function["arguments"], ensure_ascii=False)
        return {**call, "function": {**function, "arguments": arguments}}

    return _change_calls(messages, write)


def shorten_ids(messages: Sequence[Message]) -> list[Message]:
    """Return messages in which calls and their results have ids of nine letters and digits."""

    def shorten(call_id: str) -> str:
        if len(call_id) == _SHORT_ID and call_id.isalnum():
            return call_id
        return hashlib.sha256(call_id.encode(errors="surrogatepass")).hexdigest()[:_SHORT_ID]

    changed = _change_calls(messages, lambda call: {**call, "id": shorten(call.get("id", ""))})
    return [
        {**message, "tool_call_id": shorten(message.get("tool_call_id", ""))} if message["role"] == "tool" else message
        for message in changed
    ]


def _change_calls(messages: Sequence[Message], change: Callable[[Message], Message]) -> list[Message]:
    return [
        {**message, "tool_calls": [change(call) for call in message["tool_calls"]]}
        if "tool_calls" in message
        else message
        for message in messages
    ]


def _example(call_id: str, *more: Message) -> list[Message]:
    call = {"id": call_id, "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    return [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "1", "tool_call_id": call_id},
        *more,
    ]


_USER = {"role": "user", "content": "hi"}
# In this order: each example is converted as those before it, if the template needs that.
TEMPLATE_FIXES = (
    TemplateFix(_example("abcdef123"), write_arguments),
    TemplateFix(_example("call_0123456789abcdef"), shorten_ids),
    TemplateFix([_USER, _USER], join_users),
    TemplateFix(_example("abcdef123", _USER), fold_into_results),
)
