"""`mlx_tq.server`: an OpenAI-compatible server whose concurrent requests all run on compressed KV caches."""

from collections.abc import Sequence

from mlx_tq.cli.runner import run_command
from mlx_tq.server.serve import build_parser, run


def main(words: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    return run_command(build_parser(), run, words)
