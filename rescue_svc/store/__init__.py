"""What the service keeps: the door of a store, and the one of SQLite behind it."""

from rescue_svc.store.door import Index, IndexName, SessionIndex, Store
from rescue_svc.store.records import NewSpan, Pending, Session, Span, Vectors
from rescue_svc.store.store import READERS, SqliteStore

__all__ = [
    "READERS",
    "Index",
    "IndexName",
    "NewSpan",
    "Pending",
    "Session",
    "SessionIndex",
    "Span",
    "SqliteStore",
    "Store",
    "Vectors",
]
