"""`mlx_tq.server`: flags, checks, and the process around the application."""

import argparse
import json
import logging
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from mlx_tq.args import (
    KEY_VARIABLE,
    add_cache_arguments,
    add_rescue_arguments,
    config_from_args,
    parse_size,
    rescue_from_args,
    with_blocks,
)
from mlx_tq.dispatch import plan_caches
from mlx_tq.errors import ConfigError
from mlx_tq.limits import check_arguments, free_memory
from mlx_tq.models import EMBEDDED, load
from mlx_tq.probe import position_limit
from mlx_tq.rescue import OFF, RescueClient, open_service
from mlx_tq.ui import console, show_plan

_BACKLOG = 128
_GRACE_S = 5
_AT_LEAST = {
    "decode_concurrency": 1,
    "prompt_concurrency": 1,
    "max_queue": 1,
    "max_tokens": 1,
    "prompt_cache_size": 0,
    "sessions": 0,
}
_SHOWN_TOKENS = 8192  # context at which the bytes of the cache are shown


def _json_object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return value


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def build_parser() -> argparse.ArgumentParser:
    """The flags of mlx_lm.server that have a meaning here, and ours."""
    parser = argparse.ArgumentParser(
        prog="mlx_tq.server", description="Serve a model over OpenAI's API on compressed KV caches."
    )
    add = parser.add_argument
    add("--model", help="a folder or a hub name; the embedded model without it")
    add("--adapter-path", help="folder of trained adapter weights")
    add("--trust-remote-code", action="store_true", help="let the tokenizer run code of its own")
    add("--host", default="127.0.0.1", help="address to listen on; any but loopback needs an API key")
    add("--port", type=int, default=8080, help="port to listen on; 0 takes a free one")
    add("--api-key", help=f"clients must send it; better given as {KEY_VARIABLE}")
    add("--allowed-origins", type=_names, default=[], help="web pages that may call, with commas between; none")
    add("--log-level", default="INFO", choices=["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"])

    group = parser.add_argument_group("answers", "what holds where a request does not say")
    add = group.add_argument
    add("--chat-template", help="a chat template instead of the tokenizer's")
    add("--chat-template-args", type=_json_object, default={}, help="such as '{\"enable_thinking\":false}'")
    add("--temp", type=float, default=0.0, help="sampling temperature (0.0)")
    add("--top-p", type=float, default=1.0, help="nucleus sampling (1.0)")
    add("--top-k", type=int, default=0, help="top-k sampling (0: off)")
    add("--min-p", type=float, default=0.0, help="min-p sampling (0.0: off)")
    add("--max-tokens", type=int, default=512, help="tokens of an answer (512)")

    group = parser.add_argument_group("limits")
    add = group.add_argument
    add("--decode-concurrency", type=int, default=32, help="answers generated at once (32)")
    add("--prompt-concurrency", type=int, default=8, help="prompts read at once (8)")
    add("--prefill-step-size", type=int, default=2048, help="tokens of a prompt read at a time (2048)")
    add("--max-queue", type=int, default=64, help="requests that may wait; further ones are answered 429 (64)")
    add("--max-body", type=parse_size, default=parse_size("10MB"), metavar="SIZE", help="of a request (10MB)")
    add("--prompt-cache-size", type=int, default=10, help="prompts whose caches are kept for later requests (10)")
    add("--prompt-cache-bytes", type=parse_size, metavar="SIZE", help="bytes of those caches")
    add("--kv-memory-limit", type=parse_size, metavar="SIZE", help="bytes of all caches (4GB); the free memory")
    add("--sessions", type=int, default=16, help="sessions that are kept for their next request (16)")
    add_cache_arguments(parser)
    add_rescue_arguments(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    """Serve until a signal ends it; returns the exit code.

    Raises:
        MlxTqError: whatever stands in the way, before the model is loaded where that can be known.
    """
    key = args.api_key or os.environ.get(KEY_VARIABLE)
    _check(args, key)
    logging.basicConfig(level=args.log_level, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    listener = _listen(args.host, args.port)
    with listener:
        _serve(args, key, listener)
    return 0


def _check(args: argparse.Namespace, key: str | None) -> None:
    try:
        from mlx_tq.server.guard import is_loopback
    except ImportError as error:
        raise ConfigError(f"the server needs {error.name}: pip install 'mlx-tq[server]'.") from error
    check_arguments(args)
    for name, least in _AT_LEAST.items():
        if getattr(args, name) < least:
            raise ConfigError(f"--{name.replace('_', '-')} is {getattr(args, name)}; it must be {least} or more.")
    if not (args.temp >= 0 and 0 <= args.top_p <= 1 and 0 <= args.min_p <= 1 and args.top_k >= 0):
        raise ConfigError("--temp and --top-k must be 0 or more, --top-p and --min-p between 0 and 1.")
    if not 0 <= args.port < 65536:
        raise ConfigError(f"--port is {args.port}; it must be between 0 and 65535.")
    if not key and not is_loopback(args.host):
        raise ConfigError(f"others can reach {args.host}: set {KEY_VARIABLE} to a key that clients must send.")
    if config_from_args(args).is_off and args.kv_memory_limit is not None:
        raise ConfigError("--kv-memory-limit is for compressed caches, and mlx-lm's own was chosen. Drop it.")


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        # asyncio turns Nagle's algorithm off only where the protocol is named; with it each token waits 40 ms.
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(_BACKLOG)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise ConfigError(f"cannot listen on {host} port {port} ({error.strerror}); give another --port.") from error
    return listener


def _serve(args: argparse.Namespace, key: str | None, listener: socket.socket) -> None:
    import uvicorn

    from mlx_tq.server.app import Web, create_app
    from mlx_tq.server.guard import Guard

    service = _service(args)

    class Server(uvicorn.Server):
        def handle_exit(self, sig: int, frame: Any) -> None:
            service.engine.stop()  # answers in progress end now, and with them their connections
            super().handle_exit(sig, frame)

    host, port = listener.getsockname()[:2]
    console.print(f"listening on http://{f'[{host}]' if ':' in host else host}:{port}", soft_wrap=True)
    app = create_app(Web(service, Guard(key, args.allowed_origins, args.max_body)), args.allowed_origins)
    config = uvicorn.Config(
        app, log_config=None, access_log=False, server_header=False, timeout_graceful_shutdown=_GRACE_S
    )
    # uvicorn stops at a signal and then raises it again: this makes of it an exit that passes through `finally`.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        Server(config).run(sockets=[listener])
    finally:
        service.engine.join(_GRACE_S)
        service.sessions.close()


def _service(args: argparse.Namespace) -> Any:
    from mlx_tq.server.conversation import Conversations
    from mlx_tq.server.engine import Engine, EngineLimits
    from mlx_tq.server.metrics import Metrics
    from mlx_tq.server.sampling import Sampling
    from mlx_tq.server.service import Service
    from mlx_tq.server.sessions import Sessions

    config, rescue = config_from_args(args), rescue_from_args(args, default=OFF)
    if rescue.service != OFF:
        config = with_blocks(config, args)
    tokenizer_config = {"trust_remote_code": args.trust_remote_code}
    if args.chat_template:
        tokenizer_config["chat_template"] = args.chat_template
    model, tokenizer = load(
        args.model,
        adapter_path=args.adapter_path,
        tokenizer_config=tokenizer_config,
        trust_remote_code=args.trust_remote_code,
    )
    if args.chat_template:
        _check_template(tokenizer, args.chat_template_args)
    positions = position_limit(model)
    plan = None if config.is_off else plan_caches(model, config)
    memory = None if plan is None else args.kv_memory_limit or free_memory()
    if plan is not None:
        show_plan(plan, min(_SHOWN_TOKENS, positions or _SHOWN_TOKENS))
    metrics, conversations = Metrics(), Conversations(tokenizer, args.chat_template_args)
    client = None if rescue.service == OFF else RescueClient(open_service(rescue.service))
    sessions = Sessions(args.sessions, args.max_queue, conversations, rescue, client, positions, metrics)
    limits = EngineLimits(
        concurrency=args.decode_concurrency,
        prompt_concurrency=args.prompt_concurrency,
        queue=args.max_queue,
        prefill_step_size=args.prefill_step_size,
        prompt_cache_size=args.prompt_cache_size,
        prompt_cache_bytes=args.prompt_cache_bytes or sys.maxsize,
        memory=memory,
    )
    return Service(
        name=_public_name(args.model),
        created=int(time.time()),
        tokenizer=tokenizer,
        conversations=conversations,
        sessions=sessions,
        engine=Engine(model, tokenizer, config, plan, limits, metrics, sessions),
        metrics=metrics,
        sampling=Sampling(args.temp, args.top_p, args.top_k, args.min_p),
        max_tokens=args.max_tokens,
        positions=positions,
        plan=plan,
        memory=memory,
    )


def _check_template(tokenizer: Any, options: dict[str, Any]) -> None:
    """Raise where --chat-template cannot be used, before clients are told that it is their conversation."""
    try:
        messages = [{"role": "user", "content": "hi"}]
        tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options)
    except (TemplateError, TypeError, ValueError, KeyError) as error:
        raise ConfigError(f"--chat-template cannot be used: {error}. Give the text of a Jinja template.") from error


def _public_name(model: str | None) -> str:
    """What clients call the model: of a folder only its own name, never where it is."""
    if model is None:
        return EMBEDDED
    return Path(model).resolve().name if Path(model).exists() else model
