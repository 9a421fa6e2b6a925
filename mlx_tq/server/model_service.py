"""`ModelService`: what the server offers, without HTTP. Requests become jobs, and an answer for their events."""

import asyncio
import sys
import time
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import cached_property, partial
from itertools import groupby
from typing import Any

from mlx_lm.sample_utils import greedy_sampler

from mlx_tq.cli.options import Request
from mlx_tq.cli.sampling_settings import choose_sampling
from mlx_tq.cli.screen import note
from mlx_tq.errors import ConfigError
from mlx_tq.grammar.call_grammar import find_special_tokens
from mlx_tq.grammar.constraint import Grammars
from mlx_tq.integration.probe import check_token_ids, native_caches, position_limit
from mlx_tq.models import short_name
from mlx_tq.prefix_cache.prefix_cache import PrefixCache
from mlx_tq.prompt_cache.memory import weights_nbytes
from mlx_tq.prompt_cache.plan import Plan
from mlx_tq.rescue import RescueClient
from mlx_tq.server.admission import EngineLimits
from mlx_tq.server.answer_grammars import AnswerGrammar, AnswerGrammars
from mlx_tq.server.answers import Answer, Choice
from mlx_tq.server.api_errors import ContextLengthError, InvalidRequestError
from mlx_tq.server.engine import Engine
from mlx_tq.server.grammar_queue import GrammarQueue
from mlx_tq.server.job import Event, Job, SessionResult
from mlx_tq.server.metrics import Metrics, value_of
from mlx_tq.server.prompt_builder import Prompt, PromptBuilder
from mlx_tq.server.sampling import Sampling, logits_processors
from mlx_tq.server.schemas import ChatRequest, CompletionRequest
from mlx_tq.server.sessions import HEADER, ServerSession, Sessions, SessionTurn
from mlx_tq.server.stored_prompts import MIN_STORED
from mlx_tq.server.thinking_budget import BRIDGE, BRIDGE_TO_CALL, ThinkingBudget
from mlx_tq.speculative.drafts import Drafter

AnyRequest = ChatRequest | CompletionRequest

# Tokens of an answer whose length nobody limits: the fewest that must fit, and the most of a model without a stated
# context length.
_LEAST_ANSWER, _LONGEST_ANSWER = 256, 4096
_THINKING_PART = 4  # of an answer's tokens, one that reasoning may take if the request does not say how many
_UNKNOWN_CONTEXT = 2**20  # tokens that are tried for memory where a model states no context length


class ModelService:
    """One model, and the defaults of its requests. `plan` is None where nothing is compressed."""

    def __init__(
        self,
        request: Request,
        model: Any,
        tokenizer: Any,
        plan: Plan | None,
        limits: EngineLimits,
        prefix_cache: PrefixCache | None,
        drafter: Drafter,
        rescue: RescueClient | None,
        metrics: Metrics,
    ) -> None:
        args, self.rescue, self.metrics = request.args, rescue, metrics
        self.name = args.served_model_name or short_name(args.model)
        self.users, self.last_used = 0, time.monotonic()  # requests that use it now, and when the last one did
        self.weights_nbytes = weights_nbytes(model)
        self.nbytes = self.weights_nbytes + (limits.memory or 0)  # that it may take
        self._model, self._tokenizer, self._plan = model, tokenizer, plan
        self.positions = position_limit(model)
        template = "the template of --chat-template" if args.chat_template else f"the chat template of {self.name}"
        self._prompt_builder = PromptBuilder(
            tokenizer, args.chat_template_args, self.positions, template, splits_answer=_splits_answer(model, plan)
        )
        self._bridges = [self._prompt_builder.plain.encode(text) for text in (BRIDGE, BRIDGE_TO_CALL)]
        self.sessions = Sessions(request, self._prompt_builder, self.rescue, self.positions, self.metrics)
        self._grammars = Grammars(tokenizer)
        self.answer_grammars = AnswerGrammars(
            GrammarQueue(self._grammars, args.max_queue),
            lambda: self._prompt_builder.call_form,
            find_special_tokens(tokenizer),
            allow_lark=args.allow_lark,
        )
        self.engine = Engine(
            *(model, tokenizer, request.config, plan, limits, self.metrics, self.sessions, prefix_cache),
            drafter=drafter,
        )
        settings, line = choose_sampling(args, args.model)
        note(line)
        self._sampling = Sampling(settings.pop("temp"), **settings)
        self._max_tokens, self._assumed_context = args.max_tokens, args.scale_usage

    @cached_property
    def usage_scale(self) -> float:
        """Return the factor of prompt tokens in /v1/messages, whose clients assume a context length."""
        servable = None if self._assumed_context is None else self.lengths()["servable_tokens"]
        return max(1.0, self._assumed_context / servable) if self._assumed_context and servable else 1.0

    def close(self) -> None:
        self.sessions.close()
        self._grammars.close()

    @staticmethod
    def check_turn(request: AnyRequest) -> None:
        """Refuse requests after whose answer a session could not continue."""
        if not isinstance(request, ChatRequest):
            raise InvalidRequestError(f"sessions are for /v1/chat/completions; leave {HEADER} out", HEADER)
        if (request.n or 1) > 1:
            raise InvalidRequestError(f"a session has one answer per turn; leave n or {HEADER} out", "n")
        if request.prefill is not None:
            raise InvalidRequestError(f"a session cannot continue a partial answer; leave {HEADER} out", "messages")

    def prepare(
        self,
        request: AnyRequest,
        make_answer: Callable[..., Answer],
        session: ServerSession | None = None,
        grammar: AnswerGrammar | None = None,
    ) -> tuple[list[Job], Answer, SessionTurn | None]:
        """Return a job for each prompt, their answer, still empty, and the turn of the session."""
        turn = self._begin_turn(session, request) if session is not None and isinstance(request, ChatRequest) else None
        start, quotation = (None, 0) if turn is None else (turn.start, turn.start.max_quotation)
        count, constraint, logprobs, thinking = request.n or 1, None, None, None
        make_choice: Callable[[], Choice] = Choice
        if isinstance(request, ChatRequest):
            prompts = [prompt := self._prompt_builder.chat_prompt(request) if turn is None else turn.prompt]
            if self._tokenizer.has_thinking:
                thinking = (self._tokenizer.think_start, self._tokenizer.think_end)
            logprobs = (request.top_logprobs or 0) if request.logprobs else None
            make_choice = partial(self._make_choice, request, prompt, grammar)
            if grammar is not None:
                constraint = self._grammars.constraint(
                    grammar.compiled,
                    thinks=prompt.state == "reasoning",
                    call_start=grammar.call_start,
                    param=grammar.param,
                )
        else:
            if len(request.prompts) > (most := self.engine.limits.queue):
                raise InvalidRequestError(f"prompt has {len(request.prompts)} texts, of at most {most}", "prompt")
            prompts = [self._prompt_builder.completion_prompt(prompt) for prompt in request.prompts]
        self._check_token_ids(prompts)
        events: asyncio.Queue[Event] = asyncio.Queue()  # of all jobs
        sampling, vocabulary = self._sampling.updated(request), self._prompt_builder.vocabulary
        jobs = []
        for number, prompt in enumerate(prompts):
            max_tokens = self._answer_tokens(len(prompt.ids) + quotation, request)
            answers = [
                Job(
                    prompt,
                    max_tokens,
                    sampling.sampler(vocabulary, None if request.seed is None else (request.seed + choice) % 2**64),
                    [
                        *logits_processors(request, sampling, vocabulary),
                        *self._thinking_budget(request, prompt, max_tokens),
                    ],
                    stops=request.stops,
                    thinking=thinking,
                    logprobs=logprobs,
                    constraint=constraint and constraint.copy(),
                    index=number * count + choice,
                    session=start,
                    events=events,
                )
                for choice in range(count)
            ]
            jobs.append(replace(answers[0], others=tuple(answers[1:])))
        choices = [make_choice() for _ in range(count * len(prompts))]
        prompt_tokens = sum(len(prompt.ids) for prompt in prompts)
        answer = make_answer(self.name, choices, prompt_tokens, self._tokenizer.decode, None if turn is None else 0)
        answer.usage_scale = self.usage_scale
        return jobs, answer, turn

    def _check_token_ids(self, prompts: list[Prompt]) -> None:
        try:
            for prompt in prompts:
                check_token_ids(self._model, prompt.ids)
        except ConfigError as error:
            raise InvalidRequestError(str(error)) from error

    def _make_choice(self, request: ChatRequest, prompt: Prompt, grammar: AnswerGrammar | None) -> Choice:
        return Choice(
            self._tokenizer,
            prompt.state,
            request.callable_tools,
            form=self._prompt_builder.call_form,
            names=request.tool_choice.names if request.tool_choice else None,
            constrained=grammar is not None and not grammar.call_start,
            one_call=request.has_one_call,
        )

    def _thinking_budget(self, request: AnyRequest, prompt: Prompt, max_tokens: int) -> list[ThinkingBudget]:
        """Return the logits processor that ends the reasoning of an answer, unless the model does not reason."""
        if not isinstance(request, ChatRequest) or not (end := self._tokenizer.think_end_tokens):
            return []
        budget = request.thinking_budget or max(1, max_tokens // _THINKING_PART)
        start = () if prompt.state == "reasoning" else self._tokenizer.think_start_tokens or ()
        return [ThinkingBudget(budget, start, end, [*self._bridges[bool(request.callable_tools)], *end])]

    def keep_thoughts(self, request: ChatRequest, answer: Answer) -> None:
        """Keep the reasoning before tool calls."""
        for message in (choice.message for choice in answer.choices):
            if message.reasoning and message.tool_calls:
                self._prompt_builder.keep_thoughts(request, message.tool_calls[0], message.reasoning)

    def count_tokens(self, request: ChatRequest) -> int:
        return len(self._prompt_builder.chat_prompt(request).ids)

    def job_ahead(self, request: ChatRequest, answer: dict[str, Any]) -> Job | None:
        """Return a job that prefills what the next prompt begins with if a conversation continues with this answer.

        None if most of that is stored. A template may show the answer without its reasoning: then the next prompt does
        not extend what was generated.
        """
        ids = self._prompt_builder.next_beginning(request, answer)
        if len(ids) - self.engine.count_stored(ids) < MIN_STORED:
            return None
        self._answer_tokens(len(ids), request)  # refuses what does not fit
        return Job(Prompt(ids, [ids]), 1, greedy_sampler, [], only_prefills=True)

    def _begin_turn(self, session: ServerSession, request: ChatRequest) -> SessionTurn:
        """Continue the session, or start it again if too few positions remain."""
        turn = self.sessions.begin(session, request)
        try:
            tokens = self._answer_tokens(len(turn.prompt.ids) + turn.start.max_quotation, request)
        except ContextLengthError:
            tokens = 0
        if turn.start.caches is None or tokens >= min(request.answer_tokens or 1, self._max_tokens or sys.maxsize):
            return turn
        return self.sessions.begin(session, request, restart=True)

    def _answer_tokens(self, prompt_tokens: int, request: AnyRequest) -> int:
        """Return how many tokens to generate at most: all that context and memory leave, if nobody says how many.

        Refuse what exceeds them.
        """
        requested, count, limits = request.answer_tokens or self._max_tokens, request.n or 1, self.engine.limits
        if limits.batches and count > limits.concurrency:  # else they run one after the other
            raise InvalidRequestError(f"n is {count}; this server generates at most {limits.concurrency}", "n")
        param = "messages" if isinstance(request, ChatRequest) else "prompt"
        least = 1 if requested else _LEAST_ANSWER
        if self.positions is not None and prompt_tokens + least > self.positions:
            raise ContextLengthError.of(prompt_tokens, self.positions, least, param)
        tokens = requested or _LONGEST_ANSWER
        if self.positions is not None:
            tokens = min(requested or self.positions, self.positions - prompt_tokens)
        if (need := self.engine.memory_need) is None:
            return tokens
        try:
            need.check(prompt_tokens, prompt_tokens + (tokens if requested else least), count)
        except ConfigError as error:
            most = need.most_tokens(1, prompt_tokens + least, count)
            if prompt_tokens + least > most:
                raise ContextLengthError.of(prompt_tokens, most, least, param, f" Here, {error}") from error
            raise ContextLengthError(str(error), param) from error
        return tokens if requested else need.most_tokens(prompt_tokens, prompt_tokens + tokens, count) - prompt_tokens

    def report(self) -> dict[str, Any]:
        """Return the model, defaults and how caches are stored, for /v1/plan; it contains no path of this machine."""
        report = {
            "model": self.name,
            "context_length": self.positions,
            "temperature": self._sampling.temperature,
            "max_tokens": self._max_tokens,
            "sessions": self.sessions.limit,
            "rescue": self.rescue is not None,
            "plan": None,
        }
        if (plan := self._plan) is None:
            return report
        groups = groupby(plan.layers, key=lambda layer: (layer.spec.keys, layer.spec.value))
        spec, eviction = plan.layers[0].spec, plan.eviction
        report["plan"] = {
            "layers": [{"count": len(list(layers)), "key": key, "value": value} for (key, value), layers in groups],
            "other_layers": len(plan.classes) - len({layer.slot.index for layer in plan.layers}),
            "uncompressed": [asdict(part) for part in plan.uncompressed],
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
        return report

    def lengths(self) -> dict[str, int | None]:
        """Return the most tokens of a prompt and of an answer, of both in memory, and of a prompt that stays there."""
        need, positions, limits = self.engine.memory_need, self.positions, self.engine.limits
        servable = cacheable = positions
        if need is not None:
            servable = need.most_tokens(1, positions or _UNKNOWN_CONTEXT)
            cacheable = bisect_right(range(1, servable + 1), limits.prompt_cache_bytes, key=need.stored_nbytes)
        most = None if servable is None else max(1, servable - _LEAST_ANSWER)
        return {
            "max_model_len": servable,
            "max_input_tokens": most,
            "max_output_tokens": None if servable is None else servable - 1,
            "servable_tokens": servable,
            "cacheable_tokens": cacheable,
        }

    def capabilities(self) -> list[str]:
        """Return what the model can do, in Ollama's words."""
        tokenizer = self._tokenizer
        facts = {"tools": self._prompt_builder.can_call_tools, "thinking": tokenizer.has_thinking}
        return ["completion", *(name for name, is_true in facts.items() if is_true)]

    def estimate(self, request: AnyRequest) -> dict[str, Any]:
        """Return what one answer to the request would take, for /v1/estimate."""
        if isinstance(request, ChatRequest):
            prompts = [self._prompt_builder.chat_prompt(request)]
        else:
            prompts = [self._prompt_builder.completion_prompt(prompt) for prompt in request.prompts]
        reports = []
        for prompt in prompts:
            length, refusal, max_tokens = len(prompt.ids), None, request.answer_tokens or self._max_tokens or 0
            try:
                max_tokens = self._answer_tokens(length, request)
            except ContextLengthError as error:
                refusal = str(error)
            need = self.engine.memory_need
            nbytes = None if need is None else need.caches_nbytes(length + max_tokens)
            report = {"prompt_tokens": length, "max_tokens": max_tokens, "fits": refusal is None, "refusal": refusal}
            reports.append({**report, "kv_bytes": nbytes, **self.engine.estimate(prompt.ids)})
        return {"model": self.name, "prompts": reports}

    def status(self) -> dict[str, Any]:
        """Return what runs and waits, and how many prompt tokens did not have to be prefilled, for /status."""
        metrics = self.metrics
        prompt, cached = value_of(metrics.prompt_tokens), value_of(metrics.cached_tokens)
        return {
            **self.engine.status(),
            "prompt_tokens": int(prompt),
            "cached_tokens": int(cached),
            "restored_tokens": int(value_of(metrics.restored_tokens)),
            "hit_rate": round(cached / prompt, 4) if prompt else None,
            "stored_prompts": int(value_of(metrics.prompt_cache_entries)),
            "stored_bytes": int(value_of(metrics.prompt_cache_bytes)),
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
            "live": stats.live,
            "evicted": stats.evicted,
            "archived": stats.archived,
            "archived_bytes": stats.archived_nbytes,
            "dropped": stats.dropped,
            "recalled": len(recalled.positions),
            "recalled_by_search": len(recalled.by_search),
            "recall_partial": recalled.is_partial,
            "recall_ms": round(1000 * recalled.seconds, 1),
            "rescued": len(quotation.ids),
            "bytes": stats.nbytes,
            "native_bytes": stats.native_nbytes,
            "native_dtype": stats.native_dtype,
            "compressed_from": stats.compressed_from,
            "quoted": [{"start": start, "stop": stop, "text": text} for (start, stop), text in quoted],
        }


def _splits_answer(model: Any, plan: Plan | None) -> bool:
    """Return whether what begins an answer is prefilled by itself: if caches cannot be cut to any prefix.

    With recall, it belongs to the question, which ends the last segment.
    """
    if plan is None or plan.eviction is None:
        classes = [type(cache).__name__ for cache in native_caches(model)] if plan is None else plan.classes
        return {*classes} != {"KVCache"}
    return not plan.recalls
