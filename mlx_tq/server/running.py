"""A job while it runs in the batch: its text so far, and what is left of its prompt."""

import logging
import math
from typing import Any

import mlx.core as mx
from mlx_lm.generate import TextStateMachine

from mlx_tq.cache.sharing import Shared
from mlx_tq.prefix_cache.prefix_cache import CachedPrompt
from mlx_tq.server.errors import ApiError, ModelFailedError
from mlx_tq.server.guarded_sampling import GuardedProcessors, GuardedSampler
from mlx_tq.server.jobs import Choice, Failed, Job, Piece
from mlx_tq.server.prefixes import close
from mlx_tq.session.looks import Looks
from mlx_tq.session.recall import Recalled
from mlx_tq.session.transcript import NOTHING

log = logging.getLogger(__name__)


class Running:
    """A job in the batch.

    Attributes:
        kinds: of the segments still to be read, the next one last.
        question: the last tokens of the prompt, if something may come back before these are read.
        divided: the last segment was cut before the question.
        prefilled, generated: tokens that were read and said.
        recalled: what came back as rows for the question.
        quoted, at: what came back as text, and before which of the turn's new tokens.
        looks: of the answer; None where none are made.
        stored: the prompt in the store of prefixes, while it is read.
        point: what was restored of it: whoever restores the same while the job runs shares its rows.
        pending: the other answers to its prompt, until it is read.
        ends: where the steps end in which its prompt is read.
        followers: jobs that wait until it has read what they begin with too, and how many tokens these are.
        shared: rows that it has in common with others.
        processors: `GuardedProcessors` of the job, or empty.
        sampler: the job's sampler, shared with jobs that use the same one.
        failed: the client was told of an error; the job leaves the batch before the next step.
    """

    def __init__(
        self,
        job: Job,
        cached: int,
        kinds: list[str],
        detokenizer: Any,
        sampler: GuardedSampler,
        stored: CachedPrompt | None = None,
    ) -> None:
        self.job, self.stored = job, stored
        self.point = None if stored is None else stored.checkpoint
        self.kinds = kinds[::-1]
        self.question: list[int] = []
        self.divided = False
        self.detokenizer = detokenizer
        self.stops = TextStateMachine({"normal": [(stop, None) for stop in job.stops]}).make_state()
        self.prefilled, self.generated = cached, 0
        self.recalled = Recalled()
        self.looks: Looks | None = None
        self.quoted, self.at = NOTHING, 0
        self.pending = list(job.others)
        self.ends: list[int] = []
        self.followers: list[tuple[Job, int]] = []
        self.shared: Shared = []
        self.processors = [GuardedProcessors(job.all_processors)] if job.all_processors else []
        self.sampler = sampler
        self.failed = False

    @property
    def is_awaited(self) -> bool:
        """What followers wait for has been read."""
        return any(stop <= self.prefilled for _, stop in self.followers)

    @property
    def sampling_error(self) -> Exception | None:
        """Return the error that this job's processors or sampler raised in the last step."""
        if self.prefilled < len(self.job.prompt.ids):  # still in prefill: the shared sampler failed for another job
            return None
        errors = [self.sampler.error, *(guard.error for guard in self.processors)]
        return next((error for error in errors if error is not None), None)

    def brought(self) -> Recalled:
        """What came back as rows, also while it was answered."""
        return self.recalled if self.looks is None else self.looks.brought()

    def release(self) -> list[tuple[Job, int]]:
        """The followers that have what they waited for; they follow no longer."""
        ready = [each for each in self.followers if each[1] <= self.prefilled]
        self.followers = [each for each in self.followers if each[1] > self.prefilled]
        return ready

    def close_stored(self) -> None:
        """No more of the prompt is stored."""
        if self.stored is not None:
            close(self.stored)
            self.stored = None

    def said(self, response: Any) -> Piece | Failed:
        """Return what a token adds to the answer, or the error that prevents it."""
        try:
            return self._piece(response)
        except ApiError as error:
            return Failed(error)
        except Exception as error:
            log.exception("the text of an answer cannot be read")
            return Failed(ModelFailedError(f"the model failed: {error}"))

    def _piece(self, response: Any) -> Piece:
        self.generated += 1
        if self.generated == 1 and math.isnan(response.logprobs[response.token].item()):
            raise ModelFailedError(
                "the model failed: its logits are NaN; check its weights, or load it in bfloat16 or float32"
            )
        text, stopped = self._read(response.token, response.finish_reason)
        if fault := self.job.fault:
            raise fault
        finish = "stop" if stopped else response.finish_reason
        choice, top = choices_of(response, self.job.logprobs)
        return Piece(text, choice, top, finish, self.job.index, None if finish is None else self.brought())

    def _read(self, token: int, finish: str | None) -> tuple[str, bool]:
        """The text that is certain after a token, and whether a stop text ended it."""
        if finish != "stop":  # the token that ends an answer is no text
            self.detokenizer.add_token(token)
        if finish is not None:
            self.detokenizer.finalize()
        self.stops, segments = TextStateMachine.split(self.stops, self.detokenizer.last_segment)
        text = "".join(part for state, part in segments if state is not None)
        stopped = self.stops[0] is None
        if finish is not None and not stopped:
            self.stops, rest, _ = TextStateMachine.flush(self.stops)
            text += rest
        return text, stopped


def rest_of(segments: list[list[int]], kinds: list[str], cached: int) -> tuple[list[list[int]], list[str]]:
    """The segments behind the first `cached` tokens."""
    left = []
    for segment, kind in zip(segments, kinds, strict=True):
        if len(segment) > cached:
            left.append((segment[cached:], kind))
        cached = max(0, cached - len(segment))
    return [segment for segment, _ in left], [kind for _, kind in left]


def choices_of(response: Any, count: int | None) -> tuple[Choice | None, tuple[Choice, ...]]:
    """The token and the `count` likeliest ones, with their log-probabilities."""
    if count is None:
        return None, ()
    logprobs = response.logprobs.astype(mx.float32)
    chosen = Choice(response.token, logprobs[response.token].item())
    if count == 0:
        return chosen, ()
    likely = mx.argsort(-logprobs)[:count]
    choices = (Choice(int(token), logprobs[token].item()) for token in likely)
    return chosen, tuple(choice for choice in choices if choice.logprob > -math.inf)  # where so many are allowed
