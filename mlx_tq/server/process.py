"""The server process: loads the model, listens on a socket, and serves until a signal ends it."""

import logging
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import uvicorn
from jinja2 import TemplateError

from http_limits.connections import BACKLOG, limited_connection
from mlx_tq.cli.loading import load_model
from mlx_tq.cli.options import Request
from mlx_tq.cli.preflight import free_memory
from mlx_tq.cli.screen import console, show_plan
from mlx_tq.config import KVConfig
from mlx_tq.distributed.group import Ranks
from mlx_tq.errors import ConfigError
from mlx_tq.grammar.constraint import Grammars
from mlx_tq.integration.probe import position_limit
from mlx_tq.models import EMBEDDED
from mlx_tq.prefix_cache.folder import Folder
from mlx_tq.prefix_cache.prefix_cache import PrefixCache
from mlx_tq.prompt_cache.compressed import plan_caches
from mlx_tq.prompt_cache.plan import Plan
from mlx_tq.rescue import OFF, RescueClient, open_service
from mlx_tq.server.admission import EngineLimits
from mlx_tq.server.app import Web, create_app
from mlx_tq.server.engine import Engine
from mlx_tq.server.guard import Guard, default_max_body
from mlx_tq.server.metrics import Metrics
from mlx_tq.server.model_service import ModelService
from mlx_tq.server.prompt_builder import PromptBuilder
from mlx_tq.server.response_formats import ResponseFormats
from mlx_tq.server.sampling import Sampling
from mlx_tq.server.sessions import Sessions
from mlx_tq.server.stored_prompts import salt_of

log = logging.getLogger(__name__)

_GRACE_S = 5
_CONNECTIONS = 512  # or four for each request that may wait or run, if these are more
_SHOWN_TOKENS = 8192  # context for which the bytes of the cache are shown


def follow(request: Request, folder: Folder | None, ranks: Ranks) -> None:
    """Load this rank's part of the model, and follow the first rank until it ends."""
    model, tokenizer, config, plan, memory = _load(request, ranks)
    ranks.run_on_first(lambda: None)  # opens the rescue service
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first rank gets it too, and ends all ranks
    prefix_cache = _prefix_cache(model, plan, folder, ranks, "")
    Engine(model, tokenizer, config, plan, _limits(request.args, memory), Metrics(), prefix_cache=prefix_cache).serve()


def serve(request: Request, api_key: str | None, folder: Folder | None, listener: socket.socket, ranks: Ranks) -> None:
    """Load the model and serve it until a signal comes; of several ranks, this is the first."""
    args = request.args
    service = _service(request, folder, salt_of(api_key, shared=args.prefix_cache_share), ranks)

    class Server(uvicorn.Server):
        def handle_exit(self, sig: int, frame: Any) -> None:
            service.engine.stop()  # ends running answers, and with them their connections
            super().handle_exit(sig, frame)

    host, port = listener.getsockname()[:2]
    console.print(f"listening on http://{f'[{host}]' if ':' in host else host}:{port}", soft_wrap=True)
    slots = args.max_queue + args.decode_concurrency
    guard = Guard(api_key, args.allowed_origins, args.max_body or default_max_body(service.positions), slots)
    config = uvicorn.Config(
        create_app(Web(service, guard), args.allowed_origins),
        http=limited_connection(max(_CONNECTIONS, 4 * slots)),
        ws="none",
        backlog=BACKLOG,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=_GRACE_S,
    )
    # uvicorn stops at a signal and then raises it again; this turns it into an exit that passes through `finally`.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        Server(config).run(sockets=[listener])
    finally:
        service.engine.join(_GRACE_S)
        service.sessions.close()
        service.grammars.close()


def _load(request: Request, ranks: Ranks) -> tuple[Any, Any, KVConfig, Plan | None, int | None]:
    """Return model, tokenizer and config and, if caches are compressed, the plan and the bytes for all caches."""
    args, config = request.args, request.config
    template = {"chat_template": args.chat_template} if args.chat_template else {}
    model, tokenizer = load_model(args, config, ranks=ranks, **template)
    if args.chat_template:
        _check_template(tokenizer, args.chat_template_args)
    plan = None if config.is_off else plan_caches(model, config)
    if plan is None:
        return model, tokenizer, config, None, None
    positions = position_limit(model)
    show_plan(plan, min(_SHOWN_TOKENS, positions or _SHOWN_TOKENS))
    return model, tokenizer, config, plan, ranks.min(args.kv_memory_limit or free_memory())


def _limits(args: Any, memory: int | None) -> EngineLimits:
    return EngineLimits(
        concurrency=args.decode_concurrency,
        prompt_concurrency=args.prompt_concurrency,
        queue=args.max_queue,
        prefill_step_size=args.prefill_step_size,
        prompt_cache_size=args.prompt_cache_size,
        prompt_cache_bytes=args.prompt_cache_bytes or sys.maxsize,
        memory=memory,
    )


def _prefix_cache(model: Any, plan: Plan | None, folder: Folder | None, ranks: Ranks, salt: str) -> PrefixCache | None:
    salt = ranks.broadcast(lambda: salt)
    return None if folder is None or plan is None else PrefixCache(model, plan, folder, log.warning, salt)


def _service(request: Request, folder: Folder | None, salt: str, ranks: Ranks) -> ModelService:
    model, tokenizer, config, plan, memory = _load(request, ranks)
    args, rescue, positions = request.args, request.rescue, position_limit(model)
    metrics, prompt_builder = Metrics(), PromptBuilder(tokenizer, args.chat_template_args, positions)
    client = ranks.run_on_first(lambda: None if rescue.service == OFF else RescueClient(open_service(rescue.service)))
    sessions = Sessions(args.sessions, args.max_queue, prompt_builder, rescue, client, positions, metrics)
    prefix_cache = _prefix_cache(model, plan, folder, ranks, salt)
    grammars = Grammars(tokenizer)
    return ModelService(
        name=_public_name(args.model),
        created=int(time.time()),
        tokenizer=tokenizer,
        prompt_builder=prompt_builder,
        grammars=grammars,
        response_formats=ResponseFormats(grammars, args.max_queue, allow_lark=args.allow_lark),
        sessions=sessions,
        rescue=client,
        engine=Engine(model, tokenizer, config, plan, _limits(args, memory), metrics, sessions, prefix_cache),
        metrics=metrics,
        sampling=Sampling(args.temp, args.top_p, args.top_k, args.min_p),
        max_tokens=args.max_tokens,
        positions=positions,
        plan=plan,
        memory=memory,
    )


def _check_template(tokenizer: Any, options: dict[str, Any]) -> None:
    try:
        messages = [{"role": "user", "content": "hi"}]
        tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options)
    except (TemplateError, TypeError, ValueError, KeyError) as error:
        raise ConfigError(f"--chat-template cannot be used: {error}. Give the text of a Jinja template.") from error


def _public_name(model: str | None) -> str:
    """Return the model's name for clients; of a folder, not where it is."""
    if model is None:
        return EMBEDDED
    return Path(model).resolve().name if Path(model).exists() else model
