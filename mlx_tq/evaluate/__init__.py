"""`mlx_tq.evaluate`: measure what a compressed KV cache costs in quality."""

from mlx_tq.evaluate.command import build_parser, main

__all__ = ["build_parser", "main"]
