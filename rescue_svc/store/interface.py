"""The interfaces of a store and of its index.

SQLite with indexes in memory (`rescue_svc.store`, `rescue_svc.index`) and PostgreSQL (`rescue_svc.postgres`) implement
them. Every call is safe from many threads, and may raise StoreUnavailableError or StoreDamagedError.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Literal, Protocol

from rescue_svc.errors import SessionNotFoundError
from rescue_svc.store.records import NewSpan, Pending, Session, Span, Vectors

IndexName = Literal["faiss", "hnsw", "exact"]


def no_session(name: str) -> SessionNotFoundError:
    return SessionNotFoundError(f"no session {name}; `GET /sessions` lists all")


class Store(Protocol):
    """Spans of all sessions. A session that is deleted while it is read is empty."""

    def describe(self) -> str:
        """Return the location and state of the store, without a password."""

    def close(self) -> None: ...

    def write(self, name: str, spans: Sequence[NewSpan], expires: float | None = None) -> tuple[int, int]:
        """Store spans in one transaction; return how many are new and how many the session then has.

        They are on disk when this returns. After SessionFullError or StoreFullError nothing of the call is stored.
        The session expires at the latest time of its writes and renewals, or never if a write gives none.
        """

    def renew(self, name: str, expires: float) -> Session:
        """Let a session that expires do so no earlier, and return it; raise SessionNotFoundError if there is none."""

    def session(self, name: str) -> Session | None: ...

    def existing(self, name: str) -> Session:
        """Return a session; raise SessionNotFoundError if there is none."""
        session = self.session(name)
        if session is None:
            raise no_session(name)
        return session

    def sessions(self) -> list[Session]:
        """Return all sessions, the most recently written first."""

    def spans(self, session: Session, ids: Sequence[int] | None = None) -> list[Span]:
        """Return the session's spans with these ids, or all, in the order of writing."""

    def page(self, session: Session, first: int, count: int) -> list[Span]:
        """Return `count` spans after the first `first`, in the order of writing."""

    def covered(self, session: Session, ranges: Sequence[tuple[int, int]]) -> set[int]:
        """Return the ids of spans inside one of `ranges`."""

    def bm25(self, session: Session, query: str, limit: int, excluded: set[int]) -> dict[int, float]:
        """Return up to `limit` span ids with their BM25 score (higher is better), best first, without `excluded`."""

    def forget(self, name: str, expired_at: float | None = None) -> Session:
        """Delete a session and return it; raise SessionNotFoundError. Call `purge` afterwards.

        With `expired_at`, one that expires later or never is not deleted, but not found.
        """

    def purge(self) -> None:
        """Remove the text of deleted sessions from the database's logs; raise StoreUnavailableError while it stays."""

    def embed_next(self, model: str, limit: int, embed: Callable[[list[Pending]], Vectors]) -> bool:
        """Store the vectors [N, D] that `embed` returns for up to `limit` pending spans; return whether there were any.

        Exceptions of `embed` pass through, and the spans stay pending.
        """

    def give_up(self, model: str, span: int) -> None:
        """Leave a span that cannot be embedded without a vector until the next start."""

    def count_pending(self, model: str) -> int:
        """Count the spans without a vector of `model`."""

    def count_vectors(self, session: int, model: str) -> int: ...


class Index:
    """Dense search over the vectors of the spans. Methods about memory are for indexes that the service loads."""

    name: IndexName

    def search(self, session: int, query: Vectors, limit: int, excluded: set[int]) -> dict[int, float]:
        """Return the cosines of up to `limit` spans for a unit query [D], best first, of all that have a vector now."""
        raise NotImplementedError

    def similarities(self, session: int, query: Vectors, spans: Iterable[int]) -> dict[int, float]:
        """Return the cosine of each of these spans that has a vector."""
        raise NotImplementedError

    def resume(self, session: int) -> int:
        """Load a session's index ahead of a query; return how many vectors it has."""
        raise NotImplementedError

    def hibernate(self, session: int) -> int:
        """Remove a session's index from memory; return how many vectors it had there."""
        return 0

    def forget(self, session: int) -> None:
        """Delete a session's vectors outside the store."""

    def is_resident(self, session: int) -> bool:
        return False

    def sizes(self) -> tuple[int, int]:
        """Return the number of indexes in memory, and the bytes of their vectors."""
        return 0, 0

    def save_all(self) -> None:
        """Save the indexes in memory for a fast next start."""
