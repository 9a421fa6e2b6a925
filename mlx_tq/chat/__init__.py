"""The command `mlx_tq.chat`: its flags."""

import argparse
from collections.abc import Sequence

from mlx_tq.cli.args import add_cache_arguments, add_rescue_arguments
from mlx_tq.cli.frame import run_command
from mlx_tq.cli.model_args import add_model_arguments, add_sampling_arguments
from mlx_tq.cli.parser import command_parser


def main(words: Sequence[str] | None = None) -> int:
    return run_command("chat", build_parser(), "mlx_tq.chat.terminal", words)


def build_parser() -> argparse.ArgumentParser:
    """Build the parser: the flags of mlx_lm.chat, and ours."""
    parser = command_parser("chat", "Chat with an mlx-lm model on a compressed KV cache. Type /help for commands.")
    add_model_arguments(parser)
    parser.add_argument("--system-prompt", metavar="TEXT", help="system prompt (default: none)")
    parser.add_argument("--chat-template-config", metavar="JSON", help="options of the chat template (default: {})")
    parser.add_argument("--load", metavar="FILE", help="continue a conversation saved with /save (default: none)")
    parser.add_argument("--max-tokens", "-m", type=int, default=512, metavar="N", help="maximum tokens of an answer")
    parser.add_argument("--prefill-step-size", type=int, default=512, metavar="N", help="tokens per prefill step")
    add_sampling_arguments(parser)
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="random seed")
    add_cache_arguments(parser, recall=True, store=True, shadow=True)
    add_rescue_arguments(parser)
    return parser
