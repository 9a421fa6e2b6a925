"""What the server offers, without HTTP: a request becomes a job and the answer that its events fill."""

from dataclasses import dataclass, field
from typing import Any

from mlx_tq.cli.grammar import CompiledGrammar, Grammars
from mlx_tq.cli.preflight import check_memory, check_positions
from mlx_tq.errors import ConfigError
from mlx_tq.prompt_cache.plan import Plan
from mlx_tq.rescue import RescueClient
from mlx_tq.server.answers import Answer, MessageReader, TextReader
from mlx_tq.server.conversation import Conversations, Prompt
from mlx_tq.server.engine import Engine
from mlx_tq.server.errors import ContextLengthError, InvalidRequestError, ModelNotFoundError
from mlx_tq.server.formats import ResponseFormats
from mlx_tq.server.jobs import Job
from mlx_tq.server.large_requests import LargeRequests
from mlx_tq.server.metrics import Metrics
from mlx_tq.server.sampling import Sampling, processors
from mlx_tq.server.schemas import ChatRequest, CompletionRequest
from mlx_tq.server.sessions import HEADER, Kept, Sessions, Turn

DEFAULT_MODEL = "default_model"  # what mlx-lm's server calls the model that it was started with


@dataclass(frozen=True)
class Service:
    """One model, and the defaults of its requests.

    Attributes:
        name: of the model.
        created: when it was loaded, in seconds since 1970.
        tokenizer: of the model.
        conversations: makes prompts.
        grammars: compiles grammars for this tokenizer.
        response_formats: compiles a request's response_format.
        sessions: that are kept between requests.
        rescue: client of the rescue service, or None.
        engine: generates.
        metrics: counts.
        sampling, max_tokens: where a request does not say.
        positions: that the model allows, or None.
        plan, memory: of the caches and the bytes they may take; None where nothing is compressed.
        large_requests: queue that prepares large requests one at a time.
    """

    name: str
    created: int
    tokenizer: Any
    conversations: Conversations
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
        """Raise unless `name` is that of the model, or none.

        Raises:
            ModelNotFoundError: it is another's. Requests never choose what is loaded.
        """
        if name not in (None, DEFAULT_MODEL, self.name):
            raise ModelNotFoundError(
                f"the model {str(name)[:100]!r} is not served; this server has {self.name}", "model"
            )

    async def prepare_in_thread(
        self,
        request: ChatRequest | CompletionRequest,
        nbytes: int,
        session: Kept | None = None,
        grammar: CompiledGrammar | None = None,
    ) -> tuple[list[Job], Answer, Turn | None]:
        """Run `prepare` in a worker thread, with large requests one at a time.

        Raises:
            QueueFullError: too many large requests wait; and what `prepare` raises.
        """
        return await self.large_requests.run(nbytes, self.prepare, request, session, grammar)

    def prepare(
        self,
        request: ChatRequest | CompletionRequest,
        session: Kept | None = None,
        grammar: CompiledGrammar | None = None,
    ) -> tuple[list[Job], Answer, Turn | None]:
        """A job for each prompt, their answer, still empty, and the turn of the session that it is, if it is one.

        Args:
            request: from the client.
            session: that it belongs to.
            grammar: that its answers have to follow.

        Raises:
            InvalidRequestError: another model, a conversation that the template refuses, or one that is too long.
        """
        self.check_model(request.model)
        vocabulary = self.conversations.vocabulary
        sampling = self.sampling.changed_by(request)
        logprobs, turn, constraint = None, None, None
        readers: list[MessageReader | TextReader]
        prompts: list[Prompt]
        count = request.n or 1
        if isinstance(request, ChatRequest):
            if session is not None:
                self._check_turn(request)
                turn = self._turn(session, request)
            prompts = [prompt := self.conversations.chat(request) if turn is None else turn.prompt]
            logprobs = (request.top_logprobs or 0) if request.logprobs else None
            tools = [tool.model_dump() for tool in request.tools or []]
            if grammar is not None:
                constraint = self.grammars.constraint(grammar, thinks=prompt.state == "reasoning")
            readers = [
                MessageReader(self.tokenizer, prompt.state, tools, constrained=grammar is not None)
                for _ in range(count)
            ]
        else:
            if session is not None:
                raise InvalidRequestError(f"sessions are for /v1/chat/completions; leave {HEADER} out", HEADER)
            prompts = [self.conversations.text(prompt) for prompt in request.prompts]
            readers = [TextReader() for _ in range(count * len(prompts))]
        jobs = []
        for place, prompt in enumerate(prompts):
            job, *job.others = (
                Job(
                    prompt,
                    self._answer_tokens(len(prompt.ids) + (0 if turn is None else turn.start.reserve), request),
                    sampling.sampler(vocabulary, None if request.seed is None else (request.seed + choice) % 2**64),
                    processors(request, vocabulary),
                    request.stops,
                    logprobs,
                    None if constraint is None else constraint.copy(),
                    place * count + choice,
                    start=None if turn is None else turn.start,
                )
                for choice in range(count)
            )
            jobs.append(job)
        for each in (each for job in jobs for each in (job, *job.others)):
            each.events = jobs[0].events
        rescued = None if turn is None else 0
        return jobs, Answer(self.name, readers, sum(len(prompt.ids) for prompt in prompts), rescued), turn

    def _check_turn(self, request: ChatRequest) -> None:
        """Raise where a session could not go on behind the answer."""
        if (request.n or 1) > 1:
            raise InvalidRequestError(f"a session goes on behind one answer; leave n or {HEADER} out", "n")
        if request.prefill is not None:
            raise InvalidRequestError(f"a session begins its answers itself; leave {HEADER} out", "messages")

    def _turn(self, session: Kept, request: ChatRequest) -> Turn:
        """The request as it follows its session, or from its beginning where that has no positions left."""
        turn = self.sessions.begin(session, request)
        try:
            left = self._answer_tokens(len(turn.prompt.ids) + turn.start.reserve, request)
        except ContextLengthError:
            left = 0
        if turn.is_new or left >= min(request.answer_tokens or 1, self.max_tokens):
            return turn
        return self.sessions.begin(session, request, anew=True)

    def _answer_tokens(self, prompt: int, request: ChatRequest | CompletionRequest) -> int:
        """How many tokens to generate: what is asked for, or the default, as far as positions are left.

        Raises:
            ContextLengthError: the prompt exceeds the positions, or prompt and answer the memory.
        """
        tokens, count = request.answer_tokens or self.max_tokens, request.n or 1
        if count > self.engine.concurrency:
            raise InvalidRequestError(f"n is {count}; this server gives {self.engine.concurrency} at most", "n")
        param = "messages" if isinstance(request, ChatRequest) else "prompt"
        try:
            check_positions(prompt, self.positions)
            if self.positions is not None:
                tokens = min(tokens, self.positions - prompt)
            if self.plan is not None and self.memory is not None:
                shared = (count - 1) * self.plan.shared_nbytes(prompt - 1, prompt + tokens)
                check_memory(self.plan, prompt + tokens, (self.memory + shared) // count)
        except ConfigError as error:
            raise ContextLengthError(str(error), param) from error
        return tokens
