"""The door of a store: all that the service asks of whatever keeps its spans, its words and its vectors.

Two stand behind it: SQLite with indexes in memory (`rescue_svc.store`, `rescue_svc.index`), and PostgreSQL with its
own (`rescue_svc.postgres`). Every call is safe from many threads. Any of them raises StoreUnavailableError while the
store is out of reach, and StoreDamagedError where a row is not what was written.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Literal, Protocol

from rescue_svc.store.records import NewSpan, Pending, Session, Span, Vectors

IndexName = Literal["faiss", "numpy", "hnsw", "exact"]


class Store(Protocol):
    """Spans of all sessions. A session that is forgotten while it is read is empty."""

    def about(self) -> str:
        """Say where the spans are, and what there is to know of it; no password."""

    def close(self) -> None:
        """Finish what is in progress and let go."""

    def write(self, name: str, spans: Sequence[NewSpan]) -> tuple[int, int]:
        """Store spans in one transaction; return how many are new and how many the session then holds.

        What returned is on the disk. Raises SessionFullError or StoreFullError, and then nothing of the call is stored.
        """

    def session(self, name: str) -> Session | None:
        """Return a session, or None if it was never written or is forgotten."""

    def sessions(self) -> list[Session]:
        """Return all sessions, the last written first."""

    def spans(self, session: Session, ids: Sequence[int] | None = None) -> list[Span]:
        """Return the session's spans with these ids, or all, in the order of writing."""

    def page(self, session: Session, first: int, count: int) -> list[Span]:
        """Return `count` spans in the order of writing, behind the `first` ones."""

    def covered(self, session: Session, ranges: Sequence[tuple[int, int]]) -> set[int]:
        """Return the ids of spans that lie wholly in one of `ranges`."""

    def bm25(self, session: Session, query: str, limit: int, excluded: set[int]) -> dict[int, float]:
        """Return up to `limit` span ids with their BM25 score (higher is better), best first; none of `excluded`."""

    def forget(self, name: str) -> Session:
        """Remove a session for good; return what it was. Raises SessionNotFoundError."""

    def embed_next(self, model: str, limit: int, embed: Callable[[list[Pending]], Vectors]) -> bool:
        """Give up to `limit` spans that wait the vectors [N, D] that `embed` makes; tell whether there were any.

        What `embed` raises passes through, and the spans go on waiting.
        """

    def give_up(self, model: str, span: int) -> None:
        """Leave a span without a vector until the next start: it cannot be embedded."""

    def count_pending(self, model: str) -> int:
        """Count the spans that have no vector of `model`."""

    def count_vectors(self, session: int, model: str) -> int:
        """Count a session's vectors."""


class SessionIndex(Protocol):
    """The vectors of one session, as they are now."""

    def search(self, query: Vectors, limit: int, excluded: set[int]) -> dict[int, float]:
        """Return the cosines of up to `limit` spans for a unit query [D], best first."""

    def similarities(self, query: Vectors, spans: Iterable[int]) -> dict[int, float]:
        """Return the cosine of each of these spans that has a vector."""


class Index(Protocol):
    """Search by meaning over what the embedder made of the spans."""

    @property
    def name(self) -> IndexName:
        """What searches."""

    def current(self, session: int) -> SessionIndex:
        """Return a session's index with every vector that the store has by now."""

    def resume(self, session: int) -> int:
        """Make a session's index ready ahead of a question; return how many vectors it holds."""

    def hibernate(self, session: int) -> int:
        """Let a session's index leave the service's memory; return how many vectors it held there."""

    def forget(self, session: int) -> None:
        """Remove what is kept of a session beside the store."""

    def is_resident(self, session: int) -> bool:
        """Tell whether a session's index is in the service's memory."""

    def sizes(self) -> tuple[int, int]:
        """Return how many indexes are in the service's memory, and how many bytes of vectors they hold."""

    def save_all(self) -> None:
        """Keep what is in memory for a quick next start."""
