"""Search by meaning in the database itself: every pair, or by HNSW where a session is large."""

from collections.abc import Iterable
from typing import Literal

from rescue_svc.postgres.connections import Connections
from rescue_svc.postgres.vectors import count, of_model
from rescue_svc.store import Vectors


class PostgresIndex:
    """The vectors [N, D] of one model. Nothing of them is in the service's memory.

    `exact` compares with every vector of the session; `hnsw` goes by the session's index where it has one.
    """

    def __init__(self, connections: Connections, model: str, name: Literal["hnsw", "exact"]) -> None:
        self.name = name
        self._connections = connections
        self._model = model

    def current(self, session: int) -> "_OfSession":
        """Return a session's index."""
        return _OfSession(self, session)

    def resume(self, session: int) -> int:
        """Return how many vectors a session's index holds."""
        return count(self._connections, session, self._model)

    def hibernate(self, session: int) -> int:
        """Return 0: nothing was in memory."""
        return 0

    def forget(self, session: int) -> None:
        """Do nothing: the store has dropped the vectors with their table."""

    def is_resident(self, session: int) -> bool:
        """Return False: an index is in the database."""
        return False

    def sizes(self) -> tuple[int, int]:
        """Return that no indexes are in memory, and no bytes."""
        return 0, 0

    def save_all(self) -> None:
        """Do nothing: the database has all."""

    def nearest(self, session: int, query: Vectors, limit: int, excluded: set[int]) -> dict[int, float]:
        """Return the cosines of up to `limit` spans for a unit query [D], best first."""
        table, others = f"vectors_{session:d}", "NOT (span = ANY(%s)) AND " if excluded else ""
        # An index is chosen by its expression: without the cast there is none for the planner to choose.
        vector = f"vector::vector({query.size:d})" if self.name == "hnsw" else "vector"
        rows = self._connections.rows_of_session(
            f"""SELECT span, -distance FROM (SELECT span, {vector} <#> %s AS distance FROM {table}
                WHERE {others}{of_model(session)} ORDER BY distance LIMIT {limit:d}) AS nearest""",
            query,
            *([list(excluded)] if excluded else []),
            self._model,
        )
        return dict(rows)

    def cosines(self, session: int, query: Vectors, spans: Iterable[int]) -> dict[int, float]:
        """Return the cosine of each of these spans that has a vector."""
        statement = (
            f"SELECT span, -(vector <#> %s) FROM vectors_{session:d} WHERE span = ANY(%s) AND {of_model(session)}"
        )
        return dict(self._connections.rows_of_session(statement, query, list(spans), self._model))


class _OfSession:
    """The vectors of one session."""

    def __init__(self, index: PostgresIndex, session: int) -> None:
        self._index = index
        self._session = session

    def search(self, query: Vectors, limit: int, excluded: set[int]) -> dict[int, float]:
        """Return the cosines of up to `limit` spans for a unit query [D], best first."""
        return self._index.nearest(self._session, query, limit, excluded)

    def similarities(self, query: Vectors, spans: Iterable[int]) -> dict[int, float]:
        """Return the cosine of each of these spans that has a vector."""
        return self._index.cosines(self._session, query, spans)
