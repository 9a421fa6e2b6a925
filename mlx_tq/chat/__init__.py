"""`mlx_tq.chat`: a conversation in a terminal."""

from collections.abc import Sequence

from mlx_tq.chat.flags import build_parser
from mlx_tq.cli.frame import run_command


def main(words: Sequence[str] | None = None) -> int:
    """The command; returns the exit code."""
    return run_command("chat", build_parser(), "mlx_tq.chat.command", words)
