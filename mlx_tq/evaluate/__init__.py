"""`mlx_tq.evaluate`: measure what a compressed KV cache costs in quality."""

import sys
from collections.abc import Sequence

from mlx_tq.cli.frame import run_command
from mlx_tq.evaluate.flags import build_parser


def main(words: Sequence[str] | None = None) -> int:
    """The command; returns the exit code. What stands behind `--` is another program's (see `harness`)."""
    words, parser = list(sys.argv[1:] if words is None else words), build_parser()
    own = words[: words.index("--")] if "--" in words else words
    parser.set_defaults(others=words[len(own) + 1 :])
    return run_command("evaluate", parser, "mlx_tq.evaluate.command", own)
