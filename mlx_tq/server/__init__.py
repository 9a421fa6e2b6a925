"""`mlx_tq.server`: an OpenAI-compatible server whose concurrent requests all run on compressed KV caches."""

from collections.abc import Sequence

from mlx_tq.cli.frame import run_command
from mlx_tq.server.serve import build_parser


def main(words: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    return run_command("server", build_parser(), "mlx_tq.server.serve", words)
