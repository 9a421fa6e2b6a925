"""The command `mlx_tq.chat`: its flags."""

import argparse
import sys

from mlx_tq.cli.options import ON_FULL, PENALTIES, SAMPLING, Request, parse_json_object
from mlx_tq.cli.parser import (
    CommandParser,
    add_cache_arguments,
    add_lookup_argument,
    add_memory_arguments,
    add_model_arguments,
    add_sampling_arguments,
    command_parser,
)
from mlx_tq.cli.runner import command_main


def run(args: argparse.Namespace) -> int:
    request = Request.from_args(args)

    from mlx_tq.cli.startup import check_request

    request = check_request(request)

    from mlx_tq.cli.chat_terminal import run_chat

    return run_chat(request)


def build_parser() -> CommandParser:
    """Build the parser: the flags of mlx_lm.chat, and ours."""
    parser = command_parser("chat", "Chat with an mlx-lm model on a compressed KV cache. Type /help for commands.")
    add_cache_arguments(parser, recall=True, prefix_cache=True, shadow=True, rescue=True)
    add_model_arguments(group := parser.add_argument_group("model"))
    add_memory_arguments(group)
    add = (group := parser.add_argument_group("chat")).add_argument
    add("--system-prompt", metavar="TEXT", help="system prompt (default: none)")
    options = "options of the chat template"
    add("--chat-template-config", type=parse_json_object, default="{}", metavar="JSON", help=options)
    add("--load", metavar="FILE", help="continue a conversation saved with /save, on its model (default: none)")
    on_full = "when the model's context is full: stop, or drop-oldest, which removes the oldest turns"
    add("--on-full", choices=ON_FULL, default=ON_FULL[0], help=on_full)
    add("--max-tokens", "-m", type=int, default=512, metavar="N", help="maximum tokens per answer")
    add_lookup_argument(group)
    add("--prefill-step-size", type=int, default=512, metavar="N", help="tokens per prefill step")
    add_sampling_arguments(group, (*SAMPLING, *PENALTIES), from_model=True)
    add("--seed", type=int, default=0, metavar="N", help="random seed")
    return parser


main = command_main(build_parser, run)

if __name__ == "__main__":
    sys.exit(main())
