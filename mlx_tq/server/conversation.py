"""From messages or text to token ids, cut where a later request is likely to begin the same way."""

import inspect
import json
import secrets
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from threading import Lock
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from mlx_tq.errors import ConfigError
from mlx_tq.server import schemas
from mlx_tq.server.errors import ContextLengthError, InvalidRequestError
from mlx_tq.server.schemas import ChatRequest
from mlx_tq.session.prompt_length import PromptLengthLimit

Message = dict[str, Any]  # as templates expect it

# A template's last tokens among which it may open the model's reasoning.
_TAIL = 11
# Arguments of the template that are the server's own to set.
_RESERVED = set(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters)


@dataclass(frozen=True)
class Prompt:
    """Token ids, and where they may be cut.

    Attributes:
        ids: all tokens.
        segments: the same tokens in parts; the cache is worth keeping at the end of each.
        kinds: of the segments, mlx-lm's "system", "user" or "assistant".
        state: "reasoning" where the template has opened the model's thoughts, else "normal".
    """

    ids: list[int]
    segments: list[list[int]]
    kinds: list[str]
    state: str = "normal"


@dataclass(frozen=True)
class Parts:
    """New tokens of a conversation, around the words of the user that end it.

    Attributes:
        before: what the template puts before these words, earlier messages included.
        words: text; None where the last message is not the user's.
        after: what the template puts behind them.
        state: as of `Prompt`.
    """

    before: list[int]
    words: str | None
    after: list[int]
    state: str


class Conversations:
    """Render and tokenize prompts; thread-safe.

    Args:
        tokenizer: of the model.
        template_args: options of the chat template.
        positions: that the model allows, or None.
    """

    def __init__(self, tokenizer: Any, template_args: dict[str, Any], positions: int | None = None) -> None:
        self.tokenizer = self._tokenizer = tokenizer
        self._template_args = template_args
        self._limit = PromptLengthLimit(tokenizer, positions)
        # A fast tokenizer is thread-safe unless its truncation or padding changes, which the first call may do; hence
        # the `encode("")` below.
        is_fast = getattr(tokenizer, "is_fast", False)
        self._lock: AbstractContextManager[Any] = nullcontext() if is_fast else Lock()
        tokenizer.encode("")
        self.vocabulary = len(tokenizer.get_vocab())

    def text(self, prompt: str | list[int]) -> Prompt:
        """The prompt of a completion: text, or token ids.

        Raises:
            InvalidRequestError: a token that does not exist, or a text without tokens.
            ContextLengthError: the text is too long to be tokenized.
        """
        ids = self._encode(prompt, "prompt", special=True) if isinstance(prompt, str) else prompt
        if not ids:
            raise InvalidRequestError("the tokenizer makes no tokens of the prompt", "prompt")
        if not 0 <= min(ids) <= max(ids) < self.vocabulary:
            raise InvalidRequestError(f"the prompt has tokens outside of 0 to {self.vocabulary - 1}", "prompt")
        return Prompt(ids, [ids], ["assistant"])

    def chat(self, request: ChatRequest) -> Prompt:
        """The prompt of a conversation, in the model's chat template.

        Raises:
            InvalidRequestError: the model has no template, or its template refuses the conversation.
            ContextLengthError: the conversation is too long to be tokenized.
        """
        messages, options = self.read(request)
        prefilled = str(messages.pop()["content"]) if request.prefill else ""
        if not messages:
            raise InvalidRequestError("the one message is the answer's beginning; say what it answers", "messages")
        if prefilled:
            text = self._continued(messages, prefilled, options)
        else:
            text = self._render(messages, add_generation_prompt=True, **options)
        ids = self._encode(text, "messages")
        if not ids:
            raise InvalidRequestError("the tokenizer makes no tokens of the messages", "messages")
        tail = self._thoughts_start(ids)
        system = min(self._system_end(messages, ids, options), tail)
        kinds = {system: "system", len(ids): "assistant", tail: "user"}  # by where a segment ends
        ends = sorted(kinds.keys() - {0})
        return Prompt(
            ids,
            segments=[ids[start:end] for start, end in zip([0, *ends], ends, strict=False)],
            kinds=[kinds[end] for end in ends],
            state=self._state(ids),
        )

    def read(self, request: ChatRequest) -> tuple[list[Message], dict[str, Any]]:
        """The messages and the options of the template.

        Raises:
            InvalidRequestError: the model has no template, or not for this.
        """
        if not self._tokenizer.has_chat_template:
            raise InvalidRequestError(
                "the model has no chat template; use /v1/completions, or start the server with --chat-template"
            )
        return [_plain(message, place) for place, message in enumerate(request.messages)], self._options(request)

    def parts(self, messages: list[Message], options: dict[str, Any], heard: int) -> Parts | None:
        """What comes behind the first `heard` messages, the last of which is an answer without calls.

        None where the template does not show that answer as it is.

        Raises:
            InvalidRequestError: the template refuses the conversation.
            ContextLengthError: it is too long to be tokenized.
        """
        mark, words = secrets.token_hex(8), None  # letters that no template trims and no message holds
        marked = list(messages)
        if heard:
            marked[heard - 1] = {**marked[heard - 1], "content": f"Q{mark}H"}
        if messages[-1]["role"] == "user":
            words = messages[-1]["content"]
            marked[-1] = {**marked[-1], "content": f"Q{mark}W"}
        text = self._render(marked, add_generation_prompt=True, **options)
        if heard:
            _, found, text = text.partition(f"Q{mark}H")
            if not found:
                return None
        before, found, after = text.partition(f"Q{mark}W")
        if words is not None and not found:
            raise InvalidRequestError("the model's chat template does not show what the user says last", "messages")
        self._check_length(len(text) + len(words or ""), "messages")
        ids = [self._encode(each, "messages") for each in (before, after)]
        return Parts(ids[0], words, ids[1], self._state(ids[0] + ids[1]))

    def _check_length(self, characters: int, param: str) -> None:
        try:
            self._limit.check(characters)
        except ConfigError as error:
            raise ContextLengthError(str(error), param) from error

    def _encode(self, text: str, param: str, *, special: bool = False) -> list[int]:
        self._check_length(len(text), param)
        with self._lock:
            return list(self._tokenizer.encode(text, add_special_tokens=special))

    def _continued(self, messages: list[Message], answer: str, options: dict[str, Any]) -> str:
        """The conversation up to the end of an answer that is begun, as the template shows any answer."""
        mark = f"Q{secrets.token_hex(8)}A"
        text = self._render([*messages, {"role": "assistant", "content": mark}], **options)
        before, found, _ = text.partition(mark)
        if not found:
            raise InvalidRequestError("the model's chat template does not show what the assistant says", "messages")
        return before + answer

    def _options(self, request: ChatRequest) -> dict[str, Any]:
        asked = request.chat_template_kwargs or {}
        if wrong := sorted(set(asked) & _RESERVED):
            raise InvalidRequestError(f"chat_template_kwargs may not set {', '.join(wrong)}", "chat_template_kwargs")
        tools = [tool.model_dump() for tool in request.tools or []] if request.tool_choice != "none" else []
        if tools and not self._tokenizer.has_tool_calling:
            raise InvalidRequestError("the model's chat template has no tools; leave them out", "tools")
        return {**self._template_args, **asked, "tools": tools or None}

    def _render(self, messages: list[Message], **options: Any) -> str:
        try:
            return str(self._tokenizer.apply_chat_template(messages, tokenize=False, **options))
        except (TemplateError, TypeError, ValueError, KeyError) as error:  # whatever a template trips over
            raise InvalidRequestError(
                f"the model's chat template refuses this conversation: {error}", "messages"
            ) from error

    def _system_end(self, messages: list[Message], ids: list[int], options: dict[str, Any]) -> int:
        """How many tokens any conversation with these system messages begins with."""
        count = next((i for i, message in enumerate(messages) if message["role"] != "system"), len(messages))
        if not 0 < count < len(messages):
            return 0
        try:
            other = self._encode(
                self._render([*messages[:count], {"role": "user", "content": ""}], **options), "messages"
            )
        except InvalidRequestError:
            return 0
        return next((i for i, (a, b) in enumerate(zip(ids, other, strict=False)) if a != b), 0)

    def _thoughts_start(self, ids: list[int]) -> int:
        """Where the template opens the reasoning, which later turns leave out; the end if it does not."""
        if not self._tokenizer.has_thinking:
            return len(ids)
        found = self._tokenizer.rfind_think_start(ids, start=len(ids) - _TAIL)
        return int(found) if found > 0 else len(ids)

    def _state(self, ids: list[int]) -> str:
        tokenizer = self._tokenizer
        thinks = tokenizer.has_thinking and tokenizer.rfind_think_start(ids) > tokenizer.rfind_think_end(ids)
        return "reasoning" if thinks else tokenizer.response_initial_state or "normal"


def _plain(message: schemas.Message, place: int) -> Message:
    """A message as templates expect it."""
    plain = message.model_dump(exclude_none=True)
    if message.role == "developer":
        plain["role"] = "system"
    if isinstance(message.content, list):
        plain["content"] = "".join(part.text for part in message.content)
    plain.setdefault("content", "")
    for call in plain.get("tool_calls", []):
        arguments = call["function"]["arguments"]
        if isinstance(arguments, str):
            call["function"]["arguments"] = _arguments(arguments, place)
    return plain


def _arguments(text: str, place: int) -> Any:
    try:
        return json.loads(text or "{}")
    except json.JSONDecodeError as error:
        where = f"messages.{place}.tool_calls"
        raise InvalidRequestError(f"{where}: the arguments of a call are not JSON ({error})", where) from error
