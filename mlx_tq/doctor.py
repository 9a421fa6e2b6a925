"""`mlx_tq.doctor`: versions, backend, and a self-test of every codec."""

import argparse
import sys
from collections.abc import Sequence

from mlx_tq.commands.args import add_impl_argument
from mlx_tq.commands.frame import run_command
from mlx_tq.commands.parser import command_parser


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of `mlx_tq.doctor`."""
    parser = command_parser("doctor", "Show versions and backend, and test every codec.")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.add_argument("--kernels", action="store_true", help="run every GPU kernel against mlx's own operations")
    add_impl_argument(parser)
    return parser


def main(words: Sequence[str] | None = None) -> int:
    """The command; returns the exit code."""
    return run_command("doctor", build_parser(), "mlx_tq.commands.runs.doctor", words)


if __name__ == "__main__":
    sys.exit(main())
