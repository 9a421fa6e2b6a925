"""`mlx_tq.bench`: measures speed against mlx-lm's own caches, and this machine's kernel thresholds."""

from collections.abc import Sequence

from mlx_tq.bench.flags import build_parser
from mlx_tq.cli.frame import run_command


def main(words: Sequence[str] | None = None) -> int:
    """The command; returns the exit code."""
    return run_command("bench", build_parser(), "mlx_tq.bench.command", words)
