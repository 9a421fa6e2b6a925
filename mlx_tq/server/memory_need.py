"""`MemoryNeed`: the bytes of an answer's caches, and those that a prefill step takes for a moment."""

from bisect import bisect_right
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

from mlx_tq.cache.recurrent_states import EXACT
from mlx_tq.cli.loading import check_fits
from mlx_tq.prompt_cache.memory import other_bytes, state_nbytes
from mlx_tq.prompt_cache.plan import Plan
from mlx_tq.server.prefill_grid import PrefillGrid

_POSITIONS = 8  # of a prompt at which the bytes of a step are computed


class MemoryNeed:
    """Computes bytes from a model's shape, and adds to those of a step what steps of its length took beyond them."""

    def __init__(
        self,
        model: Any,
        plan: Plan,
        grid: PrefillGrid,
        available: int,
        *,
        includes_steps: bool,
        state_format: str = EXACT,
    ) -> None:
        """`available` bytes are for all caches, and, if `includes_steps`, for what a prefill step takes.

        `state_format` is that of stored prompts.
        """
        self._plan, self._grid, self.available, self._includes_steps = plan, grid, available, includes_steps
        others = other_bytes(model)
        # States and windows are held twice while a step replaces them, and while a sequence joins a batch.
        # Admission asks before each step while a job waits, and computing takes milliseconds.
        self.caches_nbytes: Callable[[int], int] = lru_cache(maxsize=1024)(
            lambda tokens: plan.cache_peak_nbytes(tokens, grid.first) + 2 * others(tokens)
        )
        saved = state_nbytes(model, EXACT) - state_nbytes(model, state_format)
        # Of a prompt that stays in memory when nothing continues from it.
        self.stored_nbytes: Callable[[int], int] = lambda tokens: self.caches_nbytes(tokens) - others(tokens) - saved
        self._computed = lru_cache(maxsize=1024)(self._compute)
        self._excess: dict[int, int] = {}  # bytes that steps took beyond those computed, by the bits of their length

    def step_nbytes(self, tokens: int) -> int:
        """Return the most that a step of a prompt of `tokens` tokens takes for a moment; 0 if that is not limited."""
        if not self._includes_steps:
            return 0
        excess = dict(self._excess)  # another thread may add to it
        most = max(excess.values(), default=0)
        return max(nbytes + excess.get(bits, most) for bits, nbytes in self._computed(tokens).items())

    def note_step(self, tokens: int, step: int, rows: int, nbytes: int) -> None:
        """Note what a step of `step` tokens took, the last of `tokens` tokens, in a batch of `rows`."""
        if not self._includes_steps:
            return
        excess = max(0, nbytes - self._plan.transient_nbytes(tokens, step, rows))
        self._excess[step.bit_length()] = max(excess, self._excess.get(step.bit_length(), 0))

    def check(self, prompt_tokens: int, total: int, answers: int = 1) -> None:
        """Raise ConfigError if the `answers` to a prompt, with `total` tokens each, do not fit alone."""
        steps = self.step_nbytes if self._includes_steps else None
        check_fits(total, self._grid.first, self.available, partial(self._answers, prompt_tokens, answers), steps)

    def most_tokens(self, prompt_tokens: int, total: int, answers: int = 1) -> int:
        """Return the largest length, of at least `prompt_tokens` and at most `total`, with which answers fit alone."""

        def needed(tokens: int) -> int:
            return self._answers(prompt_tokens, answers, tokens) + self.step_nbytes(tokens)

        if needed(total) <= self.available:
            return total
        return prompt_tokens + bisect_right(range(prompt_tokens + 1, total + 1), self.available, key=needed)

    def _answers(self, prompt_tokens: int, answers: int, tokens: int) -> int:
        """Return the bytes of the caches of answers to a prompt, with `tokens` tokens each."""
        shared = self._plan.shared_nbytes(min(prompt_tokens - 1, tokens), tokens)
        return answers * self.caches_nbytes(tokens) - (answers - 1) * shared

    def _compute(self, tokens: int) -> dict[int, int]:
        """Return the most bytes of steps up to `tokens` tokens, by the bits of their length."""
        most: dict[int, int] = {}
        for part in range(1, _POSITIONS + 1):
            end = tokens * part // _POSITIONS
            step = self._grid.step(max(0, end - self._grid.step(end)))
            nbytes = self._plan.transient_nbytes(end, step)
            most[step.bit_length()] = max(nbytes, most.get(step.bit_length(), 0))
        return most
