"""Request bodies. Unknown fields are ignored and named, or refused, as OpenAI does."""

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from http_limits.json_body import parse_json
from mlx_tq.cli.options import LOWEST_PENALTY
from mlx_tq.rescue import MAX_TEXT
from mlx_tq.server.api_errors import ApiError, InvalidRequestError
from mlx_tq.server.tool_choice import ToolChoiceField, with_sorted_keys
from mlx_tq.server.vendor_fields import (
    REFUSED,
    template_options,
    thinking_budget,
    translate_chat,
    translate_generation,
    translate_response,
)

_MAX_ERRORS = 3  # that one response reports
_MAX_NAME = 100  # characters of a name from the request that an error repeats
_MAX_IGNORED = 16  # names of an object's fields that a response repeats
_ABSENT = object()
# Replacements for pydantic messages that name Python types.
_MESSAGES = {
    "extra_forbidden": "unsupported parameter; remove it",
    "list_type": "Input should be a valid array",
    "dict_type": "Input should be an object",
    "model_type": "Input should be an object",
    "model_attributes_type": "Input should be an object",
    "none_required": "not supported here; leave it out",
}

Element = TypeVar("Element")
Body = TypeVar("Body", bound=BaseModel)
# Validation stops at the first wrong element, so that the number of errors does not grow with the request.
FailFastList = Annotated[list[Element], Field(fail_fast=True)]
FailFastDict = Annotated[dict[str, Element], Field(fail_fast=True)]


def _requires(flag: str) -> AfterValidator:
    """Refuse a value that is set while an earlier field `flag` is not true."""

    def check(value: Element, info: ValidationInfo) -> Element:
        if value and not info.data.get(flag):
            raise ValueError(f"requires {flag}=true")
        return value

    return AfterValidator(check)


def _check_repetition_penalty(penalty: float) -> float:
    if 0 < penalty < LOWEST_PENALTY:
        raise ValueError(f"Input should be 0 (off) or at least {LOWEST_PENALTY}")
    return penalty


Count = Annotated[int, Field(ge=1, lt=2**31)]
PromptInput = Annotated[str, Field(min_length=1)] | Annotated[FailFastList[int], Field(min_length=1)]  # text or ids
Probability = Annotated[float, Field(ge=0, le=1)]
Temperature = Annotated[float, Field(ge=0, le=100)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
RepetitionPenalty = Annotated[float, Field(ge=0, le=10), AfterValidator(_check_repetition_penalty)]
Stop = Annotated[str, Field(min_length=1, max_length=256)]
MetadataText = Annotated[str, Field(max_length=512)]
TopLogprobs = Annotated[int, Field(ge=0, le=20)]


class Strict(BaseModel):
    """Objects whose unknown fields are errors, or are named and dropped."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    # OpenAI's bookkeeping, which is accepted and changes no answer.
    ignored: ClassVar[tuple[str, ...]] = ()
    # Gives a body the names and values of this server, unless unknown fields are errors; may add to what is ignored.
    translate: ClassVar[Callable[[dict[str, Any], set[str]], dict[str, Any]] | None] = None

    @model_validator(mode="before")
    @classmethod
    def _drop_fields(cls, value: Any, info: ValidationInfo) -> Any:
        """Drop ignored fields, and unknown ones beyond the number that an error reports.

        With a context, a set, other unknown fields are dropped, too, and their names added to it.
        """
        if not isinstance(value, dict):
            return value
        ignored: set[str] | None = info.context
        if ignored is not None and cls.translate is not None:
            value = cls.translate(value, ignored)
        names = {field.alias or name for name, field in cls.model_fields.items()}
        unknown = [name for name in value if name not in names and name not in cls.ignored]
        if ignored is not None:
            refused = [name for name in unknown if name in REFUSED]
            ignored.update(islice((name for name in unknown if name not in REFUSED), _MAX_IGNORED))
            unknown = [name for name in refused if value[name]]  # others ask for nothing
        return {name: value[name] for name in (*unknown[:_MAX_ERRORS], *names) if name in value}


def without_none(model: BaseModel) -> dict[str, Any]:
    """Return the fields that are set; unlike `model_dump`, without copying what may be megabytes of JSON."""
    return {name: value for name, value in model if value is not None}


class Loose(BaseModel):
    """Objects that clients send back as they received them, with fields of OpenAI's that mean nothing here."""

    model_config = ConfigDict(extra="ignore", strict=True)


# Messages and tools.


def _refuse_other_parts(part: Any) -> Any:
    if isinstance(part, dict) and "text" not in str(part.get("type", "text")):
        raise ValueError("the models of this server read text only; remove the image, audio or file")
    return part


class TextPart(Strict):
    type: Literal["text"]
    text: str

    _refuse_other_parts = model_validator(mode="before")(_refuse_other_parts)


class Function(Loose):
    name: str
    arguments: str | dict[str, Any] | list[Any] | None = ""


class ToolCall(Loose):
    id: str | None = None
    type: Literal["function"] = "function"
    function: Function


class Message(Loose):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | FailFastList[TextPart] | None = Field(_ABSENT, validate_default=True)  # may be null, not absent
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: FailFastList[ToolCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _require_content(cls, content: Any, info: ValidationInfo) -> Any:
        if content is not _ABSENT:
            return content
        if info.data.get("role") in ("system", "developer", "user"):
            raise ValueError(f"a message of the role {info.data['role']} needs a text")
        return None


class FunctionTool(Strict):
    type: Literal["function"]
    function: dict[str, Any]


class StreamOptions(Strict):
    ignored = ("include_obfuscation",)

    include_usage: bool | None = None


# Formats of answers.


class TextFormat(Strict):
    type: Literal["text"]


class ObjectFormat(Strict):
    """A JSON object; llama.cpp also takes a schema here."""

    type: Literal["json_object"]
    schema_: dict[str, Any] | None = Field(None, alias="schema")


class NamedSchema(Strict):
    """A JSON schema. It is always followed strictly, with and without `strict`."""

    schema_: dict[str, Any] = Field(alias="schema")
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class SchemaFormat(Strict):
    type: Literal["json_schema"]
    json_schema: NamedSchema


class GrammarFormat(Strict):
    type: Literal["grammar"]
    syntax: Literal["lark", "regex"]
    definition: str


ResponseFormat = Annotated[TextFormat | ObjectFormat | SchemaFormat | GrammarFormat, Field(discriminator="type")]


# Requests.

_BOOKKEEPING = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")


class GenerationRequest(Strict):
    ignored = (*_BOOKKEEPING, "reasoning_effort")
    translate = translate_generation

    model: str | None = None
    stream: bool | None = None
    stream_options: Annotated[StreamOptions | None, _requires("stream")] = None
    max_tokens: Count | None = None
    temperature: Temperature | None = None
    top_p: Probability | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    min_p: Probability | None = None
    repetition_penalty: RepetitionPenalty | None = None
    repetition_context_size: Count | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: FailFastDict[Annotated[float, Field(ge=-100, le=100)]] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**64)] | None = None
    stop: Stop | Annotated[FailFastList[Stop], Field(max_length=16)] | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def wants_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def answer_tokens(self) -> int | None:
        return self.max_tokens


class ChatRequest(GenerationRequest):
    translate = translate_chat

    messages: Annotated[FailFastList[Message], Field(min_length=1)]
    max_completion_tokens: Count | None = None
    tools: FailFastList[FunctionTool] | None = None
    tool_choice: ToolChoiceField = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[TopLogprobs | None, _requires("logprobs")] = None
    response_format: ResponseFormat | None = None
    modalities: FailFastList[Literal["text"]] | None = None
    chat_template_kwargs: FailFastDict[str | int | float | bool | None] | None = None
    thinking_budget: Count | None = None

    @model_validator(mode="before")
    @classmethod
    def _apply_effort(cls, value: Any) -> Any:
        """Apply OpenAI's field for reasoning, also where other fields are refused."""
        if not isinstance(value, dict) or not isinstance(value.get("reasoning_effort"), str):
            return value
        given = value.get("chat_template_kwargs") or {}
        options = template_options({"reasoning_effort": value["reasoning_effort"]})
        return {**value, "chat_template_kwargs": {**options, **given}} if isinstance(given, dict) else value

    @property
    def answer_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def callable_tools(self) -> list[dict[str, Any]]:
        is_none = self.tool_choice is not None and self.tool_choice.mode == "none"
        return [] if is_none else [dict(tool) for tool in self.tools or []]

    @property
    def sorted_tools(self) -> list[dict[str, Any]]:
        """The tools as the model sees them."""
        return [with_sorted_keys(tool) for tool in self.callable_tools]

    @property
    def has_one_call(self) -> bool:
        return self.parallel_tool_calls is False or (self.tool_choice is not None and self.tool_choice.has_one_call)

    @property
    def prefill(self) -> Message | None:
        """The last message, if it is the start of the answer."""
        last = self.messages[-1]
        return last if last.role == "assistant" and not last.tool_calls else None


class CompletionRequest(GenerationRequest):
    prompt: PromptInput | Annotated[FailFastList[PromptInput], Field(min_length=1, max_length=128)]
    best_of: Literal[1] | None = None
    echo: Literal[False] | None = None
    suffix: None = None
    logprobs: None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        tokens = [part for part in self.prompt if isinstance(part, int)]
        return [tokens] if tokens else [part for part in self.prompt if not isinstance(part, int)]


EmbeddingInput = Annotated[str, Field(min_length=1, max_length=MAX_TEXT)]


class EmbeddingRequest(Strict):
    ignored = ("user",)

    model: str | None = None
    input: EmbeddingInput | Annotated[FailFastList[EmbeddingInput], Field(min_length=1, max_length=2048)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Count | None = None

    @field_validator("input", mode="before")
    @classmethod
    def _refuse_tokens(cls, value: Any) -> Any:
        if isinstance(value, list) and any(isinstance(part, int | list) for part in value):
            raise ValueError(
                "token ids are not supported, because the embedder has its own tokenizer; send strings (LangChain's "
                "OpenAIEmbeddings does so with check_embedding_ctx_length=False)"
            )
        return value


# /v1/responses, which becomes a chat.


class InputText(Loose):
    type: Literal["input_text", "output_text"]
    text: str

    _refuse_other_parts = model_validator(mode="before")(_refuse_other_parts)


Texts = str | FailFastList[InputText]
ChatMessage = dict[str, Any]


def _assistant_turn(messages: list[ChatMessage]) -> ChatMessage:
    """Return the assistant's turn at the end, which is begun if need be: the items of a response are one turn."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


class MessageItem(Loose):
    role: Literal["system", "developer", "user", "assistant"]
    content: Texts

    @property
    def text(self) -> str:
        return _join(self.content)

    def add_to(self, messages: list[ChatMessage]) -> None:
        if self.role == "assistant":
            _assistant_turn(messages)["content"] += self.text
        else:
            messages.append({"role": self.role, "content": self.text})


class CallItem(Loose):
    call_id: str
    name: str
    arguments: str | dict[str, Any] | list[Any] | None = ""
    namespace: str | None = None

    def add_to(self, messages: list[ChatMessage]) -> None:
        function = {"name": full_name(self.name, self.namespace), "arguments": self.arguments}
        _assistant_turn(messages).setdefault("tool_calls", []).append({"id": self.call_id, "function": function})


class CustomCallItem(Loose):
    call_id: str
    name: str
    input: str
    namespace: str | None = None

    def add_to(self, messages: list[ChatMessage]) -> None:
        CallItem(
            call_id=self.call_id, name=self.name, namespace=self.namespace, arguments={"input": self.input}
        ).add_to(messages)


class CallOutputItem(Loose):
    """The result of a call. One without a call is what the client tells the model, such as Codex a new goal."""

    call_id: str | None = None
    name: str | None = None
    output: Texts

    def add_to(self, messages: list[ChatMessage]) -> None:
        text = _join(self.output)
        if self.call_id is None:
            messages.append({"role": "user", "content": f"{self.name}: {text}" if self.name else text})
        else:
            messages.append({"role": "tool", "tool_call_id": self.call_id, "content": text})


class ReasoningText(Loose):
    text: str


class ReasoningItem(Loose):
    """The model's reasoning before the next message or call. If `content` is missing, the summary is used."""

    content: FailFastList[ReasoningText] | None = None
    summary: FailFastList[ReasoningText] | None = None

    def add_to(self, messages: list[ChatMessage]) -> None:
        if text := "".join(part.text for part in self.content or self.summary or []):
            turn = _assistant_turn(messages)
            turn["reasoning_content"] = turn.get("reasoning_content", "") + text


class CompactionItem(Loose):
    """The summary of what came before, as this server writes it: without encryption."""

    encrypted_content: str

    def add_to(self, messages: list[ChatMessage]) -> None:
        messages.append({"role": "user", "content": f"{_SUMMARY_TITLE}\n\n{self.encrypted_content}"})


class CompactionTrigger(Loose):
    """An item at the end of the input that requests a summary instead of an answer."""

    def add_to(self, messages: list[ChatMessage]) -> None:
        messages.append({"role": "user", "content": _SUMMARIZE})


class LeftOutItem(Loose):
    """A call that OpenAI's servers ran."""

    def add_to(self, messages: list[ChatMessage]) -> None:
        pass


class ResponseItem(Loose):
    """A whole response, which stands for the items of its output."""

    output: "FailFastList[Item]"

    def add_to(self, messages: list[ChatMessage]) -> None:
        for item in self.output:
            item.add_to(messages)


_SUMMARY_TITLE = "Summary of the conversation so far, which continues below:"
_SUMMARIZE = (
    "The context is nearly full. Write a summary of this conversation, from which you can continue the work without "
    "seeing the rest: what the user wants, in their words where these matter; what was done and found out, with names "
    "of files, commands and numbers; what was decided and why; what is left to do, and the next step. Write only the "
    "summary, and call no tool."
)
# Of the calls that OpenAI's servers run.
_LEFT_OUT = frozenset(
    f"{name}_call" for name in ("web_search", "file_search", "computer", "code_interpreter", "image_generation", "mcp")
)


def _item_tag(item: Any) -> Any:
    if isinstance(item, dict) and item.get("object") == "response":
        return "response"
    kind = item.get("type", "message") if isinstance(item, dict) else "message"
    if kind == "custom_tool_call_output":
        return "function_call_output"
    return "left_out" if isinstance(kind, str) and kind in _LEFT_OUT else kind


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[CustomCallItem, Tag("custom_tool_call")]
    | Annotated[CallOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[CompactionItem, Tag("compaction")]
    | Annotated[CompactionTrigger, Tag("compaction_trigger")]
    | Annotated[LeftOutItem, Tag("left_out")]
    | Annotated[ResponseItem, Tag("response")],
    Discriminator(
        _item_tag,
        custom_error_type="item_type",
        custom_error_message="its type should be one of 'message', 'function_call', 'function_call_output', "
        "'custom_tool_call', 'custom_tool_call_output', 'reasoning', 'compaction', 'compaction_trigger'",
    ),
]


class TextSchemaFormat(NamedSchema):
    type: Literal["json_schema"]


class TextOptions(Strict):
    format: Annotated[TextFormat | ObjectFormat | TextSchemaFormat, Field(discriminator="type")] | None = None
    verbosity: Any = None


class ResponseTool(Strict):
    """A function, or a custom tool, which is a function of one text; either may be of a namespace."""

    type: Literal["function", "custom"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    namespace: str | None = None

    @property
    def full_name(self) -> str:
        """The name that the model sees."""
        return full_name(self.name, self.namespace)

    def to_function(self) -> dict[str, Any]:
        text = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
        parameters = text if self.type == "custom" else self.parameters
        fields = {"name": self.full_name, "description": self.description, "parameters": parameters}
        return {name: value for name, value in fields.items() if value is not None}


def full_name(name: str, namespace: str | None) -> str:
    return f"{namespace}__{name}" if namespace else name


class ResponseRequest(Strict):
    """The body of a request to /v1/responses. Responses are not stored, so none can be continued by its id."""

    ignored = (*_BOOKKEEPING, "prompt_cache_retention", "max_tool_calls", "client_metadata", "context_management")
    translate = translate_response

    model: str | None = None
    input: Annotated[str, Field(min_length=1)] | Annotated[FailFastList[Item], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    temperature: Temperature | None = None
    top_p: Probability | None = None
    top_logprobs: TopLogprobs | None = None
    include: FailFastList[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    text: TextOptions | None = None
    reasoning: dict[str, Any] | None = None
    tools: FailFastList[ResponseTool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    previous_response_id: Any = None
    conversation: Any = None
    prompt: None = None
    background: Literal[False] | None = None
    truncation: Literal["auto", "disabled"] | None = None  # nothing is cut out of a conversation
    metadata: Annotated[FailFastDict[MetadataText], Field(max_length=16)] | None = None  # every response repeats it

    @field_validator("previous_response_id", "conversation")
    @classmethod
    def _refuse_stored(cls, value: Any) -> Any:
        if value is not None:
            raise ValueError("this server stores no responses; leave it out, and send the whole conversation as input")
        return value

    @property
    def items(self) -> "list[Item]":
        return [MessageItem(role="user", content=self.input)] if isinstance(self.input, str) else self.input

    @property
    def asks_for_summary(self) -> bool:
        return isinstance(self.items[-1], CompactionTrigger)

    def to_chat(self) -> ChatRequest:
        messages: list[ChatMessage] = []
        if self.instructions is not None:
            messages.append({"role": "system", "content": self.instructions})
        for item in self.items:
            item.add_to(messages)
        if not messages:
            raise InvalidRequestError("the input has no message; send at least one", "input")
        logprobs = "message.output_text.logprobs" in (self.include or [])
        if self.top_logprobs and not logprobs:
            message = "top_logprobs: requires message.output_text.logprobs in include"
            raise InvalidRequestError(message, "top_logprobs")
        response_format: dict[str, Any] | None = None
        if self.text is not None and self.text.format is not None:
            values = without_none(self.text.format)
            if "schema_" in values:
                values["schema"] = values.pop("schema_")
            is_schema = values["type"] == "json_schema"
            response_format = {"type": values.pop("type"), "json_schema": values} if is_schema else values
        tool_choice = self.tool_choice
        if self.asks_for_summary:  # which is a text
            tool_choice, response_format = "auto", None
        body = {
            **self.model_dump(include={"model", "temperature", "top_p", "stream", "top_logprobs"}),
            "tool_choice": tool_choice,
            "parallel_tool_calls": self.parallel_tool_calls,
            "chat_template_kwargs": template_options({"reasoning": self.reasoning}) or None,
            "thinking_budget": thinking_budget({"reasoning": self.reasoning}),
            "messages": messages,
            "max_tokens": self.max_output_tokens,
            "logprobs": logprobs,
            "response_format": response_format,
            "tools": [{"type": "function", "function": tool.to_function()} for tool in self.tools or []] or None,
        }
        return chat_of(body)


def chat_of(body: dict[str, Any]) -> ChatRequest:
    return request_of(ChatRequest, body)


def request_of(kind: type[Body], body: dict[str, Any]) -> Body:
    """Return the request that another API's body became; raise `InvalidRequestError` if it is not valid."""
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        raise _to_api_error(error.errors(include_url=False, include_input=False), body) from None


def _join(content: Texts) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


# Names of a chat's arguments in a request to /v1/responses, the longest first.
_RESPONSE_NAMES = {
    "response_format.json_schema.schema": "text.format.schema",
    "response_format": "text.format",
    "max_tokens": "max_output_tokens",
    "messages": "input",
}


def use_response_names(error: ApiError) -> None:
    """Rename the chat argument at fault to that of /v1/responses, in the error's param and message."""
    old = error.param or ""
    name = next((name for name in _RESPONSE_NAMES if old == name or old.startswith(f"{name}.")), None)
    if name is None:
        return
    new, message = _RESPONSE_NAMES[name] + old.removeprefix(name), str(error)
    # After the name at its start, a message may repeat the client's own words.
    starts_with_name = message.startswith(f"{old}: ")
    renamed = new + message.removeprefix(old) if starts_with_name else message.replace(name, _RESPONSE_NAMES[name])
    error.args, error.param = (renamed,), new


# Parsing.


def parse(kind: type[Body], body: bytes, ignored: set[str] | None = None) -> Body:
    """Parse and validate a request body; raise `InvalidRequestError` if it is not valid.

    Names of unknown fields are added to `ignored`; without it, they are errors.
    """
    try:
        value = parse_json(body)
    except ValueError as error:
        raise InvalidRequestError(f"Invalid JSON: {error}") from error
    try:
        return kind.model_validate(value, context=ignored)
    except ValidationError as error:
        invalid = _to_api_error(error.errors(include_url=False, include_input=False), value)
    # Raised outside the `except`, without `value`: the traceback would keep the parsed body alive and free it on the
    # event loop.
    del value
    raise invalid


def _to_api_error(errors: Sequence[Any], value: Any) -> InvalidRequestError:
    """Make one error of pydantic's, without the value: it may be the text of a conversation.

    For a union, pydantic reports why the value is of none of its types. Where it has one of the types, only that
    type's errors are useful.
    """
    entries = []
    for error in errors:
        message = _MESSAGES.get(error["type"], str(error["msg"]).removeprefix("Value error, "))
        if error["type"] == "union_tag_invalid":
            message = f"its type should be one of {error['ctx']['expected_tags']}"
        entries.append((".".join(_path(error, value)), message, error["type"].endswith("_type")))
    by_path: dict[str, list[str]] = {}
    for path, message, is_type in entries:
        if not (is_type and any(p.startswith(f"{path}.") or (p == path and not t) for p, _, t in entries)):
            by_path.setdefault(path, []).append(message)
    texts = []
    for path, (first, *others) in by_path.items():
        alternatives = [other.removeprefix("Input should be ") for other in dict.fromkeys(others) if other != first]
        texts.append(f"{path}: {' or '.join([first, *alternatives])}" if path else first)
    return InvalidRequestError("; ".join(texts[:_MAX_ERRORS]), next(iter(by_path)) or None)


def _path(error: Any, value: Any) -> list[str]:
    """Return the keys that lead to an error; pydantic puts the names of types between them."""
    path = []
    for position, part in enumerate(error["loc"], 1 - len(error["loc"])):  # 0 is the last
        if (isinstance(value, list) and isinstance(part, int)) or (isinstance(value, dict) and part in value):
            value = value[part]
        elif error["type"] not in ("missing", "value_error") or position:
            continue
        name = str(part)
        path.append(name if len(name) <= _MAX_NAME else f"{name[:_MAX_NAME]}...")
    return path
