"""`mlx_tq.doctor`: versions, backend, a self-test of every codec; and what fits into a memory."""

import argparse
import sys
from collections.abc import Sequence

from mlx_tq.cli.args import add_backend_argument, parse_size
from mlx_tq.cli.frame import run_command
from mlx_tq.cli.model_args import add_model_arguments
from mlx_tq.cli.parser import command_parser


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of `mlx_tq.doctor`."""
    parser = command_parser("doctor", "Show versions and backend, and test every codec.")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.add_argument("--kernels", action="store_true", help="run every GPU kernel against mlx's own operations")
    add_backend_argument(parser)
    fits = parser.add_argument_group("what fits")
    fits.add_argument("--capacity", action="store_true", help="show which contexts fit, and how many at once, instead")
    fits.add_argument(
        "--memory",
        type=parse_size,
        metavar="SIZE",
        help="of weights and caches together, such as 36GB (default: what the GPU may take, or this machine's memory)",
    )
    add_model_arguments(fits, adapter=False)
    return parser


def main(words: Sequence[str] | None = None) -> int:
    """The command; returns the exit code."""
    return run_command("doctor", build_parser(), "mlx_tq.cli.runs.doctor", words)


if __name__ == "__main__":
    sys.exit(main())
