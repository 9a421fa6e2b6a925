"""`mlx_tq.chat`: a conversation in a terminal."""

from mlx_tq.chat.command import build_parser, run

__all__ = ["build_parser", "run"]
