"""Bodies of Anthropic's Messages API, which become chats. Unknown fields are ignored: clients add new ones often."""

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, field_validator

from mlx_tq.server.api_errors import InvalidRequestError
from mlx_tq.server.schemas import (
    ChatRequest,
    Count,
    FailFastList,
    Loose,
    Probability,
    Stop,
    Temperature,
    chat_of,
    without_none,
)
from mlx_tq.server.system_messages import join_leading

# Claude Code's first system line. It differs in each conversation, so with it no two of them would share a prefix.
_BILLING_LINE = "x-anthropic-billing-header:"
_COUNTER = "<total_tokens>", "</total_tokens>"
_COUNT = re.compile(r"[\w ,.]{1,40}")

Message = dict[str, Any]  # of a chat


# Content.


class TextBlock(Loose):
    type: Literal["text"]
    text: str


class MediaBlock(Loose):
    type: Literal["image", "document"]

    @field_validator("type")
    @classmethod
    def _refuse(cls, value: str) -> str:
        raise ValueError(f"{value} blocks are not supported, because the model reads only text; send text blocks")


class ThinkingBlock(Loose):
    type: Literal["thinking"]
    thinking: str


class RedactedThinkingBlock(Loose):
    """Reasoning that only Anthropic can decrypt; it is left out."""

    type: Literal["redacted_thinking"]


class ToolUseBlock(Loose):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(Loose):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | FailFastList[Annotated[TextBlock | MediaBlock, Field(discriminator="type")]] = ""
    is_error: bool | None = None


Texts = str | FailFastList[TextBlock]
UserBlock = Annotated[TextBlock | MediaBlock | ToolResultBlock, Field(discriminator="type")]
AssistantBlock = Annotated[
    TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock, Field(discriminator="type")
]


def _blocks(content: "str | Sequence[Any]") -> Sequence[Any]:
    return [TextBlock(type="text", text=content)] if isinstance(content, str) else content


def _texts(content: "str | Sequence[Any]") -> list[str]:
    texts = []
    for block in _blocks(content):
        text = _without_counter(block.text)
        if text or text == block.text:
            texts.append(text)
    return texts


def _without_counter(text: str) -> str:
    """Return a text without the counter of remaining tokens at its end, which clients move from turn to turn."""
    (start, end), stripped = _COUNTER, text.rstrip()
    before, tag, count = stripped.removesuffix(end).rpartition(start)
    is_counter = tag and stripped.endswith(end) and _COUNT.fullmatch(count)
    return before.rstrip() if is_counter else text


def _system_text(content: "str | Sequence[Any]") -> str:
    text = "\n".join(_texts(content))
    return text.partition("\n")[2].lstrip("\n") if text.startswith(_BILLING_LINE) else text


# Messages.


class SystemMessage(Loose):
    role: Literal["system"]
    content: Texts

    def add_to(self, messages: list[Message]) -> None:
        if text := _system_text(self.content):
            messages.append({"role": "system", "content": text})


class UserMessage(Loose):
    role: Literal["user"]
    content: str | Annotated[FailFastList[UserBlock], Field(min_length=1)]

    def add_to(self, messages: list[Message]) -> None:
        """Add the texts and tool results. Texts in a row are one message, as in Anthropic's API."""
        for block in _blocks(self.content):
            if isinstance(block, ToolResultBlock):
                text = "\n".join(_texts(block.content))
                text = f"Error: {text}" if block.is_error else text  # templates show no errors
                messages.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": text})
                continue
            for text in _texts([block]):
                if messages and messages[-1]["role"] == "user":
                    messages[-1]["content"] += f"\n{text}"
                else:
                    messages.append({"role": "user", "content": text})


class AssistantMessage(Loose):
    role: Literal["assistant"]
    content: str | FailFastList[AssistantBlock]

    def add_to(self, messages: list[Message]) -> None:
        """Add the blocks to one message. Its text is exactly what was generated, which the prefix cache may hold."""
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        message = messages[-1]
        for block in _blocks(self.content):
            if isinstance(block, TextBlock):
                message["content"] += block.text
            elif isinstance(block, ThinkingBlock):
                message["reasoning"] = message.get("reasoning", "") + block.thinking
            elif isinstance(block, ToolUseBlock):
                call = {"id": block.id, "function": {"name": block.name, "arguments": block.input}}
                message.setdefault("tool_calls", []).append(call)


# Tools and options.


class CustomTool(Loose):
    name: str
    description: str | None = None
    input_schema: dict[str, Any]


class ServerTool(Loose):
    """A tool that Anthropic defines, such as web_search; it is left out."""


Tool = Annotated[
    Annotated[CustomTool, Tag("custom")] | Annotated[ServerTool, Tag("server")],
    Discriminator(
        lambda tool: "server" if isinstance(tool, dict) and tool.get("type") not in (None, "custom") else "custom"
    ),
]


class ToolUse(Loose):
    """Anthropic's `tool_choice`."""

    type: Literal["auto", "none", "any", "tool"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    def to_choice(self) -> str | dict[str, Any]:
        return {"type": "function", "name": self.name} if self.type == "tool" else self.type


class Thinking(Loose):
    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Count | None = None


class MessagesRequest(Loose):
    """The body of a request to /v1/messages or /v1/messages/count_tokens."""

    model: str | None = None
    messages: Annotated[
        FailFastList[Annotated[SystemMessage | UserMessage | AssistantMessage, Field(discriminator="role")]],
        Field(min_length=1),
    ]
    system: Texts | None = None
    max_tokens: Count | None = None
    stop_sequences: Annotated[FailFastList[Stop], Field(max_length=16)] | None = None
    stream: bool | None = None
    temperature: Temperature | None = None
    top_p: Probability | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    tools: FailFastList[Tool] | None = None
    tool_choice: ToolUse | None = None
    thinking: Thinking | None = None

    def to_chat(self) -> ChatRequest:
        messages: list[Message] = []
        for message in (SystemMessage(role="system", content=self.system or ""), *self.messages):
            message.add_to(messages)
        if not messages:
            raise InvalidRequestError("the messages have no text; send at least one that has", "messages")
        functions = [without_none(tool) for tool in self.tools or [] if isinstance(tool, CustomTool)]
        for function in functions:
            function["parameters"] = function.pop("input_schema")
        body = {
            **self.model_dump(include={"model", "max_tokens", "stream", "temperature", "top_p", "top_k"}),
            "messages": join_leading(messages),
            "stop": self.stop_sequences,
            "tools": [{"type": "function", "function": function} for function in functions] or None,
            "tool_choice": self.tool_choice and self.tool_choice.to_choice(),
            "parallel_tool_calls": self.tool_choice and not self.tool_choice.disable_parallel_tool_use,
            "thinking_budget": self.thinking and self.thinking.budget_tokens,
            "chat_template_kwargs": self.thinking and {"enable_thinking": self.thinking.type != "disabled"},
        }
        return chat_of(body)
