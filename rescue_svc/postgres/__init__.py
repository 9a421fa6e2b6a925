"""The store of many services at once: PostgreSQL, with pgvector for what the embedder makes."""

from rescue_svc.postgres.connections import Connections
from rescue_svc.postgres.index import PostgresIndex
from rescue_svc.postgres.store import PostgresStore

__all__ = ["Connections", "PostgresIndex", "PostgresStore"]
