"""`mlx_tq.store`: what the store of prefixes holds, whether it is whole, and how to empty it."""

import argparse
import sys
from collections.abc import Sequence

from mlx_tq.cli.frame import run_command
from mlx_tq.cli.parser import command_parser

ACTIONS = {
    "list": "show what is kept, the prompts used last first",
    "check": "read every record and remove the damaged ones",
    "clear": "remove every record",
}


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of `mlx_tq.store`."""
    parser = command_parser("store", "What the store of prefixes holds.")
    actions = parser.add_subparsers(dest="action", required=True, metavar="{list,check,clear}")
    for name, what in ACTIONS.items():
        add = actions.add_parser(name, help=what, description=what).add_argument
        add(
            "--prefix-cache",
            metavar="DIR|auto",
            help="folder of the store; falls back to MLX_TQ_PREFIX_CACHE (default: auto)",
        )
        add("--json", action="store_true", help="print one JSON object instead of text")
    return parser


def main(words: Sequence[str] | None = None) -> int:
    """The command; returns the exit code."""
    return run_command("store", build_parser(), "mlx_tq.cli.runs.store", words)


if __name__ == "__main__":
    sys.exit(main())
