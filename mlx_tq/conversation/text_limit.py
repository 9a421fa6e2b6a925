"""Refuse a text by its length before it is tokenized, which takes seconds and half a gigabyte for 10 MB."""

from functools import cached_property
from typing import Any

from mlx_tq.errors import ConfigError


class TextLimit:
    """The most characters that a model's positions can hold: those of its longest token, at each position.

    Args:
        tokenizer: Of the model.
        positions: That the model allows; None for no limit.
    """

    def __init__(self, tokenizer: Any, positions: int | None) -> None:
        self._tokenizer, self._positions = tokenizer, positions

    @cached_property
    def _longest_token(self) -> int:
        return max(map(len, self._tokenizer.get_vocab()), default=1)

    def check(self, characters: int, name: str = "prompt", used: int = 0) -> None:
        """Raise where a text is too long, however it is tokenized.

        Args:
            characters: Of the text.
            name: What the user calls it.
            used: Positions that are taken already.

        Raises:
            ConfigError: It is too long, with all numbers.
        """
        if self._positions is None:
            return
        left = max(0, self._positions - used)
        if characters <= left or characters <= left * self._longest_token:  # most are, and need no vocabulary
            return
        taken, anew = (f", {used:,} of which are taken", ", start a new conversation (reset)") if used else ("", "")
        raise ConfigError(
            f"the {name} has {characters:,} characters; the model has {self._positions:,} positions{taken}, and its "
            f"longest token has {self._longest_token:,}: at most {left * self._longest_token:,} characters fit. "
            f"Shorten the {name}{anew}, or take a model with a longer context."
        )
