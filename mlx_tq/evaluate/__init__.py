"""Measure what a compressed KV cache costs in quality; each measurement is a function and a subcommand."""

from mlx_tq.evaluate.command import run
from mlx_tq.evaluate.parser import build_parser

__all__ = ["build_parser", "run"]
