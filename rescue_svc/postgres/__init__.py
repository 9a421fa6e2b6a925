"""The store in PostgreSQL with pgvector, which several services can share."""

from rescue_svc.postgres.connections import Connections
from rescue_svc.postgres.postgres_store import PostgresStore
from rescue_svc.postgres.vectors import PostgresIndex

__all__ = ["Connections", "PostgresIndex", "PostgresStore"]
