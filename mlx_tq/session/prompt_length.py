"""Reject over-long text before tokenizing it. Tokenizing 10 MB takes seconds and 500 MB of memory."""

from functools import cached_property
from typing import Any

from mlx_tq.errors import ConfigError


class PromptLengthLimit:
    """An upper bound on the characters that fit a model's context: context length x length of the longest token.

    Args:
        tokenizer: of the model.
        positions: the context length, or None for no limit.
    """

    def __init__(self, tokenizer: Any, positions: int | None) -> None:
        self._tokenizer, self._positions = tokenizer, positions

    @cached_property
    def _longest_token(self) -> int:
        return max(map(len, self._tokenizer.get_vocab()), default=1)

    def check(self, characters: int, name: str = "prompt", used: int = 0) -> None:
        """Raise if the text cannot fit.

        Args:
            characters: length of the text.
            name: what the message calls the text.
            used: positions already in use.

        Raises:
            ConfigError: the text is too long.
        """
        if self._positions is None:
            return
        free = max(0, self._positions - used)
        if characters <= free or characters <= free * self._longest_token:  # most are, and need no vocabulary
            return
        in_use, restart = (f" ({used:,} in use)", ", start a new conversation (reset)") if used else ("", "")
        raise ConfigError(
            f"the {name} has {characters:,} characters; at most {free * self._longest_token:,} fit into a context of "
            f"{self._positions:,} tokens{in_use}, even if every token were the longest one ({self._longest_token:,} "
            f"characters). Shorten the {name}{restart}, or use a model with a longer context."
        )
