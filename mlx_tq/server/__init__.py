"""`mlx_tq.server`: an OpenAI-compatible server whose concurrent requests all run on compressed KV caches."""

from mlx_tq.server.command import build_parser, run

__all__ = ["build_parser", "run"]
