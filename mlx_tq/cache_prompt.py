"""`mlx_tq.cache_prompt`: read a prompt once, save its cache, and generate from it later, with mlx-lm too."""

import argparse
import sys
from collections.abc import Sequence

from mlx_tq.cli.args import add_cache_arguments
from mlx_tq.cli.frame import run_command
from mlx_tq.cli.model_args import add_model_arguments
from mlx_tq.cli.parser import command_parser


def build_parser() -> argparse.ArgumentParser:
    """The flags of mlx_lm.cache_prompt that apply, and ours."""
    parser = command_parser(
        "cache_prompt",
        "Read a prompt once and save its compressed KV cache.",
        "--prompt-cache-file FILE [-p PROMPT] [options]",
    )
    add_model_arguments(parser)
    parser.add_argument("--prompt", "-p", help="the prompt; - reads standard input (default: standard input)")
    parser.add_argument("--prompt-file", metavar="FILE", help="read the prompt from a file (default: none)")
    parser.add_argument("--prompt-cache-file", required=True, metavar="FILE", help="the .safetensors file to write")
    parser.add_argument(
        "--decode",
        metavar="FILE",
        help="write what this compressed cache holds for mlx-lm, instead of a prompt (default: none)",
    )
    parser.add_argument("--prefill-step-size", type=int, default=2048, metavar="N", help="tokens read at a time")
    add_cache_arguments(parser, recall=True)
    return parser


def main(words: Sequence[str] | None = None) -> int:
    """The command; returns the exit code."""
    return run_command("cache_prompt", build_parser(), "mlx_tq.cli.runs.cache_prompt", words)


if __name__ == "__main__":
    sys.exit(main())
