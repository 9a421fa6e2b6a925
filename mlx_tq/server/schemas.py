"""What a request may say. Unknown arguments are refused, as OpenAI does: nothing is silently ignored."""

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mlx_tq.server.errors import InvalidRequestError

MAX_STOPS = 4
MAX_TOP_LOGPROBS = 20
_MAX_FAULTS = 3

Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Stop = Annotated[str, Field(min_length=1, max_length=256)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class _Loose(BaseModel):
    """Objects that clients send back as they got them, with fields of OpenAI's that mean nothing here."""

    model_config = ConfigDict(extra="ignore", strict=True)


class TextPart(_Strict):
    """A piece of a message."""

    type: Literal["text"]
    text: str


class Function(_Loose):
    """A call that the model made."""

    name: str
    arguments: str | dict[str, Any] = ""


class ToolCall(_Loose):
    """A call that the model made, with its name in the conversation."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: Function


class Message(_Loose):
    """One turn."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None


class FunctionTool(_Strict):
    """A function that the model may call."""

    type: Literal["function"]
    function: dict[str, Any]


class StreamOptions(_Strict):
    """Of a stream."""

    include_usage: bool | None = None
    include_obfuscation: Any = None


class TextFormat(_Strict):
    """The only format that is served."""

    type: Literal["text"]


class Request(_Strict):
    """What both kinds of request have."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    min_p: Share | None = None
    repetition_penalty: Annotated[float, Field(ge=0, le=10)] | None = None
    repetition_context_size: Count | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**64)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None = None
    n: Literal[1] | None = None
    # What OpenAI's own bookkeeping uses; it has no meaning here and changes no answer.
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None

    @property
    def stops(self) -> list[str]:
        """The texts that end the answer."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def wants_usage(self) -> bool:
        """A stream ends with its counts."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def answer_tokens(self) -> int | None:
        """The most tokens to generate, if the request says."""
        return self.max_tokens


class ChatRequest(Request):
    """Of /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Count | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    parallel_tool_calls: Literal[True] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    response_format: TextFormat | None = None
    modalities: list[Literal["text"]] | None = None
    chat_template_kwargs: dict[str, str | int | float | bool | None] | None = None

    @property
    def answer_tokens(self) -> int | None:
        """The most tokens to generate, if the request says."""
        return self.max_completion_tokens or self.max_tokens


class CompletionRequest(Request):
    """Of /v1/completions."""

    prompt: Annotated[str, Field(min_length=1)] | Annotated[list[int], Field(min_length=1)]
    best_of: Literal[1] | None = None
    echo: Literal[False] | None = None
    suffix: None = None
    logprobs: None = None


Kind = TypeVar("Kind", bound=Request)


def parse(kind: type[Kind], body: bytes) -> Kind:
    """A request from JSON.

    Raises:
        InvalidRequestError: it is no JSON, or arguments are missing, unknown, or of wrong type or range.
    """
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        faults = error.errors(include_url=False, include_input=False)
    first = faults[0]
    param = ".".join(str(part) for part in first["loc"]) or None
    said = "; ".join(_fault(fault) for fault in faults[:_MAX_FAULTS])
    raise InvalidRequestError(said, param)


def _fault(fault: Any) -> str:
    """Where and what is wrong, without the value: it may be the text of a conversation."""
    where = ".".join(str(part) for part in fault["loc"])
    if fault["type"] == "extra_forbidden":
        return f"{where}: this server has no such argument; leave it out"
    return f"{where}: {fault['msg']}" if where else str(fault["msg"])
