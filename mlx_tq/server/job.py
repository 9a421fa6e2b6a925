"""`Job` carries a request to the engine, events carry results back; `RunningJob` is the engine's state of a job."""

import asyncio
import logging
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.generate import TextStateMachine

from mlx_tq.cache.sharing import Shared
from mlx_tq.grammar.constraint import Constraint
from mlx_tq.grammar.grammar_source import GrammarError
from mlx_tq.prefix_cache.prefix_cache import CachedPrompt
from mlx_tq.prompt_cache.statistics import CacheStats
from mlx_tq.server.api_errors import ApiError, InvalidRequestError, ModelFailedError
from mlx_tq.server.prompt_builder import Prompt
from mlx_tq.server.sampling import GuardedProcessors, GuardedSampler, Sampler
from mlx_tq.session.restore import RecallDuringDecode, RecallResult
from mlx_tq.session.transcript import NO_HITS, NO_QUOTATION, Quotation, SearchHits

log = logging.getLogger(__name__)

# Makes the quotation of a turn from the live positions, int64 [N], and the number of tokens recalled by search.
Quote = Callable[[np.ndarray, int], Quotation]


@dataclass(frozen=True)
class Started:
    """The job left the queue; `cached_tokens` of its prompt came from a cache."""

    cached_tokens: int


@dataclass(frozen=True)
class Progress:
    """`done` of the `total` prompt tokens to prefill were processed."""

    done: int
    total: int


@dataclass(frozen=True)
class Quoted:
    """A quotation of `tokens` tokens was added to the prompt, before the question."""

    tokens: int


@dataclass(frozen=True)
class TokenLogprob:
    token: int
    logprob: float


@dataclass(frozen=True)
class Piece:
    """A generated token, with the text that is certain now.

    `text` may be empty while it could still become a stop sequence. `recalled` comes with the last token.
    """

    text: str
    logprob: TokenLogprob | None = None
    top_logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: str | None = None
    index: int = 0  # of the answer, where a prompt has several
    recalled: RecallResult | None = None


@dataclass(frozen=True)
class Failed:
    error: ApiError


Event = Started | Progress | Quoted | Piece | Failed


class SessionCaches(list[Any]):
    """The caches of a session after an answer; `number` identifies them across ranks."""

    number: int


@dataclass(frozen=True)
class SessionStart:
    """The state from which a session's job continues.

    Attributes:
        caches: hold the first `cached_tokens` of the prompt and stay unchanged; None for a new session.
        user_start: index, among the new tokens, of the user's words; the quotation goes there.
        search_hits: positions that the rescue service found; archived ones are recalled as rows.
        quote: makes the quotation of the other hits.
        max_quotation: upper bound of its tokens.
    """

    caches: SessionCaches | None
    cached_tokens: int
    user_start: int = 0
    search_hits: SearchHits = NO_HITS
    quote: Quote = lambda live, recalled_tokens: NO_QUOTATION
    max_quotation: int = 0


@dataclass(frozen=True)
class SessionResult:
    """The end of a session's job. `caches` is None unless the answer is complete; they hold `tokens`."""

    caches: SessionCaches | None = None
    tokens: list[int] = field(default_factory=list)
    stats: CacheStats | None = None
    recalled: RecallResult | None = None
    quotation: Quotation = NO_QUOTATION
    quotation_start: int = 0  # index among the turn's new tokens


@dataclass(frozen=True, eq=False)
class Job:
    """One answer to generate. The engine's thread only reads it.

    Attributes:
        logprobs: how many top log-probabilities to report per token; None reports none at all.
        others: further answers to the same prompt, which start when it is prefilled; they share `events`.
        events: results in order; only the event loop may use this and the next two.
        session_result: receives the end of a session's job, once.
        events_closed: set when the web side stops reading events.
        cancelled: set by `Engine.cancel`.
    """

    prompt: Prompt
    max_tokens: int
    sampler: Sampler
    processors: list[Any]
    stops: list[str] = field(default_factory=list)
    logprobs: int | None = None
    constraint: Constraint | None = None
    index: int = 0
    others: "tuple[Job, ...]" = ()
    session: SessionStart | None = None
    events: asyncio.Queue[Event] = field(default_factory=asyncio.Queue)
    session_result: asyncio.Queue[SessionResult] = field(default_factory=asyncio.Queue)
    events_closed: asyncio.Event = field(default_factory=asyncio.Event)
    cancelled: threading.Event = field(default_factory=threading.Event)

    @property
    def answers(self) -> "tuple[Job, ...]":
        return self, *self.others

    @property
    def max_total_tokens(self) -> int:
        """Upper bound of the tokens of prompt, quotation and answer."""
        return len(self.prompt.ids) + self.max_tokens + (0 if self.session is None else self.session.max_quotation)

    @property
    def continues_session(self) -> bool:
        return self.session is not None and self.session.caches is not None

    @property
    def session_nbytes(self) -> int:
        """Bytes of the session's caches, which stay until the answer is complete."""
        return sum(cache.nbytes for cache in (self.session and self.session.caches) or [])


class RunningJob:
    """A job in the batch. Only the engine's thread uses it.

    Attributes:
        prompt_ids: the prompt, with the quotation once that is made.
        cached_kinds: kinds of the segments at whose ends the cache is stored, the next one last.
        question: tokens at the end of the prompt before which evicted tokens may be recalled; empty afterwards.
        splits_segment: the last segment was split before the question.
        prefilled, generated: numbers of tokens.
        stored: the prompt in the prefix cache while it is prefilled; `restored_point` keeps its shared rows alive.
        pending: other answers that wait for the prefill.
        step_ends: positions where prefill steps end.
        followers: jobs that wait until `position` tokens are prefilled here, as (job, position).
        shared: rows shared with other jobs.
        failed: the client has the error; the job leaves the batch before the next step.
    """

    def __init__(
        self,
        job: Job,
        cached_tokens: int,
        cached_kinds: list[str],
        detokenizer: Any,
        sampler: GuardedSampler,
        stored: CachedPrompt | None = None,
    ) -> None:
        self.job, self.stored, self.prompt_ids = job, stored, job.prompt.ids
        self.restored_point = None if stored is None else stored.checkpoint
        self.cached_kinds = cached_kinds[::-1]
        self.question: list[int] = []
        self.splits_segment = False
        self.detokenizer = detokenizer
        self.stop_state = TextStateMachine({"normal": [(stop, None) for stop in job.stops]}).make_state()
        self.prefilled, self.generated = cached_tokens, 0
        self.recalled = RecallResult()
        self.looks: RecallDuringDecode | None = None
        self.quotation, self.quotation_start = NO_QUOTATION, 0
        self.pending = list(job.others)
        self.step_ends: list[int] = []
        self.followers: list[tuple[Job, int]] = []
        self.shared: Shared = []
        processors = [*job.processors] if job.constraint is None else [*job.processors, job.constraint]
        self.processors = [GuardedProcessors(processors)] if processors else []
        self.sampler = sampler
        self.failed = False

    @property
    def is_decoding(self) -> bool:
        return self.prefilled == len(self.prompt_ids)

    @property
    def total_recalled(self) -> RecallResult:
        """All tokens that were recalled before the answer and during it."""
        return self.recalled if self.looks is None else self.looks.result()

    @property
    def sampling_error(self) -> Exception | None:
        """The error that this job's processors or sampler raised in the last step."""
        if not self.is_decoding:  # the shared sampler failed for another job
            return None
        errors = [self.sampler.error, *(guard.error for guard in self.processors)]
        return next((error for error in errors if error is not None), None)

    def release_followers(self) -> list[tuple[Job, int]]:
        """Return the followers whose shared prefix is prefilled, and forget them."""
        ready = [follower for follower in self.followers if follower[1] <= self.prefilled]
        self.followers = [follower for follower in self.followers if follower[1] > self.prefilled]
        return ready

    def close_stored(self) -> None:
        """Finish storing the prompt, in a thread of its own: no answer waits for the disk."""
        if self.stored is not None:
            threading.Thread(target=self.stored.close, name="store").start()
            self.stored = None

    def next_event(self, response: Any) -> Piece | Failed:
        """Turn a response of mlx-lm's batch into a piece of the answer, or the error that prevents it."""
        try:
            return self._piece(response)
        except ApiError as error:
            return Failed(error)
        except Exception as error:
            log.exception("cannot decode the text of an answer")
            return Failed(ModelFailedError(f"the model failed: {error}"))

    def _piece(self, response: Any) -> Piece:
        self.generated += 1
        if self.generated == 1 and math.isnan(response.logprobs[response.token].item()):
            raise ModelFailedError(
                "the model failed: its logits are NaN; check its weights, or load it in bfloat16 or float32"
            )
        text, stopped = self._decode(response.token, response.finish_reason)
        try:
            if self.job.constraint is not None:
                self.job.constraint.check()
        except GrammarError as error:
            raise InvalidRequestError(str(error), "response_format") from error
        finish_reason = "stop" if stopped else response.finish_reason
        logprob, top_logprobs = token_logprobs(response, self.job.logprobs)
        recalled = None if finish_reason is None else self.total_recalled
        return Piece(text, logprob, top_logprobs, finish_reason, self.job.index, recalled)

    def _decode(self, token: int, finish_reason: str | None) -> tuple[str, bool]:
        """Return the text that is certain after a token, and whether a stop sequence ended it."""
        if finish_reason != "stop":  # the token that ends an answer is no text
            self.detokenizer.add_token(token)
        if finish_reason is not None:
            self.detokenizer.finalize()
        self.stop_state, segments = TextStateMachine.split(self.stop_state, self.detokenizer.last_segment)
        text = "".join(part for state, part in segments if state is not None)
        stopped = self.stop_state[0] is None
        if finish_reason is not None and not stopped:
            self.stop_state, rest, _ = TextStateMachine.flush(self.stop_state)
            text += rest
        return text, stopped


def remaining_segments(prompt: Prompt, cached_tokens: int) -> tuple[list[list[int]], list[str]]:
    """Return what the segments hold after the first `cached_tokens`, and their kinds."""
    segments, kinds = [], []
    for segment, kind in zip(prompt.segments, prompt.kinds, strict=True):
        if len(segment) > cached_tokens:
            segments.append(segment[cached_tokens:])
            kinds.append(kind)
        cached_tokens = max(0, cached_tokens - len(segment))
    return segments, kinds


def token_logprobs(response: Any, count: int | None) -> tuple[TokenLogprob | None, tuple[TokenLogprob, ...]]:
    """Return the log-probabilities of the token and of the `count` most likely ones."""
    if count is None:
        return None, ()
    logprobs = response.logprobs.astype(mx.float32)
    chosen = TokenLogprob(response.token, logprobs[response.token].item())
    if count == 0:
        return chosen, ()
    best = mx.argsort(-logprobs)[:count]
    top = (TokenLogprob(int(token), logprobs[token].item()) for token in best)
    return chosen, tuple(entry for entry in top if entry.logprob > -math.inf)  # a constraint may allow fewer tokens
