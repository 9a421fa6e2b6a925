"""Bodies of Ollama's API, which become chats or completions."""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from mlx_tq.server.schemas import (
    ChatRequest,
    CompletionRequest,
    FailFastList,
    Loose,
    Penalty,
    Probability,
    RepetitionPenalty,
    Stop,
    Strict,
    Temperature,
    TopLogprobs,
    chat_of,
)
from mlx_tq.server.system_messages import join_leading
from mlx_tq.server.vendor_fields import template_options

_TAG = ":latest"  # that clients append to names without one
# Settings of Ollama's own engine. The context length is the server's.
_ENGINE_OPTIONS = (
    *("num_ctx", "num_batch", "num_gpu", "main_gpu", "num_thread", "num_keep", "numa", "low_vram", "f16_kv"),
    *("use_mmap", "use_mlock", "vocab_only", "logits_all", "embedding_only", "penalize_newline"),
)
_ALL_TOKENS = 2**31 - 1

Integer = Annotated[int, Field(ge=-(2**31), lt=2**31)]
Message = dict[str, Any]  # of a chat


def _refuse_images(images: Any) -> Any:
    if images:
        raise ValueError("the models of this server read text only; remove the images")
    return images


class CalledFunction(Loose):
    name: str
    arguments: dict[str, Any] | None = None


class Call(Loose):
    id: str | None = None
    function: CalledFunction


class OllamaMessage(Loose):
    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: list[Any] | None = None
    tool_calls: FailFastList[Call] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None

    _refuse_images = field_validator("images", mode="before")(_refuse_images)

    def to_message(self) -> Message:
        calls = [{"id": call.id, "function": call.function.model_dump()} for call in self.tool_calls or []]
        return {
            "role": self.role,
            "content": self.content or "",
            "reasoning": self.thinking,
            "tool_calls": calls or None,
            "name": self.tool_name,
            "tool_call_id": self.tool_call_id,
        }


class OllamaTool(Loose):
    function: dict[str, Any]


class OllamaOptions(Strict):
    ignored = _ENGINE_OPTIONS

    num_predict: Integer | None = None
    temperature: Temperature | None = None
    top_p: Probability | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    min_p: Probability | None = None
    repeat_penalty: RepetitionPenalty | None = None
    repeat_last_n: Integer | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: str | Annotated[FailFastList[Stop], Field(max_length=16)] | None = None

    def to_body(self) -> dict[str, Any]:
        """Return these options as fields of a chat. Negative numbers, and an empty stop, stand for the default."""
        penalty = 1.0 if self.repeat_last_n == 0 else self.repeat_penalty
        context_size = _ALL_TOKENS if (self.repeat_last_n or 0) < 0 else self.repeat_last_n or None
        return {
            **self.model_dump(
                include={"temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty"}
            ),
            "max_tokens": self.num_predict if (self.num_predict or 0) > 0 else None,
            "repetition_penalty": penalty,
            "repetition_context_size": context_size,
            "seed": self.seed if (self.seed or 0) >= 0 else None,
            "stop": self.stop or None,
        }


class OllamaRequest(Strict):
    """Fields common to /api/chat and /api/generate. An answer is streamed unless `stream` is false."""

    ignored = ("keep_alive",)

    model: Annotated[str, Field(min_length=1)]
    stream: bool | None = None
    think: bool | str | None = None
    format: str | dict[str, Any] | None = None
    options: OllamaOptions | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None

    @property
    def served_name(self) -> str:
        return self.model.removesuffix(_TAG)

    @field_validator("format")
    @classmethod
    def _check_format(cls, value: Any) -> Any:
        if isinstance(value, str) and value not in ("", "json"):
            raise ValueError("Input should be 'json' or a JSON schema")
        return value

    def to_body(self) -> dict[str, Any]:
        """Return what an answer should be, as fields of a chat."""
        schema = {"schema": self.format} if isinstance(self.format, dict) else {}
        effort = {"reasoning_effort": self.think} if isinstance(self.think, str) else {"enable_thinking": self.think}
        return {
            **({} if self.options is None else self.options.to_body()),
            "model": self.served_name,
            "stream": self.stream is not False,
            "response_format": {"type": "json_object", **schema} if self.format else None,
            "chat_template_kwargs": template_options(effort) or None,
            "logprobs": self.logprobs,
            "top_logprobs": self.top_logprobs if self.logprobs else None,
        }


class OllamaChat(OllamaRequest):
    """The body of a request to /api/chat; without messages it only loads the model."""

    messages: FailFastList[OllamaMessage] | None = None
    tools: FailFastList[OllamaTool] | None = None

    @property
    def only_loads(self) -> bool:
        return not self.messages

    def to_request(self) -> ChatRequest:
        messages = [message.to_message() for message in self.messages or []]
        tools = [{"type": "function", "function": tool.function} for tool in self.tools or []]
        return chat_of({**self.to_body(), "messages": join_leading(messages), "tools": tools or None})


class OllamaPrompt(OllamaRequest):
    """The body of a request to /api/generate; without a prompt it only loads the model. `raw` skips the template."""

    prompt: str = ""
    system: str | None = None
    images: list[Any] | None = None
    raw: bool | None = None

    _refuse_images = field_validator("images", mode="before")(_refuse_images)

    @property
    def only_loads(self) -> bool:
        return not self.prompt

    def to_request(self) -> ChatRequest | CompletionRequest:
        body = self.to_body()
        if self.raw:
            names = CompletionRequest.model_fields.keys() & body.keys() - {"logprobs"}
            return CompletionRequest(prompt=self.prompt, **{name: body[name] for name in names})
        system = [{"role": "system", "content": self.system}] if self.system else []
        return chat_of({**body, "messages": [*system, {"role": "user", "content": self.prompt}]})


class OllamaModelName(Loose):
    """The body of a request to /api/show; earlier clients call the model `name`."""

    model: str | None = None
    name: str | None = None

    @property
    def served_name(self) -> str | None:
        name = self.model or self.name
        return name and name.removesuffix(_TAG)
