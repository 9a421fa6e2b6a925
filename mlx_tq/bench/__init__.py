"""`mlx_tq.bench`: measure speed and memory against mlx-lm's own caches, and this machine's kernel thresholds."""

from mlx_tq.bench.command import build_parser, main

__all__ = ["build_parser", "main"]
