"""The flags of `mlx_tq.chat`."""

import argparse

from mlx_tq.cli.args import add_cache_arguments, add_rescue_arguments
from mlx_tq.cli.model_args import add_model_arguments, add_sampling_arguments
from mlx_tq.cli.parser import command_parser


def build_parser() -> argparse.ArgumentParser:
    """Build the parser: mlx_lm.chat's flags, and ours."""
    parser = command_parser("chat", "Chat with an mlx-lm model on a compressed KV cache. /help shows what to type.")
    add_model_arguments(parser)
    parser.add_argument("--system-prompt", metavar="TEXT", help="what the conversation begins with (default: none)")
    parser.add_argument(
        "--chat-template-config", metavar="JSON", help="object of options of the chat template (default: {})"
    )
    parser.add_argument("--load", metavar="FILE", help="go on with a conversation that /save wrote (default: none)")
    parser.add_argument("--max-tokens", "-m", type=int, default=512, metavar="N", help="of an answer")
    parser.add_argument("--prefill-step-size", type=int, default=512, metavar="N", help="tokens read at a time")
    add_sampling_arguments(parser)
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the sampling")
    add_cache_arguments(parser, recall=True, store=True, shadow=True)
    add_rescue_arguments(parser)
    return parser
