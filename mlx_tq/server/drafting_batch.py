"""`DraftingBatch`: mlx-lm's batch of answers, which verifies drafts while it has a single one."""

from collections.abc import Callable
from typing import Any, Self

import mlx.core as mx
from mlx_lm.generate import GenerationBatch
from mlx_lm.sample_utils import greedy_sampler

from mlx_tq.integration.rollback import VerifyPass, narrow_windows, widen_windows
from mlx_tq.speculative.drafts import Drafter, Drafts
from mlx_tq.speculative.stopwatch import Stopwatch


class DraftingBatch(GenerationBatch):  # type: ignore[misc]
    """A `GenerationBatch` that delivers one token per step, some of them without a pass of the model.

    After a verify pass, the caches already contain the drafted tokens. Each step samples one token and drops the
    remaining draft at the first mismatch. As in mlx-lm, one token is sampled ahead. When anything else needs the
    caches, the remaining draft is trimmed and no sampled token is lost.
    """

    _next_tokens: Any
    _next_logprobs: Any
    _drafter: Drafter
    _count_drafts: Callable[[int, int], None]  # called with the numbers of drafted and of accepted tokens
    _drafts: Drafts | None  # of the single answer
    _drafts_uid: int | None
    _ahead: list[tuple[int, mx.array]]  # drafted tokens that the caches hold, and the logits [1, V] after each
    _verified: VerifyPass | None  # the pass that made them
    _windows: list[Any]  # sliding windows that are widened until these tokens are delivered
    _verifying: int  # tokens of the verify pass whose time is not noted yet, or 0
    _is_plain: bool  # the next token was drawn from a plain step
    _watch: Stopwatch

    @classmethod
    def begin(cls, model: Any, drafter: Drafter, count_drafts: Callable[[int, int], None]) -> Self:
        """Return an empty batch."""
        batch: Self = cls.empty(model, greedy_sampler)
        batch._drafter, batch._count_drafts = drafter, count_drafts
        batch._drafts, batch._drafts_uid = None, None
        batch._ahead, batch._verified, batch._windows = [], None, []
        batch._verifying, batch._is_plain, batch._watch = 0, False, Stopwatch()
        return batch

    def settle(self) -> None:
        """Trim what was drafted and not delivered, so that the caches hold `tokens`."""
        if self._ahead:
            assert self._verified is not None  # noqa: S101 - tells the type checker
            self._verified.roll_back(len(self._ahead))
            self._ahead = []
        narrow_windows(self._windows)
        self._windows, self._verified = [], None

    def extend(self, batch: Any) -> None:
        self.settle()
        super().extend(batch)

    def filter(self, keep: list[int]) -> None:
        self.settle()
        super().filter(keep)

    def extract_cache(self, idx: int) -> Any:
        self.settle()
        return super().extract_cache(idx)

    def _step(self) -> Any:
        """Return the tokens of this step and their log-probabilities."""
        if len(self.uids) != 1 or (drafts := self._find_drafts()) is None:
            self.settle()
            self._verifying, self._is_plain = 0, False
            return super()._step()
        self._watch.resume()
        try:
            return self._step_with_drafts(drafts)
        finally:
            self._watch.pause()

    def _find_drafts(self) -> Drafts | None:
        """Return the drafts of the single answer, with all delivered tokens; None if nothing is drafted."""
        if self._drafts_uid != self.uids[0]:
            self._drafts_uid = self.uids[0]
            self._drafts = self._drafter.begin(self.model, self.prompt_cache, self.tokens[0])
        elif self._drafts is not None:
            for token in self.tokens[0][len(self._drafts) :]:
                self._drafts.append(token)
        return self._drafts

    def _step_with_drafts(self, drafts: Drafts) -> Any:
        if self._ahead or drafts.may_draft:
            token: Any = self._next_tokens.item()
            if self._ahead and token == self._ahead[0][0]:
                self._count_drafts(0, 1)
                return self._deliver(token, self._ahead.pop(0)[1])
            self.settle()
            self._note_time(drafts)
            drafts.append(token)
            draft = drafts.draft(self.max_tokens[0] - self._num_tokens[0] - 1)
            if draft:
                return self._verify(token, draft)
        self.settle()
        # Without a draft in sight, mlx-lm's step begins the next pass before the token of this one is known.
        delivered = super()._step()
        self._note_time(drafts)
        self._is_plain = True
        return delivered

    def _note_time(self, drafts: Drafts) -> None:
        """Note the time since the last pass: of a plain step, or of a verify pass and what it took to settle it."""
        if drafts.gate is not None and self._verifying:
            drafts.gate.note_verify_pass(self._verifying, self._watch.lap())
        elif drafts.gate is not None and self._is_plain:
            drafts.gate.note_plain_step(self._watch.lap())
        self._verifying, self._is_plain = 0, False

    def _verify(self, token: int, draft: list[int]) -> Any:
        """Run the token of this step and a draft through the model."""
        self._count_drafts(len(draft), 0)
        self._windows = widen_windows(self.prompt_cache, 1 + len(draft))
        ids = [token, *draft]
        self._verified = VerifyPass(self.prompt_cache, ids, self._run)
        logits = self._run(ids)
        self._ahead = [(drafted, logits[:, i]) for i, drafted in enumerate(draft, start=1)]
        self._verifying = 1 + len(draft)
        return self._deliver(token, logits[:, 0])

    def _run(self, ids: list[int]) -> Any:
        return self.model(mx.array([ids], mx.uint32), cache=self.prompt_cache)

    def _deliver(self, token: int, logits: mx.array) -> Any:
        """Deliver the token that was drawn ahead, and draw the next from its logits [1, V], as mlx-lm's step does."""
        processors = self.logits_processors[0] or ()
        if processors:
            context = self._token_context[0].update_and_fetch(self._next_tokens)
            for processor in processors:
                logits = processor(context, logits)
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        self._current_tokens, self._current_logprobs = self._next_tokens, self._next_logprobs
        self._next_tokens = (self.samplers[0] or self.fallback_sampler)(logprobs)
        self._next_logprobs = list(logprobs)
        mx.async_eval(self._next_tokens, self._next_logprobs)  # type: ignore[no-untyped-call]
        self.tokens[0].append(token)
        return [token], self._current_logprobs
