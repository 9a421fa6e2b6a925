"""What a request to /v1/responses may say, and the conversation that it is."""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from mlx_tq.server.errors import InvalidRequestError
from mlx_tq.server.schemas import (
    MAX_TOP_LOGPROBS,
    ChatRequest,
    Count,
    FailFastList,
    Loose,
    NamedSchema,
    ObjectFormat,
    Share,
    StreamOptions,
    Strict,
    TextFormat,
)

# What a chat calls what is called otherwise here, the longest first.
_NAMES = {
    "response_format.json_schema.schema": "text.format.schema",
    "response_format": "text.format",
    "max_tokens": "max_output_tokens",
    "messages": "input",
}
LOGPROBS = "message.output_text.logprobs"  # the one thing to include that is here


class Text(Loose):
    """A piece of a message."""

    type: Literal["input_text", "output_text"]
    text: str


class SaidItem(Loose):
    """A message; its type may be left out."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | FailFastList[Text]

    @property
    def text(self) -> str:
        """All of its pieces."""
        return _joined(self.content)


class CallItem(Loose):
    """A call that the model made."""

    call_id: str
    name: str
    arguments: str


class OutputItem(Loose):
    """What a call gave."""

    call_id: str
    output: str | FailFastList[Text]


class ThoughtItem(Loose):
    """What the model thought, which later turns leave out."""


def _kind(item: Any) -> Any:
    return item.get("type", "message") if isinstance(item, dict) else "message"


Item = Annotated[
    Annotated[SaidItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[OutputItem, Tag("function_call_output")]
    | Annotated[ThoughtItem, Tag("reasoning")],
    Discriminator(
        _kind,
        custom_error_type="item_type",
        custom_error_message="its type should be one of "
        "'message', 'function_call', 'function_call_output', 'reasoning'",
    ),
]


class SchemaFormat(NamedSchema):
    """What a JSON schema describes."""

    type: Literal["json_schema"]


class TextOptions(Strict):
    """How the text is to be."""

    format: Annotated[TextFormat | ObjectFormat | SchemaFormat, Field(discriminator="type")] | None = None
    verbosity: Any = None


class Tool(Strict):
    """A function that the model may call."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseRequest(Strict):
    """The body of a request to /v1/responses."""

    model: str | None = None
    input: Annotated[str, Field(min_length=1)] | Annotated[FailFastList[Item], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Share | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    include: FailFastList[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    text: TextOptions | None = None
    tools: FailFastList[Tool] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    parallel_tool_calls: Literal[True] | None = None
    # No response is kept, so that nothing can go on behind one.
    previous_response_id: None = None
    conversation: None = None
    prompt: None = None
    background: Literal[False] | None = None
    truncation: Literal["disabled"] | None = None
    # Has no meaning here and changes no answer.
    store: Any = None
    reasoning: Any = None
    user: Any = None
    metadata: dict[str, Any] | None = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    max_tool_calls: Any = None

    def chat(self) -> ChatRequest:
        """Return the request as one to /v1/chat/completions.

        Raises:
            InvalidRequestError: the input holds no messages.
        """
        messages = self._messages()
        if not messages:
            raise InvalidRequestError("the input has no message; send at least one", "input")
        body = {
            "model": self.model,
            "messages": messages,
            "max_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "stream": self.stream,
            "logprobs": LOGPROBS in (self.include or []) or None,
            "top_logprobs": self.top_logprobs,
            "tool_choice": self.tool_choice,
            "response_format": self._format(),
        }
        if self.tools:
            functions = [tool.model_dump(exclude_none=True, exclude={"type", "strict"}) for tool in self.tools]
            body["tools"] = [{"type": "function", "function": function} for function in functions]
        return ChatRequest.model_validate(body)

    def _messages(self) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        if self.instructions is not None:
            messages.append({"role": "system", "content": self.instructions})
        items = [SaidItem(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        for item in items:
            if isinstance(item, SaidItem):
                messages.append({"role": item.role, "content": item.text})
            elif isinstance(item, CallItem):
                call = {"id": item.call_id, "function": {"name": item.name, "arguments": item.arguments}}
                if not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant", "content": None})
                messages[-1].setdefault("tool_calls", []).append(call)
            elif isinstance(item, OutputItem):
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _joined(item.output)})
        return messages

    def _format(self) -> dict[str, Any] | None:
        asked = self.text and self.text.format
        if asked is None:
            return None
        if isinstance(asked, SchemaFormat):
            schema = asked.model_dump(by_alias=True, exclude_none=True, exclude={"type"})
            return {"type": "json_schema", "json_schema": schema}
        return asked.model_dump(by_alias=True, exclude_none=True)


def in_own_names(error: InvalidRequestError) -> InvalidRequestError:
    """The error of the chat that a response is, with the argument at fault as the request calls it."""
    old = error.param or ""
    name = next((name for name in _NAMES if old == name or old.startswith(f"{name}.")), None)
    if name is None:
        return error
    own = _NAMES[name] + old.removeprefix(name)
    # Where a message begins with the place, it is that; what follows may be the client's own words.
    said = str(error)
    told = own + said.removeprefix(old) if said.startswith(f"{old}: ") else said.replace(name, _NAMES[name])
    return type(error)(told, own)


def _joined(content: str | list[Text]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)
