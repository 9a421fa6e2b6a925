"""The interface of a store, and its implementation with SQLite."""

from rescue_svc.store.interface import Index, IndexName, Store, no_session
from rescue_svc.store.plain_words import plain_words
from rescue_svc.store.records import NewSpan, Pending, Session, Span, Vectors
from rescue_svc.store.sqlite_store import READERS, SqliteStore

__all__ = [
    "READERS",
    "Index",
    "IndexName",
    "NewSpan",
    "Pending",
    "Session",
    "Span",
    "SqliteStore",
    "Store",
    "Vectors",
    "no_session",
    "plain_words",
]
