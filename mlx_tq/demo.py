"""`mlx_tq.demo`: a fact in a conversation that outgrows its cache, asked for with and without what mlx_tq does."""

import argparse
import sys
from collections.abc import Sequence

from mlx_tq.cli.args import add_backend_argument
from mlx_tq.cli.frame import run_command
from mlx_tq.cli.model_args import add_model_arguments
from mlx_tq.cli.parser import command_parser


def build_parser() -> argparse.ArgumentParser:
    """Length, place and seed of the fact, and the budget."""
    parser = command_parser("demo", "A conversation that outgrows its cache.")
    add_model_arguments(parser, adapter=False)
    parser.add_argument("--tokens", type=int, default=1000, metavar="N", help="length of the text")
    parser.add_argument("--depth", type=float, default=0.0, help="where the fact stands, 0 to 1")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the fact and the text around it")
    parser.add_argument("--budget", default="40%", help="what may stay: tokens, a share, or bytes")
    add_backend_argument(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    return parser


def main(words: Sequence[str] | None = None) -> int:
    """The command; returns the exit code."""
    return run_command("demo", build_parser(), "mlx_tq.cli.runs.demo", words)


if __name__ == "__main__":
    sys.exit(main())
