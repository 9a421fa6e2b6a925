"""A conversation over one cache, which loses tokens and gets back what a turn needs."""

from mlx_tq.conversation.session import Session
from mlx_tq.conversation.statistics import SessionStats, TurnStats
from mlx_tq.conversation.transcript import Rehydration

__all__ = ["Rehydration", "Session", "SessionStats", "TurnStats"]
