"""The flags of `mlx_tq.server`."""

import argparse
import json
from typing import Any

from mlx_tq.cli.args import KEY_VARIABLE, add_cache_arguments, add_rescue_arguments, parse_size
from mlx_tq.cli.model_args import add_model_arguments, add_sampling_arguments
from mlx_tq.cli.parser import command_parser


def _json_object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return value


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def build_parser() -> argparse.ArgumentParser:
    """The flags of mlx_lm.server that have a meaning here, and ours."""
    parser = command_parser("server", "Serve a model over OpenAI's API on compressed KV caches.")
    add_model_arguments(parser)
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="address to listen on; any but loopback needs an API key")
    add("--port", type=int, default=8080, metavar="N", help="port to listen on; 0 takes a free one")
    add("--api-key", metavar="KEY", help=f"clients must send it; better given as {KEY_VARIABLE} (default: none)")
    add(
        "--allowed-origins",
        type=_names,
        default=[],
        metavar="A,B,...",
        help="web pages that may call, with commas between (default: none)",
    )
    levels = ["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"]
    add("--log-level", default="INFO", choices=levels, help="least weight of what is logged")

    add = (group := parser.add_argument_group("answers", "what holds where a request does not say")).add_argument
    add("--chat-template", metavar="TEXT", help="a chat template (default: the tokenizer's)")
    add(
        "--chat-template-args",
        type=_json_object,
        default="{}",
        metavar="JSON",
        help="options of the template, such as '{\"enable_thinking\":false}'",
    )
    add_sampling_arguments(group)
    add("--max-tokens", type=int, default=512, metavar="N", help="tokens of an answer")

    add = parser.add_argument_group("limits").add_argument
    add("--decode-concurrency", type=int, default=32, metavar="N", help="answers generated at once")
    add("--prompt-concurrency", type=int, default=8, metavar="N", help="prompts read at once")
    add("--prefill-step-size", type=int, default=2048, metavar="N", help="tokens of a prompt read at a time")
    add("--max-queue", type=int, default=64, metavar="N", help="requests that may wait; further ones are answered 429")
    add(
        "--max-body",
        type=parse_size,
        metavar="SIZE",
        help="maximum request size in bytes (default: 32 per token of context length, at least 2MB; 10MB if the model "
        "states no context length)",
    )
    add("--allow-lark", action="store_true", help="accept Lark grammars in response_format from clients")
    add("--prompt-cache-size", type=int, default=10, metavar="N", help="prompts whose caches are kept")
    add(
        "--prompt-cache-bytes",
        type=parse_size,
        metavar="SIZE",
        help="bytes of those caches (default: what the limit of all leaves)",
    )
    add(
        "--kv-memory-limit",
        type=parse_size,
        metavar="SIZE",
        help="bytes of all caches, such as 4GB (default: the free memory)",
    )
    add(
        "--prefix-cache-share",
        action="store_true",
        help="servers with another API key find what this one stores, and the other way round",
    )
    add("--sessions", type=int, default=16, metavar="N", help="sessions that are kept for their next request")
    add_cache_arguments(parser, recall=True, store=True)
    add_rescue_arguments(parser)
    return parser
