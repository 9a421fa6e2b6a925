"""Indexes of vectors in memory, which can be rebuilt from the store at any time."""

from rescue_svc.index.residents import Residents
from rescue_svc.index.snapshot import remove as remove_snapshots

__all__ = ["Residents", "remove_snapshots"]
