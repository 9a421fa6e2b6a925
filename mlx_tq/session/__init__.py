"""A conversation over one cache, which loses tokens and gets back what a turn needs."""

from mlx_tq.session.memory import Rehydration
from mlx_tq.session.records import SessionStats, Turn
from mlx_tq.session.session import Session

__all__ = ["Rehydration", "Session", "SessionStats", "Turn"]
