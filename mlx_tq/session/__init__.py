"""A conversation over one cache, which loses tokens and gets back what a turn needs."""

from mlx_tq.session.session import Session
from mlx_tq.session.statistics import SessionStats, TurnStats
from mlx_tq.session.transcript import Rehydration

__all__ = ["Rehydration", "Session", "SessionStats", "TurnStats"]
