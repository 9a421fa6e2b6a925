"""`ModelService`: what the server offers, without HTTP. Requests become jobs, and an answer for their events."""

import asyncio
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

from mlx_tq.cli.preflight import check_memory, check_positions
from mlx_tq.errors import ConfigError
from mlx_tq.grammar.constraint import CompiledGrammar, Grammars
from mlx_tq.prompt_cache.plan import Plan
from mlx_tq.rescue import RescueClient
from mlx_tq.server.answers import Answer, MessageReader, TextReader
from mlx_tq.server.api_errors import ContextLengthError, InvalidRequestError, ModelNotFoundError
from mlx_tq.server.engine import Engine
from mlx_tq.server.guard import LargeRequests
from mlx_tq.server.job import Event, Job, SessionResult
from mlx_tq.server.metrics import Metrics
from mlx_tq.server.prompt_builder import Prompt, PromptBuilder
from mlx_tq.server.response_formats import ResponseFormats
from mlx_tq.server.sampling import Sampling, logits_processors
from mlx_tq.server.schemas import ChatRequest, CompletionRequest
from mlx_tq.server.sessions import HEADER, ServerSession, Sessions, SessionTurn

DEFAULT_MODEL = "default_model"  # what clients of mlx-lm's server call the model that it was started with

Prepared = tuple[list[Job], Answer, SessionTurn | None]


@dataclass(frozen=True)
class ModelService:
    """One model, and the defaults of its requests. `plan` and `memory` are None where nothing is compressed."""

    name: str
    created: int  # seconds since 1970
    tokenizer: Any
    prompt_builder: PromptBuilder
    grammars: Grammars
    response_formats: ResponseFormats
    sessions: Sessions
    rescue: RescueClient | None
    engine: Engine
    metrics: Metrics
    sampling: Sampling
    max_tokens: int
    positions: int | None
    plan: Plan | None
    memory: int | None
    large_requests: LargeRequests = field(default_factory=LargeRequests)

    def check_model(self, name: str | None) -> None:
        """Refuse the name of another model: requests never choose what is loaded."""
        if name not in (None, DEFAULT_MODEL, self.name):
            message = f"the model {str(name)[:100]!r} is not served; this server has {self.name}"
            raise ModelNotFoundError(message, "model")

    def prepare(
        self,
        request: ChatRequest | CompletionRequest,
        session: ServerSession | None = None,
        grammar: CompiledGrammar | None = None,
    ) -> Prepared:
        """Return a job for each prompt, their answer, still empty, and the turn of the session."""
        self.check_model(request.model)
        if session is not None:
            _check_session_request(request)
        turn, constraint, logprobs, count = None, None, None, request.n or 1
        prompts: list[Prompt]
        readers: list[MessageReader | TextReader]
        if isinstance(request, ChatRequest):
            turn = None if session is None else self._begin_turn(session, request)
            prompts = [prompt := self.prompt_builder.chat_prompt(request) if turn is None else turn.prompt]
            logprobs = (request.top_logprobs or 0) if request.logprobs else None
            tools = [tool.model_dump() for tool in request.tools or []]
            if grammar is not None:
                constraint = self.grammars.constraint(grammar, thinks=prompt.state == "reasoning")
            readers = [
                MessageReader(self.tokenizer, prompt.state, tools, constrained=grammar is not None)
                for _ in range(count)
            ]
        else:
            prompts = [self.prompt_builder.completion_prompt(prompt) for prompt in request.prompts]
            readers = [TextReader() for _ in range(count * len(prompts))]
        events: asyncio.Queue[Event] = asyncio.Queue()  # of all jobs
        sampling, vocabulary = self.sampling.updated(request), self.prompt_builder.vocabulary
        jobs = []
        for number, prompt in enumerate(prompts):
            quotation = 0 if turn is None else turn.start.max_quotation
            answers = [
                Job(
                    prompt,
                    self._answer_tokens(len(prompt.ids) + quotation, request),
                    sampling.sampler(vocabulary, None if request.seed is None else (request.seed + choice) % 2**64),
                    logits_processors(request, vocabulary),
                    stops=request.stops,
                    logprobs=logprobs,
                    constraint=None if constraint is None else constraint.copy(),
                    index=number * count + choice,
                    session=None if turn is None else turn.start,
                    events=events,
                )
                for choice in range(count)
            ]
            jobs.append(replace(answers[0], others=tuple(answers[1:])))
        rescued_tokens = None if turn is None else 0
        answer = Answer(self.name, readers, sum(len(prompt.ids) for prompt in prompts), rescued_tokens)
        return jobs, answer, turn

    def _begin_turn(self, session: ServerSession, request: ChatRequest) -> SessionTurn:
        """Continue the session, or start it again if too few positions remain."""
        turn = self.sessions.begin(session, request)
        try:
            tokens = self._answer_tokens(len(turn.prompt.ids) + turn.start.max_quotation, request)
        except ContextLengthError:
            tokens = 0
        if turn.start.caches is None or tokens >= min(request.answer_tokens or 1, self.max_tokens):
            return turn
        return self.sessions.begin(session, request, restart=True)

    def _answer_tokens(self, prompt_tokens: int, request: ChatRequest | CompletionRequest) -> int:
        """Return how many tokens to generate at most; refuse what exceeds the context length or the memory."""
        tokens, count = request.answer_tokens or self.max_tokens, request.n or 1
        if count > self.engine.limits.concurrency:
            raise InvalidRequestError(
                f"n is {count}; this server generates at most {self.engine.limits.concurrency}", "n"
            )
        try:
            check_positions(prompt_tokens, self.positions)
            if self.positions is not None:
                tokens = min(tokens, self.positions - prompt_tokens)
            if self.plan is not None and self.memory is not None:
                shared = (count - 1) * self.plan.shared_nbytes(prompt_tokens - 1, prompt_tokens + tokens)
                check_memory(self.plan, prompt_tokens + tokens, (self.memory + shared) // count)
        except ConfigError as error:
            param = "messages" if isinstance(request, ChatRequest) else "prompt"
            raise ContextLengthError(str(error), param) from error
        return tokens

    def report(self) -> dict[str, Any]:
        """Return the model, defaults and how caches are stored, for /v1/plan; it contains no path of this machine."""
        return {
            "model": self.name,
            "context_length": self.positions,
            "temperature": self.sampling.temperature,
            "max_tokens": self.max_tokens,
            "sessions": self.sessions.limit,
            "rescue": self.sessions.has_rescue,
            "plan": None if self.plan is None else _plan_report(self.plan),
        }

    def session_report(self, result: SessionResult) -> dict[str, Any]:
        """Return what a session holds after an answer. The quoted text is the client's own."""
        stats, recalled, quotation = result.stats, result.recalled, result.quotation
        assert stats is not None  # noqa: S101 - tells the type checker
        assert recalled is not None  # noqa: S101 - likewise
        quoted = zip(quotation.ranges, quotation.texts, strict=True)
        return {
            "context_length": self.positions,
            "tokens": stats.tokens,
            "live": stats.tokens - stats.evicted,
            "evicted": stats.evicted,
            "archived": stats.archived,
            "archived_bytes": stats.archived_nbytes,
            "recalled": len(recalled.positions),
            "recalled_by_search": len(recalled.by_search),
            "recall_ms": round(1000 * recalled.seconds, 1),
            "rescued": len(quotation.ids),
            "bytes": stats.nbytes,
            "fp16_bytes": stats.fp16_nbytes,
            "quoted": [{"start": start, "stop": stop, "text": text} for (start, stop), text in quoted],
        }


def _check_session_request(request: ChatRequest | CompletionRequest) -> None:
    """Refuse requests after whose answer a session could not continue."""
    if not isinstance(request, ChatRequest):
        raise InvalidRequestError(f"sessions are for /v1/chat/completions; leave {HEADER} out", HEADER)
    if (request.n or 1) > 1:
        raise InvalidRequestError(f"a session has one answer per turn; leave n or {HEADER} out", "n")
    if request.prefill is not None:
        raise InvalidRequestError(f"a session cannot continue a partial answer; leave {HEADER} out", "messages")


def _plan_report(plan: Plan) -> dict[str, Any]:
    groups = groupby(plan.layers, key=lambda layer: (layer.spec.keys, layer.spec.value))
    spec, eviction = plan.layers[0].spec, plan.eviction
    return {
        "layers": [{"count": len(list(layers)), "key": key, "value": value} for (key, value), layers in groups],
        "other_layers": len(plan.classes) - len({layer.slot.index for layer in plan.layers}),
        "sinks": spec.sinks,
        "window": spec.window,
        "dtype": str(plan.layers[0].slot.dtype),
        "ranks": plan.ranks.size,
        "eviction": None
        if eviction is None
        else {
            "policy": eviction.config.policy.name,
            "budget": eviction.budget.tokens if eviction.budget.share is None else eviction.config.budget,
            "recall": eviction.config.recalls,
        },
    }
