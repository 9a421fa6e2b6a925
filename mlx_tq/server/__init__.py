"""`mlx_tq.server`: an OpenAI-compatible server whose concurrent requests all run on compressed KV caches."""

import argparse
import logging
import os
import socket
import sys
from typing import Any

from http_limits.request_checks import is_loopback
from mlx_tq.cli.options import (
    API_KEY_VARIABLE,
    PENALTIES,
    SAMPLING,
    Request,
    parse_json_object,
    parse_size,
)
from mlx_tq.cli.parser import (
    CommandParser,
    add_cache_arguments,
    add_lookup_argument,
    add_memory_arguments,
    add_model_arguments,
    add_sampling_arguments,
    command_parser,
)
from mlx_tq.cli.runner import DONE, command_main
from mlx_tq.errors import ConfigError


def build_parser() -> CommandParser:
    """Return the parser: the flags of mlx_lm.server that have a meaning here, and ours."""
    parser = command_parser("server", "Serve a model, or several, over OpenAI's API on compressed KV caches.")
    add_cache_arguments(parser, recall=True, prefix_cache=True, rescue=True)
    add_model_arguments(group := parser.add_argument_group("model"), several=True)
    add_memory_arguments(group)
    add = parser.add_argument_group("server").add_argument
    add("--host", default="127.0.0.1", help="address to listen on; any but loopback needs an API key")
    add("--port", type=int, default=8080, metavar="N", help="port to listen on; 0 picks a free one")
    add("--api-key", metavar="KEY", help=f"key that clients must send; {API_KEY_VARIABLE} is safer (default: none)")
    add(
        "--allowed-origins",
        type=lambda text: [name for name in text.split(",") if name],
        default=[],
        metavar="A,B,...",
        help="origins of web pages that may call, comma-separated (default: none)",
    )
    add("--served-model-name", metavar="NAME", help="the model's name for clients (default: its folder's or the hub's)")
    levels = ["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"]
    add("--log-level", default="INFO", choices=levels, help="logging level")

    add = (group := parser.add_argument_group("answers", "defaults for what a request does not set")).add_argument
    add("--chat-template", metavar="TEXT", help="chat template (default: the tokenizer's)")
    add(
        "--chat-template-args",
        type=parse_json_object,
        default="{}",
        metavar="JSON",
        help="options of the template, such as '{\"enable_thinking\":false}'",
    )
    add_sampling_arguments(group, (*SAMPLING, *PENALTIES), from_model=True)
    add_lookup_argument(group)
    add("--draft-model", metavar="MODEL", help="model for speculative decoding of a single answer (default: none)")
    add("--num-draft-tokens", type=int, default=3, metavar="N", help="tokens drafted per step")
    limit = "maximum tokens to generate (default: what the context and the memory leave)"
    add("--max-tokens", type=int, metavar="N", help=limit)
    _add_limit_arguments(parser)
    return parser


def _add_limit_arguments(parser: CommandParser) -> None:
    add = parser.add_argument_group("limits").add_argument
    size: Any = {"type": parse_size, "metavar": "SIZE"}
    add("--decode-concurrency", type=int, default=32, metavar="N", help="answers generated concurrently")
    add("--prompt-concurrency", type=int, default=8, metavar="N", help="prompts prefilled concurrently")
    share = "share of the time that is kept for running answers while prompts are prefilled"
    add("--decode-share", type=float, default=0.5, metavar="SHARE", help=share)
    step = "prompt tokens per prefill step (default: what takes 0.2 s on this machine, which is measured once)"
    add("--prefill-step-size", type=int, metavar="N", help=step)
    scale = "context length that the client assumes, such as 200000: /v1/messages reports prompt tokens scaled from "
    scale += "the server's context to it, so that Claude Code compacts before a shorter context is full "
    scale += "(default: not scaled)"
    add("--scale-usage", type=int, metavar="N", help=scale)
    add("--max-queue", type=int, default=64, metavar="N", help="waiting requests; more are refused with status 429")
    add(
        "--max-body",
        **size,
        help="maximum request size in bytes (default: 32 per token of context length, at least 2MB; 10MB if the model "
        "states no context length)",
    )
    add(
        "--strict-requests",
        action="store_true",
        help="refuse requests with unknown fields, which are otherwise ignored",
    )
    add("--allow-lark", action="store_true", help="accept Lark grammars in response_format from clients")
    add(
        "--prompt-cache-bytes",
        **size,
        help="bytes of the caches of earlier prompts that stay in memory (default: the rest of --kv-memory-limit; with "
        "--kv-profile off a quarter of the free memory)",
    )
    add(
        "--kv-memory-limit",
        **size,
        help="bytes of a model's KV caches, such as 4GB (default: what prefill leaves of the free memory, or a part of "
        "it for each of several models)",
    )
    models = (
        "bytes of all loaded models with their KV caches; least recently used ones are unloaded "
        "(default: the free memory)"
    )
    add("--model-memory-limit", **size, help=models)
    idle = "unload a model without sessions after this many minutes without a request (default: never)"
    add("--idle-release", type=float, default=0.0, metavar="MINUTES", help=idle)
    add(
        "--prefix-cache-share",
        action="store_true",
        help="share stored prefixes between servers with different API keys",
    )
    add("--sessions", type=int, default=16, metavar="N", help="maximum number of sessions")


def run(args: argparse.Namespace) -> int:
    request = Request.from_args(args)
    api_key = args.api_key or os.environ.get(API_KEY_VARIABLE)
    if not api_key and not is_loopback(args.host):
        raise ConfigError(f"refusing to listen on {args.host} without an API key. Set {API_KEY_VARIABLE}.")

    from mlx_tq.cli.startup import check_request

    request = check_request(request)
    try:
        from mlx_tq.server import process  # whose packages are an extra, which may not be installed
    except ImportError as error:
        raise ConfigError(f"the server needs {error.name}: pip install 'mlx-tq[server]'.") from error
    from http_limits.connections import open_listener
    from http_limits.log_limit import LogLimit
    from mlx_tq.cli.loading import join_ranks, open_prefix_folder
    from mlx_tq.server.served_models import find_models  # loads mlx

    ranks = join_ranks(request)
    if args.idle_release and not ranks.is_alone:
        raise ConfigError("--idle-release unloads the model of one process, and this one runs in several. Drop it.")
    served_models = find_models(request, ranks)
    folder = open_prefix_folder(request, ranks)
    log = logging.StreamHandler(sys.stderr)
    log.addFilter(LogLimit())
    logging.basicConfig(level=args.log_level, format="%(asctime)s %(levelname)s %(message)s", handlers=[log])

    def listen() -> socket.socket:
        try:
            return open_listener(args.host, args.port)
        except OSError as error:
            message = f"cannot listen on {args.host} port {args.port} ({error.strerror}); give another --port."
            raise ConfigError(message) from error

    listener = ranks.run_on_first(listen)
    if listener is None:
        process.follow(request, served_models[0], folder, ranks)
    else:
        with listener:
            process.serve(request, served_models, api_key, folder, listener, ranks)
    return DONE


main = command_main(build_parser, run)
