"""Measure what a compressed KV cache costs in quality; each measurement is a function and a subcommand."""

from mlx_tq.evaluate.command import build_parser, run

__all__ = ["build_parser", "run"]
