"""Text that is data: encoded so that no part of it becomes a control token, however it is spelled.

A tokenizer turns the seven letters of `<|eos|>` into the one token that ends a turn. Whoever can put text into a prompt
could so end the user's turn and speak as the system. Here such letters stay letters.
"""

import re
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from mlx_tq.errors import ConfigError

_UNKNOWN = "\N{REPLACEMENT CHARACTER}"


def check_text(text: Any, name: str) -> None:
    """Raise where `text` is not text; `name` is what the user calls it.

    Raises:
        ConfigError: no string, or bytes that are no UTF-8, which reach Python as lone surrogates.
    """
    if not isinstance(text, str):
        raise ConfigError(f"the {name} is of type {type(text).__name__}; it must be text (str).")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"the {name} is not UTF-8 text: {error}.") from error


def check_answer(max_tokens: Any) -> None:
    """Raise where an answer cannot have so many tokens.

    Raises:
        ConfigError: neither a whole number above 0 nor -1.
    """
    if isinstance(max_tokens, bool) or not isinstance(max_tokens, int) or (max_tokens < 1 and max_tokens != -1):
        raise ConfigError(f"max_tokens is {max_tokens!r}; it must be 1 or more, or -1 for all that the model allows.")


class PlainText:
    """Encodes and decodes text without control tokens: those that the tokenizer adds to its vocabulary of text.

    Attributes:
        control: their ids.
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
        text = self._one_character_words.sub(_UNKNOWN, text)
        starts = (match.start() for match in self._first_characters.finditer(text))
        cuts = [0, *(start + 1 for start in starts if self._has_word_at(text, start)), len(text)]
        pieces = [text[start:stop] for start, stop in pairwise(cuts)]
        encoded = {piece: self._encode(piece) for piece in set(pieces)}
        return [i for piece in pieces for i in encoded[piece] if i not in self.control]

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def _has_word_at(self, text: str, start: int) -> bool:
        # A set lookup per length; a regex would try thousands of words at each position.
        return any(text[start : start + length] in self._words for length in self._lengths)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`, control tokens left out."""
        return str(self._tokenizer.decode([i for i in ids if i not in self.control]))


def _compile_character_class(characters: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that matches any one of `characters`."""
    return re.compile("|".join(map(re.escape, sorted(set(characters)))) or r"(?!)")
