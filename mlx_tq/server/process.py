"""The server process: listens on a socket, loads the first model, and serves until a signal ends it."""

import asyncio
import logging
import os
import signal
import socket
import sys
import traceback
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import uvicorn
from mlx_lm.models.cache import make_prompt_cache

from http_limits.connections import server_config, url_of
from mlx_tq.cli.loading import free_memory, load_draft_model, load_model, state_storage
from mlx_tq.cli.options import API_KEY_VARIABLE, Request
from mlx_tq.cli.runner import DONE, FAILED, INTERRUPTED
from mlx_tq.cli.screen import human_bytes, note, show_lookup, show_plan, stderr
from mlx_tq.distributed.group import Ranks
from mlx_tq.errors import ConfigError
from mlx_tq.integration.batch_probe import BatchFacts, batch_facts
from mlx_tq.integration.probe import position_limit
from mlx_tq.prefix_cache.folder import Folder
from mlx_tq.prefix_cache.prefix_cache import PrefixCache
from mlx_tq.prompt_cache.build import build_caches
from mlx_tq.prompt_cache.compressed import plan_caches
from mlx_tq.prompt_cache.memory import other_bytes
from mlx_tq.prompt_cache.plan import Plan
from mlx_tq.prompt_cache.warm_up import compile_kernels
from mlx_tq.rescue import RescueClient, open_client
from mlx_tq.server.admission import EngineLimits
from mlx_tq.server.app import Api
from mlx_tq.server.engine import Engine
from mlx_tq.server.guard import Guard, default_max_body
from mlx_tq.server.memory_need import MemoryNeed
from mlx_tq.server.metrics import Metrics
from mlx_tq.server.model_pool import ModelPool, PooledModel
from mlx_tq.server.model_service import ModelService
from mlx_tq.server.prefill_grid import PrefillGrid, measured_grid
from mlx_tq.server.served_models import ServedModel
from mlx_tq.server.stored_prompts import salt_of
from mlx_tq.session.text import TEMPLATE_ERRORS
from mlx_tq.speculative.draft_gate import MAX_ROWS
from mlx_tq.speculative.draft_model import DraftModel
from mlx_tq.speculative.drafts import Drafter
from mlx_tq.speculative.lookup_mode import LookupMode

log = logging.getLogger(__name__)

_GRACE_S = 5
_MIN_CACHE_SHARE = 8  # at least this part of the memory is for caches, where weights would take more
_STORED_PART = 4  # this part of the free memory is for stored prompts where caches have no limit
_LEAST_CONTEXT = 16  # tokens that a cache must hold at least for the server to start
_SHOWN_TOKENS = 8192  # context for which the bytes of the cache are shown


def follow(request: Request, served: ServedModel, folder: Folder | None, ranks: Ranks) -> None:
    """Load this rank's part of the model, and follow the first rank until it ends."""
    ranks.run_on_first(lambda: None)  # opens the rescue service
    of_model = _request_of(request, served, request.args.kv_memory_limit)
    model, tokenizer, plan, limits, prefix_cache, _ = _load(of_model, folder, "", ranks)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first rank gets it too, and ends all ranks
    Engine(model, tokenizer, request.config, plan, limits, Metrics(), prefix_cache=prefix_cache).serve()


def serve(
    request: Request,
    served_models: list[ServedModel],
    api_key: str | None,
    folder: Folder | None,
    listener: socket.socket,
    ranks: Ranks,
) -> None:
    """Load the first model and serve all until a signal comes; of several ranks, this is the first."""
    rescue = ranks.run_on_first(lambda: open_client(request.rescue.service))
    salt = salt_of(api_key, shared=request.args.prefix_cache_share)

    def make_service(of_model: Request, metrics: Metrics) -> ModelService:
        return ModelService(of_model, *_load(of_model, folder, salt, ranks), rescue, metrics)

    pool = _make_pool(request, served_models, make_service)
    with _exit_while_loading(pool), rescue or nullcontext():
        stderr.print(f"loading {served_models[0].name}; requests to {url_of(listener)} are answered when it is ready")
        _serve_pool(pool, rescue, request.args, api_key, listener)


@contextmanager
def _exit_while_loading(pool: ModelPool) -> Iterator[None]:
    """Exit after the block if a model is still being loaded: the end of Python would abort the thread that does it."""
    code = DONE
    try:
        yield
    except KeyboardInterrupt:
        code = INTERRUPTED
        raise
    except BaseException:
        code = FAILED
        raise
    finally:
        if pool.is_busy:
            if code == FAILED:
                traceback.print_exc()
            sys.stderr.flush()
            os._exit(code)


def _serve_pool(
    pool: ModelPool, rescue: RescueClient | None, args: Namespace, api_key: str | None, listener: socket.socket
) -> None:
    class Server(uvicorn.Server):
        def handle_exit(self, sig: int, frame: Any) -> None:
            # Ends running answers, and with them their connections. The signal may have interrupted any code.
            asyncio.get_running_loop().call_soon_threadsafe(api.stop)
            super().handle_exit(sig, frame)

    slots = args.max_queue + args.decode_concurrency

    def max_body() -> int:
        return args.max_body or max(default_max_body(model.positions) for model in pool.models)

    guard = Guard(api_key, args.allowed_origins, max_body(), slots)
    api = Api(pool, guard, rescue, is_strict=args.strict_requests)
    failures: list[Exception] = []

    async def load() -> None:
        try:
            await pool.start()
            guard.max_body = max_body()  # the context length is known now
            if pool.is_ready:
                stderr.print(f"listening on {url_of(listener)} (chat page; API at /v1)")
                key = f"${API_KEY_VARIABLE}" if api_key else "none"
                stderr.print(
                    f"OpenAI's clients: OPENAI_BASE_URL={url_of(listener)}/v1 OPENAI_API_KEY={key}", soft_wrap=True
                )
                settings = f"ANTHROPIC_BASE_URL={url_of(listener)} ANTHROPIC_AUTH_TOKEN={key}"
                stderr.print(
                    f"Claude Code: {settings} (all settings, and other clients: mlx_tq.connect)", soft_wrap=True
                )
        except Exception as error:  # noqa: BLE001  raised below
            failures.append(error)
            api.stop()
            server.should_exit = True

    server = Server(server_config(api.app(args.allowed_origins, load), slots, timeout_graceful_shutdown=_GRACE_S))

    def end(*_: object) -> None:
        server.should_exit = True

    # While it runs, uvicorn handles SIGTERM itself. Before and after, this raises nothing, so that the end below is
    # complete, even after a second signal.
    signal.signal(signal.SIGTERM, end)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda *_: signal.raise_signal(signal.SIGTERM))
    try:
        server.run(sockets=[listener])
    finally:
        pool.close(_GRACE_S)
    if failures:
        raise failures[0]


def _make_pool(
    request: Request, served_models: list[ServedModel], make_service: Callable[[Request, Metrics], ModelService]
) -> ModelPool:
    """Return the pool of a server's models. Several share the memory, of which each has a part for its caches."""
    args, limit, cache_nbytes = request.args, None, request.args.kv_memory_limit
    if len(served_models) > 1:
        limit = args.model_memory_limit or free_memory()
        room = max(limit - sum(served.nbytes for served in served_models), limit // _MIN_CACHE_SHARE)
        cache_nbytes = cache_nbytes or room // len(served_models)
    models = []
    for served in served_models:
        metrics, of_model = Metrics(), _request_of(request, served, cache_nbytes)
        nbytes = served.nbytes + (0 if request.config.is_off else cache_nbytes or 0)
        load = partial(make_service, of_model, metrics)
        models.append(PooledModel(served.name, load, metrics, nbytes, served.nbytes, served.context_length))
    return ModelPool(models, limit, args.max_queue, 60 * args.idle_release if args.idle_release else None)


def _request_of(request: Request, served: ServedModel, cache_nbytes: int | None) -> Request:
    """Return the request of a server that has only one of the models."""
    args = Namespace(**{**vars(request.args), "model": served.path, "kv_memory_limit": cache_nbytes})
    return replace(request, args=args)


def _load(
    request: Request, folder: Folder | None, salt: str, ranks: Ranks
) -> tuple[Any, Any, Plan | None, EngineLimits, PrefixCache | None, Drafter]:
    """Return model, tokenizer, the plan of compressed caches, limits, prefix cache, and what drafts."""
    args = request.args
    template = {"chat_template": args.chat_template} if args.chat_template else {}
    model, tokenizer = load_model(args, request.config, ranks=ranks, **template)
    if args.chat_template:
        try:
            messages = [{"role": "user", "content": "hi"}]
            options = args.chat_template_args
            tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options)
        except TEMPLATE_ERRORS as error:
            raise ConfigError(f"--chat-template cannot be used: {error}. Give the text of a Jinja template.") from error
    salt = ranks.broadcast(lambda: salt)
    stored_nbytes = args.prompt_cache_bytes
    if stored_nbytes is None:
        stored_nbytes = ranks.min(free_memory() // _STORED_PART) if request.config.is_off else sys.maxsize
    step = args.prefill_step_size
    limits = EngineLimits(
        concurrency=args.decode_concurrency,
        prompt_concurrency=args.prompt_concurrency,
        queue=args.max_queue,
        prefill_grid=measured_grid(model, request.config) if step is None else PrefillGrid(step),
        prompt_cache_bytes=stored_nbytes,
        decode_share=args.decode_share,
        states=state_storage(request),
    )
    plan = None if request.config.is_off else plan_caches(model, request.config)
    caches = make_prompt_cache(model) if plan is None else build_caches(plan)
    drafter, drafts_nbytes = _make_drafter(request, tokenizer)
    drafter.check(model, caches)
    if isinstance(drafter, LookupMode):
        show_lookup(drafter.blocker(model, caches))
    make = None if plan is None else partial(build_caches, replace(plan, eviction=None))
    limits = _limit_batches(limits, batch_facts(model, make))
    if plan is None:
        return model, tokenizer, None, limits, None, drafter
    includes_steps = args.kv_memory_limit is None
    memory = ranks.min(free_memory() if includes_steps else args.kv_memory_limit)
    if drafts_nbytes >= memory:
        raise ConfigError(
            f"the cache of the draft model takes up to {human_bytes(drafts_nbytes)}, and {human_bytes(memory)} are "
            "available. Raise --kv-memory-limit, or drop --draft-model."
        )
    memory -= drafts_nbytes
    limits = replace(limits, memory=memory, memory_includes_steps=includes_steps)
    need = MemoryNeed(model, plan, limits.prefill_grid, memory, includes_steps=includes_steps)
    need.check(1, _LEAST_CONTEXT)
    lengths = drafter.compiled_lengths if isinstance(drafter, LookupMode) else range(1, MAX_ROWS + 1)
    compile_kernels(model, plan, lengths=lengths, batches=limits.concurrency > 1)
    positions = position_limit(model)
    show_plan(plan, min(_SHOWN_TOKENS, positions or _SHOWN_TOKENS))
    if positions is not None and (most := need.most_tokens(1, positions)) < positions:
        note(f"The memory holds {most:,} of the model's {positions:,} tokens of context; longer requests are refused")
    prefix_cache = None if folder is None else PrefixCache(model, plan, folder, log.warning, salt, limits.states)
    return model, tokenizer, plan, limits, prefix_cache, drafter


def _make_drafter(request: Request, tokenizer: Any) -> tuple[Drafter, int]:
    """Return what drafts for a single answer, and the bytes that its caches may take."""
    args, config = request.args, request.config
    if args.draft_model is None:
        return LookupMode(args.prompt_lookup), 0
    draft, _ = load_draft_model(args, config, tokenizer)
    if config.is_off:
        return DraftModel(draft, partial(make_prompt_cache, draft), args.num_draft_tokens), 0
    plan = plan_caches(draft, config)
    compile_kernels(draft, plan, lengths=(1, 2))
    tokens = position_limit(draft) or _SHOWN_TOKENS
    nbytes = plan.cache_peak_nbytes(tokens, 1) + other_bytes(draft)(tokens)
    return DraftModel(draft, partial(build_caches, plan), args.num_draft_tokens), nbytes


def _limit_batches(limits: EngineLimits, facts: BatchFacts) -> EngineLimits:
    """Return limits under which each answer is what the model gives alone."""
    if facts.refusal:
        stderr.print(f"answers run one at a time: {facts.refusal}", soft_wrap=True)
        return replace(limits, batches=False, concurrency=1, prompt_concurrency=1)
    if facts.padding_refusal and limits.prompt_concurrency > 1:
        stderr.print(
            f"prompts of different lengths are not prefilled together: {facts.padding_refusal}", soft_wrap=True
        )
        return replace(limits, pads_prompts=False)
    return limits
