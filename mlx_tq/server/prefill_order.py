"""`PrefillOrder`: which prompts the next prefill step is for."""

from collections.abc import Sequence
from dataclasses import dataclass

_OLDEST_EVERY = 4  # steps, of which one is for the prompt that has waited longest, so that none starves


@dataclass(frozen=True)
class PromptToPrefill:
    """A prompt that is not prefilled yet, in the order of admission."""

    key: int
    remaining: int  # tokens
    next_step: int  # tokens of its next step
    full_step: int  # the most that a step has at its position


class PrefillOrder:
    """The prompt with the least work left goes first, together with those that fit into the time of one step.

    Without `pads`, only steps of equal lengths are together.
    """

    def __init__(self, *, pads: bool = True) -> None:
        self._pads = pads
        self._steps = 0

    def choose(self, prompts: Sequence[PromptToPrefill]) -> list[int]:
        """Return the keys of the prompts, the oldest first, that the next step is for."""
        if not prompts:
            return []
        self._steps += 1
        order = sorted(prompts, key=lambda prompt: prompt.remaining)
        if self._steps % _OLDEST_EVERY == 0:
            order.remove(prompts[0])
            order.insert(0, prompts[0])
        chosen: list[PromptToPrefill] = []
        for prompt in order:
            together = [*chosen, prompt]
            longest = max(other.next_step for other in together)  # the others are padded
            if chosen and not self._pads and prompt.next_step != chosen[0].next_step:
                continue
            if chosen and sum(longest / other.full_step for other in together) > 1:
                break
            chosen = together
        return [prompt.key for prompt in chosen]
