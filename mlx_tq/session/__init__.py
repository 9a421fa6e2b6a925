"""Conversations over one cache that evicts tokens and recalls what a turn needs."""

from mlx_tq.session.session import Session
from mlx_tq.session.transcript import Quotation
from mlx_tq.session.turn import TurnStats

__all__ = ["Quotation", "Session", "TurnStats"]
