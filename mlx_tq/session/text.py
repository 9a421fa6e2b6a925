"""Text on its way to tokens: checked, limited in length, free of control tokens, and framed by the chat template."""

import re
import secrets
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import groupby
from os.path import commonprefix
from typing import Any

from jinja2 import TemplateError

from mlx_tq.errors import ConfigError, one_line

SESSION_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")  # what the rescue service accepts
# Whatever a chat template may raise.
TEMPLATE_ERRORS = (TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError)

# Placeholders that no template trims, escapes or splits, and no text contains.
_CUT, _USER, _ASSISTANT, _LAST = (f"Q{secrets.token_hex(8)}Q" for _ in range(4))


def render_messages(tokenizer: Any, messages: Sequence[dict[str, Any]], **options: Any) -> str:
    """Return a conversation as the model's chat template shows it; raise ConfigError if that fails."""
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, **options))
    except TEMPLATE_ERRORS as error:
        raise ConfigError(
            f"the model's chat template fails: {one_line(error)}. Repair it in the model's folder, or use another."
        ) from error


def check_text(text: Any, name: str) -> None:
    """Raise a ConfigError unless `text` is a string of UTF-8: other bytes reach Python as lone surrogates."""
    if not isinstance(text, str):
        raise ConfigError(f"the {name} is of type {type(text).__name__}; it must be text (str).")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"the {name} is not UTF-8 text: {error}.") from error


def check_max_tokens(max_tokens: Any) -> None:
    if isinstance(max_tokens, bool) or not isinstance(max_tokens, int) or (max_tokens < 1 and max_tokens != -1):
        raise ConfigError(f"max_tokens is {max_tokens!r}; it must be 1 or more, or -1 for all that the model allows.")


def is_reasoning_open(tokenizer: Any, ids: Sequence[int]) -> bool:
    """Return whether a prompt of tokens `ids` ends inside the model's reasoning."""
    return bool(tokenizer.has_thinking and tokenizer.rfind_think_start(ids) > tokenizer.rfind_think_end(ids))


class PromptLengthLimit:
    """Rejects over-long text before it is tokenized: tokenizing 10 MB takes seconds and 500 MB of memory.

    The bound on characters is the context length times the length of the longest token.
    """

    def __init__(self, tokenizer: Any, context_length: int | None) -> None:
        self._tokenizer, self._context_length = tokenizer, context_length

    @cached_property
    def _longest_token(self) -> int:
        return max(map(len, self._tokenizer.get_vocab()), default=1)

    def least_tokens(self, characters: int) -> int:
        """Return how many tokens a text has at least."""
        return -(-characters // self._longest_token)

    def check(self, characters: int, name: str = "prompt", used: int = 0) -> None:
        """Raise a ConfigError if the text called `name` cannot fit after `used` tokens."""
        if self._context_length is None:
            return
        free = max(0, self._context_length - used)
        if characters <= free or characters <= free * self._longest_token:  # most need no vocabulary
            return
        in_use, restart = (f" ({used:,} in use)", ", start a new conversation (reset)") if used else ("", "")
        raise ConfigError(
            f"the {name} has {characters:,} characters; at most {free * self._longest_token:,} fit into a context of "
            f"{self._context_length:,} tokens{in_use}, even if every token were the longest one "
            f"({self._longest_token:,} characters). Shorten the {name}{restart}, or use a model with a longer context."
        )


class PlainText:
    """Encodes text as data: no part of it becomes a control token, however it is spelled.

    A tokenizer turns the characters `<|eos|>` into the token that ends a turn, so text in a prompt
    could end the user's turn and speak as the system. Control tokens are those that the tokenizer adds to its
    vocabulary of text; `control` has their ids.

    Text that goes into a chat template passes through `escape` before, and what the template returns through
    `encode_rendered`: only the template's own control words become control tokens.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        added = {int(i): str(token) for i, token in getattr(tokenizer, "added_tokens_decoder", {}).items()}
        special = {int(i) for i in (*tokenizer.all_special_ids, *tokenizer.eos_token_ids)}
        # Some vocabularies add runs of spaces and line breaks; these are text.
        self.control = frozenset(i for i in {*added, *special} if i in special or added[i].strip())
        words = {added.get(i) or str(tokenizer.decode([i])) for i in self.control} - {""}
        self._one_character_words = _compile(words={word for word in words if len(word) == 1})
        self._starts = _compile(words={word for word in words if len(word) > 1})
        has_thinking = getattr(tokenizer, "has_thinking", False)
        self._reasoning_marks = [tokenizer.think_start, tokenizer.think_end] if has_thinking else []

    def encode(self, text: str) -> list[int]:
        """Return the token ids of `text`, without control tokens.

        Splits every control word after its first character and encodes the pieces separately. A one-character control
        word becomes U+FFFD.
        """
        ids = self._encode(text)
        if self.control.isdisjoint(ids):
            return ids
        return [i for i in self.encode_rendered(self.escape(text)) if i not in self.control]

    def escape(self, value: Any) -> Any:
        """Return text with a mark inside each control word; or a JSON value, escaped all through."""
        if isinstance(value, str):
            text = self._one_character_words.sub("\N{REPLACEMENT CHARACTER}", value)
            return self._starts.sub(rf"\g<0>{_CUT}", text)
        if isinstance(value, dict):
            return {self.escape(key): self.escape(child) for key, child in value.items()}
        return [self.escape(child) for child in value] if isinstance(value, list) else value

    def escape_answer(self, text: str) -> str:
        """Escape the text of an assistant message, in which templates parse the marks around the reasoning."""
        pattern = "|".join(map(re.escape, self._reasoning_marks))
        parts = re.split(f"({pattern})", text) if pattern else [text]
        return "".join(part if part in self._reasoning_marks else self.escape(part) for part in parts)

    def escape_messages(self, messages: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        """Escape the messages of a conversation, before a chat template renders them."""
        escaped = []
        for message in messages:
            fields = {name: self.escape(value) for name, value in message.items() if name != "role"}
            if message["role"] == "assistant" and isinstance(message.get("content"), str):
                fields["content"] = self.escape_answer(message["content"])
            escaped.append({**message, **fields})
        return escaped

    def encode_rendered(self, text: str, *, special: bool = False) -> list[int]:
        """Return the token ids of what a template made of escaped text; `special` adds those of the tokenizer."""
        first, *pieces = text.split(_CUT)
        encoded = {piece: self._encode(piece) for piece in set(pieces)}
        return [*self._encode(first, special=special), *(i for piece in pieces for i in encoded[piece])]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids` without control tokens."""
        return str(self._tokenizer.decode([i for i in ids if i not in self.control]))

    def _encode(self, text: str, *, special: bool = False) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=special))


def unescape(text: str) -> str:
    return text.replace(_CUT, "")


def _compile(words: set[str]) -> re.Pattern[str]:
    """Return a pattern of the first character of any one of `words`, including those that overlap."""
    starts = {word[0] for word in words}
    alternatives = [
        f"{re.escape(start)}(?={_any_of({word[1:] for word in words if word[0] == start})})" for start in sorted(starts)
    ]
    return re.compile("|".join(alternatives) or r"(?!)")


def _any_of(words: set[str]) -> str:
    """Return a pattern that matches if one of `words` follows.

    It branches where the words do; otherwise thousands of them would be tried at each position.
    """
    if "" in words:
        return ""
    branches = []
    for _, same_start in groupby(sorted(words), key=lambda word: word[0]):
        group = list(same_start)
        prefix = commonprefix(group)  # noqa: RUF071 - of characters
        branches.append(re.escape(prefix) + _any_of({word[len(prefix) :] for word in group}))
    return f"(?:{'|'.join(branches)})"


class TurnTemplate:
    """The tokens that the chat template puts around user messages, so that a conversation grows by new tokens only.

    `opening` is before the first message, `closing` between a message and its answer. Without a chat template,
    messages and answers are separated by empty lines.
    """

    def __init__(
        self,
        tokenizer: Any,
        plain: PlainText,
        system_prompt: str | None,
        options: dict[str, Any] | None,
    ) -> None:
        self._tokenizer = tokenizer
        if not tokenizer.has_chat_template:
            start = "" if system_prompt is None else plain.escape(f"{system_prompt}\n\n")
            self.opening = plain.encode_rendered(start, special=True)
            self._between, self.closing = plain.encode_rendered("\n\n"), list[int]()
            return
        system = [] if system_prompt is None else [{"role": "system", "content": plain.escape(system_prompt)}]
        first = [*system, {"role": "user", "content": _USER}]
        second = [*first, {"role": "assistant", "content": _ASSISTANT}, {"role": "user", "content": _LAST}]
        opening, _, closing = self._render(first, options).partition(_USER)
        between = self._render(second, options).partition(_ASSISTANT)[2].partition(_LAST)[0]
        self.opening, self._between, self.closing = map(plain.encode_rendered, (opening, between, closing))

    def between(self, last_id: int) -> list[int]:
        """Return the tokens from an answer that ended with `last_id` to the next message."""
        has_ended = last_id in self._tokenizer.eos_token_ids and self._between[:1] == [last_id]
        return self._between[1:] if has_ended else self._between

    def _render(self, messages: list[dict[str, str]], options: dict[str, Any] | None) -> str:
        try:
            options = {"add_generation_prompt": True, **(options or {})}
            return str(self._tokenizer.apply_chat_template(messages, tokenize=False, **options))
        except TEMPLATE_ERRORS as error:
            raise ConfigError(
                f"the model's chat template refuses this conversation: {unescape(str(error))}. Drop the system prompt."
            ) from error
