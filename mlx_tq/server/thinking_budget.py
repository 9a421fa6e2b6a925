"""`ThinkingBudget`: ends the model's reasoning after a number of tokens, so that an answer follows."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

BRIDGE = "\nI have thought long enough, so I answer now.\n"
BRIDGE_TO_CALL = "\nI have thought long enough, so I call a tool or answer now.\n"


class ThinkingBudget:
    """Logits processor of one answer. It reads tokens once, when the budget is spent: no earlier step waits for it.

    `bridge` are the tokens that then follow; they end with `end`, the mark after the reasoning. `start` is the mark
    before it where the prompt does not open it, else empty.
    """

    def __init__(self, budget: int, start: Sequence[int], end: Sequence[int], bridge: Sequence[int]) -> None:
        self._budget, self._start, self._end, self._bridge = budget, list(start), list(end), list(bridge)
        self._prompt_tokens: int | None = None

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        if self._prompt_tokens is None:
            self._prompt_tokens = tokens.size
        count = tokens.size - self._prompt_tokens  # generated ones
        if count == self._budget:
            generated: Any = tokens[tokens.size - count :].tolist()
            if _contains(generated, self._end) or not _contains(generated, self._start):
                self._bridge = []
        if not 0 <= count - self._budget < len(self._bridge):
            return logits
        is_next = mx.arange(logits.shape[-1]) == self._bridge[count - self._budget]
        return mx.where(is_next, mx.zeros_like(logits), -mx.inf)


def _contains(tokens: list[int], part: list[int]) -> bool:
    return any(tokens[at : at + len(part)] == part for at in range(len(tokens) - len(part) + 1))
