"""The store: SQLite, the one truth of the service."""

from rescue_svc.store.records import NewSpan, Span, Vectors
from rescue_svc.store.store import READERS, Session, Store

__all__ = ["READERS", "NewSpan", "Session", "Span", "Store", "Vectors"]
