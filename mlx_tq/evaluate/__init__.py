"""`mlx_tq.evaluate`: measure what a compressed KV cache costs in quality."""

from collections.abc import Sequence

from mlx_tq.commands.frame import run_command
from mlx_tq.evaluate.flags import build_parser


def main(words: Sequence[str] | None = None) -> int:
    """The command; returns the exit code."""
    return run_command("evaluate", build_parser(), "mlx_tq.evaluate.command", words)
