"""`PromptBuilder`: from messages or text to token ids, split where later requests are likely to share the prefix."""

import inspect
import json
import secrets
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from threading import Lock
from typing import Any

import numpy as np
from pydantic_core import from_json
from transformers import PreTrainedTokenizerBase

from mlx_tq.errors import ConfigError
from mlx_tq.grammar.call_grammar import GENERIC_FORM, CallForm
from mlx_tq.prefix_cache.prefix_cache import common_prefix
from mlx_tq.server import schemas
from mlx_tq.server.api_errors import ContextLengthError, InvalidRequestError, RequiredCallError
from mlx_tq.server.kept_thoughts import KeptThoughts, add_to_digest, thoughts_key
from mlx_tq.server.schemas import ChatRequest
from mlx_tq.server.system_messages import fold_later, has_later, join_leading
from mlx_tq.server.template_fixes import TEMPLATE_FIXES
from mlx_tq.server.tools_as_text import calls_as_text, describe_tools
from mlx_tq.session.text import TEMPLATE_ERRORS, PlainText, PromptLengthLimit, is_reasoning_open, unescape

Message = dict[str, Any]  # as templates expect it

_REASONING_NAMES = ("reasoning_content", "reasoning", "thinking")  # in messages, of templates
_RESERVED = {"messages", *inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters}


@dataclass(frozen=True)
class Prompt:
    """Token ids, and their segments, at whose ends the cache is worth storing.

    `state` is "reasoning" where the template has opened the model's reasoning, else "normal".
    """

    ids: list[int]
    segments: list[list[int]]
    state: str = "normal"

    def remaining_segments(self, cached_tokens: int) -> list[list[int]]:
        """Return what the segments hold after the first `cached_tokens`."""
        segments = []
        for segment in self.segments:
            if len(segment) > cached_tokens:
                segments.append(segment[cached_tokens:])
            cached_tokens = max(0, cached_tokens - len(segment))
        return segments


class PromptBuilder:
    """Renders and tokenizes prompts; thread-safe. `positions` is the model's context length, or None.

    `template_name` says in errors which chat template is meant. With `splits_answer`, what begins the answer is a
    segment of its own, for caches that cannot be cut to any prefix.
    """

    def __init__(
        self,
        tokenizer: Any,
        template_args: dict[str, Any],
        positions: int | None = None,
        template_name: str = "the model's chat template",
        *,
        splits_answer: bool = True,
    ) -> None:
        self.tokenizer, self.plain, self._thoughts = tokenizer, PlainText(tokenizer), KeptThoughts()
        self._template_args, self._template_name, self._splits_answer = template_args, template_name, splits_answer
        self._limit, self._positions = PromptLengthLimit(tokenizer, positions), positions
        # A fast tokenizer is thread-safe unless its truncation or padding changes, which the first call may do; hence
        # the `encode("")` below.
        is_fast = getattr(tokenizer, "is_fast", False)
        self._lock: AbstractContextManager[Any] = nullcontext() if is_fast else Lock()
        tokenizer.encode("")
        self.vocabulary = len(tokenizer.get_vocab())

    def completion_prompt(self, prompt: str | list[int]) -> Prompt:
        ids = self._encode(prompt, "prompt", special=True) if isinstance(prompt, str) else prompt
        if not ids:
            raise InvalidRequestError("the prompt has no tokens", "prompt")
        if not 0 <= min(ids) <= max(ids) < self.vocabulary:
            raise InvalidRequestError(f"the prompt has tokens outside of 0 to {self.vocabulary - 1}", "prompt")
        return Prompt(ids, [ids])

    def chat_prompt(self, request: ChatRequest) -> Prompt:
        messages, options = self.render_input(request)
        prefill = str(messages.pop()["content"]) if request.prefill else ""
        if not messages:
            raise InvalidRequestError("the only message is the start of the answer; add a user message", "messages")
        if prefill:  # the prompt ends with it, as the template shows any answer
            marker = f"Q{secrets.token_hex(8)}A"
            text = self._render([*messages, {"role": "assistant", "content": marker}], options)
            before, separator, _ = text.partition(marker)
            if not separator:
                raise InvalidRequestError("the model's chat template does not show assistant messages", "messages")
            text = before + self.plain.escape_answer(prefill)
        else:
            text = self._render(messages, options, add_generation_prompt=True)
        ids = self._encode(text, "messages")
        if not ids:
            raise InvalidRequestError("the prompt has no tokens", "messages")
        # Later turns may show the answer without its reasoning, so they share what is before the answer.
        splits = self._splits_answer and not prefill
        answer_start = self._answer_start(text, messages, ids, options) if splits else len(ids)
        first_end = min(self._first_end(messages, ids, options), answer_start)
        ends = sorted({first_end, answer_start, len(ids)} - {0})
        segments = [ids[start:end] for start, end in zip([0, *ends], ends, strict=False)]
        return Prompt(ids, segments, self._state(ids))

    def next_beginning(self, request: ChatRequest, answer: Message) -> list[int]:
        """Return the tokens that the next prompt begins with if a conversation continues with this answer."""
        messages, options = self.render_input(request)
        first, second = (
            self._encode(self._render([*messages, answer, {"role": "user", "content": text}], options), "messages")
            for text in ("Q", "H")
        )
        return first[: common_prefix(np.array(first), np.array(second))]

    def render_input(self, request: ChatRequest) -> tuple[list[Message], dict[str, Any]]:
        if not self.tokenizer.has_chat_template:
            raise InvalidRequestError(
                "the model has no chat template; use /v1/completions, or start the server with --chat-template"
            )
        kwargs = request.chat_template_kwargs or {}
        if wrong := sorted(set(kwargs) & _RESERVED):
            raise InvalidRequestError(f"chat_template_kwargs may not set {', '.join(wrong)}", "chat_template_kwargs")
        digest, converted_messages = "", list[Message]()
        for message in request.messages:
            converted_messages.append(self._template_message(message, digest))
            digest = add_to_digest(digest, converted_messages[-1])
        messages = join_leading(converted_messages)
        if has_later(messages) and not self._shows_later_system_messages:
            messages = fold_later(messages)
        messages = self._convert(messages)
        tools = request.sorted_tools
        if tools and not self._shows_tools:
            self._check_call_is_required(request, "does not show tools to the model")
            messages, tools = describe_tools(messages, tools), []
        elif tools and not self.tokenizer.has_tool_calling:
            self._check_call_is_required(request, "has tool calls that mlx-lm cannot parse")
        options = {**self._template_args, **self.plain.escape(kwargs), "tools": self.plain.escape(tools) or None}
        if "reasoning_effort" in options:
            try:
                self._render(messages, options, add_generation_prompt=True)
            except InvalidRequestError:  # the template does not know this effort
                del options["reasoning_effort"]
        return messages, options

    @property
    def can_call_tools(self) -> bool:
        return bool(self.tokenizer.has_chat_template and self.tokenizer.has_tool_calling and self._shows_tools)

    def answer_message(self, answer: Message) -> Message:
        """Return an answer in the form in which `render_input` would return it."""
        return self._convert([_template_message(schemas.Message.model_validate(answer))])[0]

    def _convert(self, messages: list[Message]) -> list[Message]:
        """Return messages in the forms that the template shows and accepts."""
        if any(m["role"] == "tool" or "tool_calls" in m for m in messages) and not self._shows_calls:
            messages = calls_as_text(messages)
        for convert in self._conversions:
            messages = convert(messages)
        return messages

    @cached_property
    def call_form(self) -> CallForm:
        """The form of the model's tool calls; a generic one if its template shows none that can be parsed."""
        form = CallForm.of(self.tokenizer)
        if form is None or not (self.tokenizer.has_chat_template and self._shows_tools):
            return GENERIC_FORM
        return form

    def _check_call_is_required(self, request: ChatRequest, fault: str) -> None:
        """Raise unless a call is required: without a call format of the model's own, the server can only force one."""
        if request.tool_choice is None or request.tool_choice.mode != "required":
            raise RequiredCallError(f"{self._template_name} {fault}")

    def keep_thoughts(self, request: ChatRequest, call: Message, reasoning: str) -> None:
        """Keep the reasoning before a call of an answer: many clients do not send it back."""
        digest, function = "", call["function"]
        for message in request.messages:
            digest = add_to_digest(digest, _template_message(message))
        key = thoughts_key(digest, call["id"], function["name"], json.loads(function["arguments"]))
        self._thoughts.keep(key, reasoning)

    def _template_message(self, message: schemas.Message, digest: str) -> Message:
        """Return a message as templates expect it. `digest` is that of the messages before it."""
        converted = _template_message(message)
        reasoning = message.reasoning_content or message.reasoning
        calls = converted.get("tool_calls") or []
        if not reasoning and calls:
            function = calls[0]["function"]
            key = thoughts_key(digest, calls[0].get("id", ""), function["name"], function["arguments"])
            reasoning = self._thoughts.find(key)
        if reasoning:
            converted |= dict.fromkeys(_REASONING_NAMES, reasoning)
        return converted

    @cached_property
    def _shows_later_system_messages(self) -> bool:
        user, marker = {"role": "user", "content": "hi"}, f"Q{secrets.token_hex(8)}S"
        answer = {"role": "assistant", "content": "hi"}
        try:
            return marker in self._render(
                [user, answer, {"role": "system", "content": marker}, user], self._template_args
            )
        except InvalidRequestError:
            return False

    @cached_property
    def _conversions(self) -> list[Callable[[Sequence[Message]], list[Message]]]:
        """Return the conversions that turn rejected examples into accepted ones."""
        conversions: list[Callable[[Sequence[Message]], list[Message]]] = []
        for fix in TEMPLATE_FIXES:
            example = fix.example
            for convert in conversions:
                example = convert(example)
            if not self._is_accepted(example) and self._is_accepted(fix.convert(example)):
                conversions.append(fix.convert)
        return conversions

    def _is_accepted(self, messages: list[Message]) -> bool:
        try:
            self._render(messages, self._template_args, add_generation_prompt=True)
        except InvalidRequestError:
            return False
        return True

    @cached_property
    def _shows_tools(self) -> bool:
        function = {"name": "f", "description": "", "parameters": {"type": "object", "properties": {}}}
        messages, tools = [{"role": "user", "content": "hi"}], [{"type": "function", "function": function}]
        try:
            with_tools, without = (self._render(messages, {**self._template_args, "tools": t}) for t in (tools, None))
        except InvalidRequestError:
            return True  # the template rejects this conversation; the request's own may be different
        return with_tools != without

    @cached_property
    def _shows_calls(self) -> bool:
        """Whether the template shows earlier calls and their results."""
        name, result = (f"Q{secrets.token_hex(8)}{end}" for end in "CR")
        call = {"id": "abcdef123", "type": "function", "function": {"name": name, "arguments": {}}}
        messages: list[Message] = [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": result, "tool_call_id": "abcdef123"},
        ]
        try:
            text = self._render(messages, self._template_args)
        except InvalidRequestError:
            return True  # it takes calls in another form
        return name in text and result in text

    def split_turn(
        self, messages: list[Message], options: dict[str, Any], cached_messages: int, cached_ids: Sequence[int]
    ) -> tuple[list[int], str, list[int], str] | None:
        """Split what follows the first `cached_messages`, the last of which is an answer.

        Returns the tokens before the last user message, that message, the tokens after it, and the state at the end.
        None if the rendered answer does not end as in `cached_ids`. Without a user message at the end, the first part
        has all.
        """
        marker, user_message = secrets.token_hex(8), ""  # no template trims it and no message contains it
        marked, answer = list(messages), messages[cached_messages - 1] if cached_messages else {}
        if cached_messages and "tool_calls" not in answer:
            marked[cached_messages - 1] = {**answer, "content": f"Q{marker}H"}
        if messages[-1]["role"] == "user":
            user_message = messages[-1]["content"]
            marked[-1] = {**marked[-1], "content": f"Q{marker}W"}
        whole = self._render(marked, options, add_generation_prompt=True)
        text: str | None = whole
        if "tool_calls" in answer:
            text = self._after_calls(whole, marked, options, cached_messages, cached_ids)
        elif cached_messages:
            text = whole.partition(f"Q{marker}H")[2] or None
        if text is None:
            return None
        before, separator, after = text.partition(f"Q{marker}W")
        if messages[-1]["role"] == "user" and not separator:
            raise InvalidRequestError("the model's chat template does not show the last user message", "messages")
        self._check_length(len(text) + len(user_message), "messages")
        before_ids, after_ids = (self._encode(part, "messages") for part in (before, after))
        return before_ids, user_message, after_ids, self._state(before_ids + after_ids)

    def _after_calls(
        self, text: str, messages: list[Message], options: dict[str, Any], count: int, cached_ids: Sequence[int]
    ) -> str | None:
        """Return what follows the calls of an answer, which is the last of `count` messages, in the text of them all.

        Start at the EOS token that ended the answer; None if the template does not render it between the call and the
        next message.
        """
        if not cached_ids or cached_ids[-1] not in self.tokenizer.eos_token_ids:
            return None
        end, marker = str(self.tokenizer.decode(cached_ids[-1:])), f"Q{secrets.token_hex(8)}C"
        answer, following = messages[count - 1], messages[count]
        *calls, last = answer["tool_calls"]
        last = {**last, "function": {**last["function"], "name": marker}}
        marked = [
            *messages[: count - 1],
            {**answer, "tool_calls": [*calls, last]},
            {**following, "content": f"{marker}N"},
        ]
        before, separator, _ = self._render([*marked, *messages[count + 1 :]], options).partition(f"{marker}N")
        *earlier, between = before.split(end)
        if not separator or marker not in before or marker in between:
            return None
        return end + text.split(end, len(earlier))[-1]

    def _check_length(self, characters: int, param: str) -> None:
        try:
            self._limit.check(characters)
        except ConfigError as error:
            tokens, positions = self._limit.least_tokens(characters), self._positions or 0
            raise ContextLengthError.of(tokens, positions, 1, param, is_bound=True) from error

    def _encode(self, text: str, param: str, *, special: bool = False) -> list[int]:
        self._check_length(len(unescape(text)), param)
        with self._lock:
            return self.plain.encode_rendered(text, special=special)

    def _render(self, messages: list[Message], options: dict[str, Any], *, add_generation_prompt: bool = False) -> str:
        escaped = self.plain.escape_messages(messages)
        options = {**options, "add_generation_prompt": add_generation_prompt, "tokenize": False}
        try:
            return str(self.tokenizer.apply_chat_template(escaped, **options))
        except TEMPLATE_ERRORS as error:
            message = f"the model's chat template refuses this conversation: {unescape(str(error))}"
            raise InvalidRequestError(message, "messages") from error

    def _answer_start(self, text: str, messages: list[Message], ids: list[int], options: dict[str, Any]) -> int:
        """Return how many tokens of a prompt, whose text is given, are before what begins the answer."""
        try:
            begins = text.removeprefix(self._render(messages, options))
        except InvalidRequestError:
            return len(ids)
        count = len(self._encode(begins, "messages")) if begins != text else 0
        return len(ids) - count

    def _first_end(self, messages: list[Message], ids: list[int], options: dict[str, Any]) -> int:
        """Return how many tokens all conversations share that begin with these system messages, or this message."""
        count = next((n for n, message in enumerate(messages) if message["role"] != "system"), len(messages)) or 1
        if count == len(messages):
            return 0
        next_role = "user" if messages[0]["role"] == "system" else "assistant"
        try:
            text = self._render([*messages[:count], {"role": next_role, "content": ""}], options)
            other = self._encode(text, "messages")
        except InvalidRequestError:
            return 0
        return next((n for n, (a, b) in enumerate(zip(ids, other, strict=False)) if a != b), 0)

    def _state(self, ids: list[int]) -> str:
        is_open = is_reasoning_open(self.tokenizer, ids)
        return "reasoning" if is_open else self.tokenizer.response_initial_state or "normal"


def without_reasoning(messages: Sequence[Message]) -> list[Message]:
    """Return messages without what some clients send back and others do not."""
    return [{key: value for key, value in m.items() if key not in _REASONING_NAMES} for m in messages]


def _template_message(message: schemas.Message) -> Message:
    converted = schemas.without_none(message)
    for name in ("reasoning", "reasoning_content"):
        converted.pop(name, None)
    if message.role == "developer":
        converted["role"] = "system"
    if isinstance(message.content, list):
        converted["content"] = "".join(part.text for part in message.content)
    converted.setdefault("content", "")
    for call in converted.pop("tool_calls", []):
        function = {"name": call.function.name, "arguments": _argument_object(call.function.arguments)}
        converted.setdefault("tool_calls", []).append({**schemas.without_none(call), "function": function})
    return converted


def _argument_object(arguments: Any) -> dict[str, Any]:
    """Return the arguments of a call as templates need them, also of one that the model wrote in another form."""
    parsed = arguments
    for _ in range(2):  # some clients encode JSON twice
        if isinstance(parsed, str):
            try:
                parsed = from_json(parsed.strip() or "{}")
            except ValueError:
                break
    if parsed is None:
        return {}
    return parsed if isinstance(parsed, dict) else {"arguments": arguments}
