"""`Job` carries a request to the engine, events carry results back; `RunningJob` is the engine's state of a job."""

import asyncio
import logging
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from mlx_tq.cache.packed_rows import SharedBuffers
from mlx_tq.grammar.constraint import Constraint
from mlx_tq.grammar.grammar_source import GrammarError
from mlx_tq.prefix_cache.prefix_cache import CachedPrompt
from mlx_tq.prompt_cache.statistics import CacheStats
from mlx_tq.server.api_errors import ApiError, InvalidRequestError, ModelFailedError
from mlx_tq.server.prompt_builder import Prompt
from mlx_tq.server.sampling import ErrorGuard, Sampler, guard_processors
from mlx_tq.server.stop_strings import StopStrings
from mlx_tq.session.restore import RecallDuringDecode, RecallResult
from mlx_tq.session.transcript import NO_HITS, NO_QUOTATION, Quotation, SearchHits

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Started:
    """The job left the queue; `cached_tokens` of its prompt came from a cache."""

    cached_tokens: int


@dataclass(frozen=True)
class PrefillProgress:
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
    """A generated token, with the text that cannot become part of a stop sequence any more."""

    text: str
    logprob: TokenLogprob | None = None
    top_logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: str | None = None
    stop: str | None = None  # the stop sequence that ended the answer
    index: int = 0  # of the answer, where a prompt has several
    recalled: RecallResult | None = None  # with the last token


Event = Started | PrefillProgress | Quoted | Piece | ApiError


class SessionCaches(list[Any]):
    """The caches of a session after an answer, which hold `tokens`; `number` identifies them across ranks."""

    number: int
    tokens: np.ndarray


@dataclass(frozen=True)
class SessionStart:
    """The state from which a session's job continues; `quote` quotes the search hits that are not archived."""

    caches: SessionCaches | None  # of the first `cached_tokens`, never changed; None for a new session
    cached_tokens: int
    user_start: int = 0  # index, among the new tokens, of the last user message; the quotation goes there
    search_hits: SearchHits = NO_HITS
    # Makes the quotation from the live positions, int64 [N], and the number of tokens recalled by search.
    quote: Callable[[np.ndarray, int], Quotation] = lambda live, recalled_tokens: NO_QUOTATION
    max_quotation: int = 0  # tokens


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
    """One answer to generate. The engine's thread only reads it; only the event loop uses the queues."""

    prompt: Prompt
    max_tokens: int
    sampler: Sampler
    processors: list[Any]
    stops: list[str] = field(default_factory=list)
    thinking: tuple[str, str] | None = None  # the marks around reasoning, in which stops do not end the answer
    logprobs: int | None = None  # how many top log-probabilities to report per token; None reports none at all
    constraint: Constraint | None = None
    index: int = 0
    others: "tuple[Job, ...]" = ()  # further answers with the same `events`; they start when the prompt is prefilled
    session: SessionStart | None = None
    only_prefills: bool = False  # for a later prompt: it ends before its prompt's last token
    events: asyncio.Queue[Event] = field(default_factory=asyncio.Queue)  # an error is the last
    session_result: asyncio.Queue[SessionResult] = field(default_factory=asyncio.Queue)  # one, even after an error
    events_closed: asyncio.Event = field(default_factory=asyncio.Event)  # no one reads the events any more
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


class HeldCaches(NamedTuple):
    """Caches that are not in the batch, and the tokens that they hold."""

    caches: Any  # a list; None for a prompt of which nothing is prefilled
    tokens: list[int]


class RunningJob:
    """A job that was admitted: in mlx-lm's batch, or held outside of it. Only the engine's thread uses it."""

    def __init__(
        self,
        number: int,
        job: Job,
        cached_tokens: int,
        detokenizer: Any,
        sampler: ErrorGuard,
        stored: CachedPrompt | None,
    ) -> None:
        self.number, self.job = number, job  # jobs have numbers in the order of admission
        self.prompt_ids = job.prompt.ids  # with the quotation once that is made
        self.cached_tokens = self.prefilled = cached_tokens
        self.tokens: list[int] = []  # generated
        self.resumed = 0  # of these, those that were prefilled after a memory error
        self.stored = stored  # the sequence in the prefix cache
        self.restored_checkpoint = None if stored is None else stored.checkpoint  # keeps its shared rows alive
        self.step_ends: list[int] = []  # positions where prefill steps end
        self.segment_ends: list[int] = []  # those at which the caches are stored for others
        self.stored_in_memory = cached_tokens  # length of the prompt when it was last stored in memory
        self.held: HeldCaches | None = None  # while the prompt waits for its next prefill step
        self.pending = list(job.others)  # other answers, which wait for the prefill
        self.followers: dict[Job, int] = {}  # jobs that wait until this many tokens are prefilled here
        self.shared: SharedBuffers = []  # rows shared with other jobs
        self.question: list[int] = []  # last tokens of the prompt, before which evicted ones may be recalled; once
        self.recalled = RecallResult()
        self.decode_recall: RecallDuringDecode | None = None
        self.quotation, self.quotation_start = NO_QUOTATION, 0
        processors = [*job.processors] if job.constraint is None else [*job.processors, job.constraint]
        self.processors = [guard_processors(processors)] if processors else []
        self.sampler, self._detokenizer = sampler, detokenizer
        self._stops = StopStrings(job.stops, job.thinking, is_thinking=job.prompt.state == "reasoning")
        self.failed = False  # the client has the error; it is removed before the next step

    @property
    def generated(self) -> int:
        return len(self.tokens)

    @property
    def num_remaining(self) -> int:
        """Number of prompt tokens that are not prefilled."""
        return len(self.prompt_ids) - self.prefilled

    @property
    def is_decoding(self) -> bool:
        return self.num_remaining == 0

    @property
    def has_progress(self) -> bool:
        """Whether it has prefilled anything."""
        return self.prefilled > self.cached_tokens

    @property
    def held_nbytes(self) -> int:
        """Bytes of its own caches while they are not in the batch."""
        caches = self.held.caches if self.held is not None and self.has_progress else None
        return sum(cache.nbytes for cache in caches or [])

    @property
    def next_step(self) -> int:
        """Tokens of the next prefill step; 1 if only the last token remains, which begins the answer."""
        return next((end for end in self.step_ends if end > self.prefilled), len(self.prompt_ids)) - self.prefilled

    @property
    def remaining_steps(self) -> list[list[int]]:
        """The tokens of the steps that remain, the last token by itself."""
        ends = [end for end in self.step_ends if end > self.prefilled]
        edges = [self.prefilled, *ends, len(self.prompt_ids)]
        return [self.prompt_ids[start:stop] for start, stop in pairwise(edges) if start < stop]

    @property
    def can_resume(self) -> bool:
        """Whether the rest of the answer depends on nothing but the prompt and the answer so far."""
        return self.job.session is None

    def resume(self) -> list[int]:
        """Return prompt and answer so far, which are to be prefilled as a prompt."""
        self.close_stored()
        self.prompt_ids, self.prefilled = [*self.job.prompt.ids, *self.tokens], 0
        self.cached_tokens, self.resumed, self.restored_checkpoint = 0, len(self.tokens), None
        self.segment_ends = []
        self.shared, self.held = [], None
        return self.prompt_ids

    @property
    def total_recalled(self) -> RecallResult:
        """All tokens that were recalled before the answer and during it."""
        return self.recalled if self.decode_recall is None else self.decode_recall.result()

    def describe(self) -> dict[str, int]:
        """Return numbers of tokens."""
        return {
            "prompt_tokens": len(self.prompt_ids) - self.resumed,
            "cached_tokens": self.cached_tokens,
            "prefilled": self.prefilled,
            "generated": self.generated,
            "max_tokens": self.job.max_tokens,
            "followers": len(self.followers),
        }

    def close_stored(self) -> None:
        """Finish storing, in a thread of its own: no answer waits for the disk."""
        if self.stored is not None:
            self.stored.checkpoint = None  # its rows are not to be shared for as long as the disk takes
            threading.Thread(target=self.stored.close, name="store").start()
            self.stored = None

    def next_event(self, response: Any) -> Piece | ApiError:
        """Turn a response of mlx-lm's batch into a piece of the answer, or the error that prevents it."""
        self.tokens.append(response.token)
        constraint = self.job.constraint
        try:
            if self.generated == 1 and math.isnan(response.logprobs[response.token].item()):
                return ModelFailedError(
                    "the model failed: its logits are NaN; check its weights, or load it in bfloat16 or float32"
                )
            text, stop = self._decode(response.token, response.finish_reason)
            if constraint is not None:
                constraint.check()
            finish_reason = response.finish_reason if stop is None else "stop"
            logprob, top_logprobs = self._logprobs(response)
            recalled = None if finish_reason is None else self.total_recalled
            return Piece(text, logprob, top_logprobs, finish_reason, stop, self.job.index, recalled)
        except GrammarError as error:
            return InvalidRequestError(str(error), None if constraint is None else constraint.param)
        except Exception as error:
            log.exception("cannot decode the text of an answer")
            return ModelFailedError(f"the model failed: {error}")

    def _decode(self, token: int, finish_reason: str | None) -> tuple[str, str | None]:
        """Return the text that is certain after a token, and the stop sequence that ended it, if one did."""
        if finish_reason != "stop":  # the token that ends an answer is no text
            self._detokenizer.add_token(token)
        if finish_reason is not None:
            self._detokenizer.finalize()
        return self._stops.add(self._detokenizer.last_segment, is_last=finish_reason is not None)

    def _logprobs(self, response: Any) -> tuple[TokenLogprob | None, tuple[TokenLogprob, ...]]:
        """Return the log-probabilities of the token and of the most likely ones, if the job reports them."""
        if (count := self.job.logprobs) is None:
            return None, ()
        logprobs = response.logprobs.astype(mx.float32)
        best: Any = mx.argsort(-logprobs)[:count].tolist() if count else []
        chosen, *top = (TokenLogprob(token, logprobs[token].item()) for token in [response.token, *best])
        return chosen, tuple(entry for entry in top if entry.logprob > -math.inf)  # a constraint may allow fewer tokens
