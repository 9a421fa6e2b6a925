"""Text on its way to tokens: checked, limited in length, free of control tokens, and framed by the chat template."""

import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any

from jinja2 import TemplateError

from mlx_tq.errors import ConfigError

SESSION_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")  # what the rescue service accepts
TEMPLATE_ERRORS = (TemplateError, TypeError, ValueError, KeyError)  # whatever a chat template may raise

# Placeholders that no template trims, escapes or splits.
_USER, _ASSISTANT, _LAST = "QuserQ", "QassistantQ", "QlastQ"


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


class PromptLengthLimit:
    """Rejects over-long text before it is tokenized: tokenizing 10 MB takes seconds and 500 MB of memory.

    The bound on characters is the context length times the length of the longest token.
    """

    def __init__(self, tokenizer: Any, context_length: int | None) -> None:
        self._tokenizer, self._context_length = tokenizer, context_length

    @cached_property
    def _longest_token(self) -> int:
        return max(map(len, self._tokenizer.get_vocab()), default=1)

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

    A tokenizer turns the seven letters of `<|eos|>` into the token that ends a turn, so text in a prompt
    could end the user's turn and speak as the system. Control tokens are those that the tokenizer adds to its
    vocabulary of text; `control` has their ids.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        added = {int(i): str(token) for i, token in getattr(tokenizer, "added_tokens_decoder", {}).items()}
        special = {int(i) for i in (*tokenizer.all_special_ids, *tokenizer.eos_token_ids)}
        # Some vocabularies add runs of spaces and line breaks; these are text.
        self.control = frozenset(i for i in {*added, *special} if i in special or added[i].strip())
        words = {added.get(i) or str(tokenizer.decode([i])) for i in self.control} - {""}
        self._words = frozenset(word for word in words if len(word) > 1)
        self._lengths = sorted({len(word) for word in self._words})
        self._first_characters = _compile_character_class(word[0] for word in self._words)
        self._one_character_words = _compile_character_class(word for word in words if len(word) == 1)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of `text`, without control tokens.

        Splits every control word after its first character and encodes the pieces separately. A one-character control
        word becomes U+FFFD.
        """
        ids = self._encode(text)
        if self.control.isdisjoint(ids):
            return ids
        text = self._one_character_words.sub("\N{REPLACEMENT CHARACTER}", text)
        starts = (match.start() for match in self._first_characters.finditer(text))
        # A set lookup per length; a regex would try thousands of words at each position.
        words = (start for start in starts if any(text[start : start + n] in self._words for n in self._lengths))
        cuts = [0, *(start + 1 for start in words), len(text)]
        pieces = [text[start:stop] for start, stop in pairwise(cuts)]
        encoded = {piece: self._encode(piece) for piece in set(pieces)}
        return [i for piece in pieces for i in encoded[piece] if i not in self.control]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids` without control tokens."""
        return str(self._tokenizer.decode([i for i in ids if i not in self.control]))

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))


def _compile_character_class(characters: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that matches any one of `characters`."""
    return re.compile("|".join(map(re.escape, sorted(set(characters)))) or r"(?!)")


class TurnTemplate:
    """The tokens that the chat template puts around user messages, so that a conversation grows by new tokens only.

    `opening` is before the first message, `closing` between a message and its answer. Without a chat template,
    messages and answers are separated by empty lines.
    """

    def __init__(self, tokenizer: Any, system_prompt: str | None = None, options: dict[str, Any] | None = None) -> None:
        self._tokenizer = tokenizer
        if not tokenizer.has_chat_template:
            start = "" if system_prompt is None else f"{system_prompt}\n\n"
            self.opening = list(tokenizer.encode(start, add_special_tokens=True))
            self._between, self.closing = self._encode("\n\n"), list[int]()
            return
        system = [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
        first = [*system, {"role": "user", "content": _USER}]
        second = [*first, {"role": "assistant", "content": _ASSISTANT}, {"role": "user", "content": _LAST}]
        opening, _, closing = self._render(first, options).partition(_USER)
        between = self._render(second, options).partition(_ASSISTANT)[2].partition(_LAST)[0]
        self.opening, self._between, self.closing = map(self._encode, (opening, between, closing))

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
                f"the model's chat template refuses this conversation: {error}. Drop the system prompt."
            ) from error

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))
