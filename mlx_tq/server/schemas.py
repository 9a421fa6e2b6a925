"""What a request may say. Unknown arguments are refused, as OpenAI does: nothing is silently ignored."""

import gc
from collections.abc import Sequence
from itertools import islice
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import from_json

from mlx_tq.server.errors import InvalidRequestError

MAX_STOPS = 16
MAX_CHOICES = 128
MAX_PROMPTS = 128
MAX_TOP_LOGPROBS = 20
_MAX_FAULTS = 3
_MAX_NAME = 100  # characters of a name from the request that an error repeats
_MIN_REPETITION_PENALTY = 0.01  # logits are divided by it, and must stay finite in float16
_ABSENT = object()
# Replacements for pydantic messages that name Python types.
_MESSAGES = {
    "extra_forbidden": "this server has no such argument; leave it out",
    "list_type": "Input should be a valid array",
    "dict_type": "Input should be an object",
    "model_type": "Input should be an object",
    "model_attributes_type": "Input should be an object",
    "none_required": "Input should be null",
}

Element = TypeVar("Element")
# Validation stops at the first wrong element, so that the number of errors does not grow with the request.
FailFastList = Annotated[list[Element], Field(fail_fast=True)]
FailFastDict = Annotated[dict[str, Element], Field(fail_fast=True)]


def _check_repetition_penalty(penalty: float) -> float:
    if 0 < penalty < _MIN_REPETITION_PENALTY:
        raise ValueError(f"Input should be 0 (off) or at least {_MIN_REPETITION_PENALTY}")
    return penalty


Count = Annotated[int, Field(ge=1, lt=2**31)]
Prompt = Annotated[str, Field(min_length=1)] | Annotated[FailFastList[int], Field(min_length=1)]  # text, or token ids
Share = Annotated[float, Field(ge=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
RepetitionPenalty = Annotated[float, Field(ge=0, le=10), AfterValidator(_check_repetition_penalty)]
Stop = Annotated[str, Field(min_length=1, max_length=256)]


class Strict(BaseModel):
    """Objects of which every field has a meaning."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _drop_excess_unknown_fields(cls, value: Any) -> Any:
        """Drop unknown arguments beyond the number that an error reports."""
        if not isinstance(value, dict) or len(value) <= len(cls.model_fields) + _MAX_FAULTS:
            return value
        names = {field.alias or name for name, field in cls.model_fields.items()}
        unknown = islice((name for name in value if name not in names), _MAX_FAULTS)
        return {name: value[name] for name in (*unknown, *names) if name in value}


class Loose(BaseModel):
    """Objects that clients send back as they got them, with fields of OpenAI's that mean nothing here."""

    model_config = ConfigDict(extra="ignore", strict=True)


class TextPart(Strict):
    """A piece of a message."""

    type: Literal["text"]
    text: str


class Function(Loose):
    """A call that the model made."""

    name: str
    arguments: str | dict[str, Any] = ""


class ToolCall(Loose):
    """A call that the model made, with its name in the conversation."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: Function


class Message(Loose):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    # null is a message without words
    content: str | FailFastList[TextPart] | None = Field(_ABSENT, validate_default=True)
    reasoning: str | None = None
    tool_calls: FailFastList[ToolCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _is_said(cls, content: Any, info: ValidationInfo) -> Any:
        if content is not _ABSENT:
            return content
        if info.data.get("role") in ("system", "developer", "user"):
            raise ValueError(f"a message of the role {info.data['role']} needs a text")
        return None


class FunctionTool(Strict):
    """A function that the model may call."""

    type: Literal["function"]
    function: dict[str, Any]


class StreamOptions(Strict):
    """What a request may say of its stream."""

    include_usage: bool | None = None
    include_obfuscation: Any = None


class TextFormat(Strict):
    """Whatever the model says."""

    type: Literal["text"]


class ObjectFormat(Strict):
    """A JSON object, of a schema where there is one, as llama.cpp takes it."""

    type: Literal["json_object"]
    described_by: dict[str, Any] | None = Field(None, alias="schema")


class NamedSchema(Strict):
    """A JSON schema, with what OpenAI's models read of it; it is followed to the letter with and without `strict`."""

    described_by: dict[str, Any] = Field(alias="schema")
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class SchemaFormat(Strict):
    """What a JSON schema describes."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


class GrammarFormat(Strict):
    """What a grammar or a regular expression describes."""

    type: Literal["grammar"]
    syntax: Literal["lark", "regex"]
    definition: str


Format = Annotated[TextFormat | ObjectFormat | SchemaFormat | GrammarFormat, Field(discriminator="type")]


class Request(Strict):
    """What both kinds of request have."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    min_p: Share | None = None
    repetition_penalty: RepetitionPenalty | None = None
    repetition_context_size: Count | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: FailFastDict[Annotated[float, Field(ge=-100, le=100)]] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**64)] | None = None
    stop: Stop | Annotated[FailFastList[Stop], Field(max_length=MAX_STOPS)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    # What OpenAI's own bookkeeping uses; it has no meaning here and changes no answer.
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    reasoning_effort: Any = None  # of OpenAI's own models; of a template it is one of chat_template_kwargs

    @field_validator("stream_options")
    @classmethod
    def _of_a_stream(cls, options: StreamOptions | None, info: ValidationInfo) -> StreamOptions | None:
        if options is not None and not info.data.get("stream"):
            raise ValueError("it says something of a stream: send stream, true, or leave it out")
        return options

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
    """The body of a request to /v1/chat/completions."""

    messages: Annotated[FailFastList[Message], Field(min_length=1)]
    max_completion_tokens: Count | None = None
    tools: FailFastList[FunctionTool] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    parallel_tool_calls: Literal[True] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    response_format: Format | None = None
    modalities: FailFastList[Literal["text"]] | None = None
    chat_template_kwargs: FailFastDict[str | int | float | bool | None] | None = None

    @field_validator("top_logprobs")
    @classmethod
    def _beside_logprobs(cls, count: int | None, info: ValidationInfo) -> int | None:
        if count and not info.data.get("logprobs"):
            raise ValueError("it says something of logprobs: send logprobs, true, or leave it out")
        return count

    @property
    def answer_tokens(self) -> int | None:
        """The most tokens to generate, if the request says."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def prefill(self) -> Message | None:
        """The last message, where the answer goes on behind its words."""
        last = self.messages[-1]
        return last if last.role == "assistant" and not last.tool_calls else None


class CompletionRequest(Request):
    """The body of a request to /v1/completions."""

    prompt: Prompt | Annotated[FailFastList[Prompt], Field(min_length=1, max_length=MAX_PROMPTS)]
    best_of: Literal[1] | None = None
    echo: Literal[False] | None = None
    suffix: None = None
    logprobs: None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """Each prompt, as text or token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        tokens = [part for part in self.prompt if isinstance(part, int)]
        return [tokens] if tokens else [part for part in self.prompt if not isinstance(part, int)]


Kind = TypeVar("Kind", bound=Strict)


def parse(kind: type[Kind], body: bytes) -> Kind:
    """Read a request from JSON.

    Raises:
        InvalidRequestError: it is no JSON, or arguments are missing, unknown, or of wrong type or range.
    """
    try:
        value = _parse_json(body)
    except ValueError as error:
        raise InvalidRequestError(f"Invalid JSON: {error}") from error
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        invalid = _make_error(error.errors(include_url=False, include_input=False), value)
    # Raised outside the `except`, without `value`: the traceback would keep the parsed body alive and free it on the
    # event loop.
    del value
    raise invalid


def _parse_json(body: bytes) -> Any:
    # With a million lists, garbage collection takes most of the time and holds the GIL.
    gc.disable()
    try:
        return from_json(body)
    finally:
        gc.enable()


def _make_error(faults: Sequence[Any], value: Any) -> InvalidRequestError:
    said: dict[str, list[str]] = {}
    for where, message in _places(faults, value):
        said.setdefault(where, []).append(message)
    messages = [f"{where}: {_either(each)}" if where else each[0] for where, each in said.items()]
    return InvalidRequestError("; ".join(messages[:_MAX_FAULTS]), next(iter(said)) or None)


def _places(faults: Sequence[Any], value: Any) -> list[tuple[str, str]]:
    """Where, and what is wrong there, without the value: it may be the text of a conversation.

    Of an argument that may have several types, pydantic says for each type why it is not that one. Where a value has
    the type of one, only what that one says is of use.
    """
    found = []
    for fault in faults:
        where = ".".join(_path(fault, value))
        message = _MESSAGES.get(fault["type"], str(fault["msg"]).removeprefix("Value error, "))
        if fault["type"] == "union_tag_invalid":
            message = f"its type should be one of {fault['ctx']['expected_tags']}"
        found.append((where, message, fault["type"].endswith("_type")))
    return [
        (where, message)
        for where, message, is_type in found
        if not (is_type and any(other.startswith(f"{where}.") or (other == where and not t) for other, _, t in found))
    ]


def _path(fault: Any, value: Any) -> list[str]:
    """The place of a fault in the request; pydantic puts the names of types between."""
    path = []
    for at, part in enumerate(fault["loc"], 1 - len(fault["loc"])):  # 0 is the last
        if (isinstance(value, list) and isinstance(part, int)) or (isinstance(value, dict) and part in value):
            value = value[part]
        elif fault["type"] not in ("missing", "value_error") or at:
            continue
        name = str(part)
        path.append(name if len(name) <= _MAX_NAME else f"{name[:_MAX_NAME]}...")
    return path


def _either(messages: list[str]) -> str:
    first, *others = dict.fromkeys(messages)
    return " or ".join([first, *(other.removeprefix("Input should be ") for other in others)])
