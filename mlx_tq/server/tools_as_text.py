"""Tools, calls and their results as plain messages, for models whose chat template does not show them."""

import json
from typing import Any

from mlx_tq.grammar.call_grammar import GENERIC_FORM
from mlx_tq.server.system_messages import join_leading
from mlx_tq.server.template_fixes import join_users

Message = dict[str, Any]  # as templates expect it


def describe_tools(messages: list[Message], tools: list[dict[str, Any]]) -> list[Message]:
    """Return the messages after a system message that lists the tools and the form of a call."""
    functions = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    form = _call_text({"name": "NAME", "arguments": {"PARAMETER": "VALUE"}})
    text = f"You can call these functions:\n{functions}\n\nAnswer with a call of the one that fits best:\n{form}"
    return join_leading([{"role": "system", "content": text}, *messages])


def calls_as_text(messages: list[Message]) -> list[Message]:
    """Return the messages with calls as text of the assistant and their results as text of the user."""
    converted: list[Message] = []
    for message in messages:
        calls = [_call_text(call["function"]) for call in message.get("tool_calls", [])]
        if calls:
            texts = [message["content"], *calls] if message["content"] else calls
            others = {name: value for name, value in message.items() if name != "tool_calls"}
            converted.append({**others, "content": "\n".join(texts)})
        elif message["role"] == "tool":
            text = f"<tool_response>\n{message['content']}\n</tool_response>"
            converted.append({"role": "user", "content": text})
        else:
            converted.append(message)
    return join_users(converted)  # results with the user's message after them: many templates want roles to alternate


def _call_text(function: dict[str, Any]) -> str:
    call = {"name": function["name"], "arguments": function["arguments"]}
    return f"{GENERIC_FORM.start}\n{json.dumps(call, ensure_ascii=False)}\n{GENERIC_FORM.end}"
