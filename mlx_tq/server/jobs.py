"""What passes between the web side and the engine: a job one way, events the other."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mlx_tq.cli.grammar import Constraint
from mlx_tq.cli.grammar_source import GrammarError
from mlx_tq.server.conversation import Prompt
from mlx_tq.server.errors import ApiError, InvalidRequestError
from mlx_tq.server.held import Held
from mlx_tq.server.sampling import Sampler
from mlx_tq.session.recall import NOWHERE, Named, Recalled
from mlx_tq.session.transcript import NOTHING, Rehydration

# What is quoted to a turn, by the live positions, int64 [N], and the tokens that came back as rows.
Quote = Callable[[np.ndarray, int], Rehydration]


@dataclass(frozen=True)
class Started:
    """The job left the queue; so many tokens of its prompt were in memory or in the store of prefixes."""

    cached: int


@dataclass(frozen=True)
class Progress:
    """Tokens of the prompt that have been read, of those that had to be."""

    done: int
    total: int


@dataclass(frozen=True)
class Choice:
    """A token and its log-probability."""

    token: int
    logprob: float


@dataclass(frozen=True)
class Piece:
    """A token and the text that is certain with it.

    Attributes:
        text: may be empty, while it could still be the beginning of a stop text.
        choice, top: the token and the likeliest ones, where the job asks for log-probabilities.
        finish: "stop" or "length" with the last token.
        recalled: with the last token, what came back as rows.
        index: of the answer, where a prompt has several.
    """

    text: str
    choice: Choice | None = None
    top: tuple[Choice, ...] = ()
    finish: str | None = None
    index: int = 0
    recalled: Recalled | None = None


@dataclass(frozen=True)
class Quoted:
    """So many tokens of a quotation come before the question, beside those of the prompt."""

    tokens: int


@dataclass(frozen=True)
class Failed:
    """The job ended without an answer."""

    error: ApiError


Event = Started | Progress | Quoted | Piece | Failed


class SessionCaches(list[Any]):
    """The caches of a session after an answer.

    Attributes:
        number: by which the first of several ranks names them to the others, which have their part of them.
    """

    number: int


@dataclass(frozen=True)
class Start:
    """Where the job of a session goes on.

    Attributes:
        caches: of the first tokens of the prompt, which stay as they are; None to begin anew.
        cached: how many tokens these are.
        at: of the turn's new tokens, those that the template has before the user's words.
        named: where the rescue service found what the turn needs; what of it is archived comes back as rows.
        quote: the rest of that as text, by the positions that are live then and the tokens that came as rows.
        reserve: tokens of such a quotation, at most.
    """

    caches: SessionCaches | None
    cached: int
    at: int = 0
    named: Named = NOWHERE
    quote: Quote = lambda live, rows: NOTHING
    reserve: int = 0


@dataclass(frozen=True)
class Left:
    """The job of a session has left the engine; with caches of these tokens if its answer is complete.

    Attributes:
        caches, tokens: of all that was read and said.
        held: what the caches hold.
        quoted, at: what the turn quoted, and before which of its new tokens.
    """

    caches: SessionCaches | None = None
    tokens: list[int] = field(default_factory=list)
    held: Held | None = None
    quoted: Rehydration = NOTHING
    at: int = 0


@dataclass(eq=False)
class Job:
    """One answer to be generated.

    Attributes:
        prompt: what to read.
        max_tokens: to generate.
        sampler, processors: of mlx-lm.
        stops: texts that end the answer and are not part of it.
        logprobs: how many of the likeliest tokens to report with each; None reports nothing.
        constraint: what the answer is held to, or None.
        index: of the answer, where a prompt has several.
        others: the other answers to the prompt; they begin when it is read, and put their events beside its own.
        start: where it goes on, if it belongs to a session.
        events: what became of it, in order. Only its own event loop may touch it and what follows.
        left: holds the end of a session's job, once.
        heard: nobody listens to events any more.
        cancelled: nobody waits for the answer any more.
    """

    prompt: Prompt
    max_tokens: int
    sampler: Sampler
    processors: list[Any]
    stops: list[str] = field(default_factory=list)
    logprobs: int | None = None
    constraint: Constraint | None = None
    index: int = 0
    others: "list[Job]" = field(default_factory=list)
    start: Start | None = None
    events: asyncio.Queue[Event] = field(default_factory=asyncio.Queue)
    left: asyncio.Queue[Left] = field(default_factory=asyncio.Queue)
    heard: asyncio.Event = field(default_factory=asyncio.Event)
    cancelled: bool = False

    @property
    def all_processors(self) -> list[Any]:
        """Whatever changes logits; what the answer is held to has the last word."""
        return self.processors if self.constraint is None else [*self.processors, self.constraint]

    @property
    def fault(self) -> InvalidRequestError | None:
        """Why the answer cannot be held any further to what it should be."""
        try:
            if self.constraint is not None:
                self.constraint.check()
        except GrammarError as error:
            return InvalidRequestError(str(error), "response_format")
        return None

    @property
    def named(self) -> Named:
        """Where the rescue service found what it needs."""
        return NOWHERE if self.start is None else self.start.named

    @property
    def tokens(self) -> int:
        """Of prompt, quotation and answer, at most."""
        return len(self.prompt.ids) + self.max_tokens + (0 if self.start is None else self.start.reserve)

    @property
    def goes_on(self) -> bool:
        """It goes on from the caches of a session."""
        return self.start is not None and self.start.caches is not None

    @property
    def kept_nbytes(self) -> int:
        """Bytes of its session's caches, which are kept until the answer is complete."""
        return sum(cache.nbytes for cache in (self.start and self.start.caches) or [])
