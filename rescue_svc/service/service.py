"""The service without HTTP: what each call does, by store, index and embedder."""

import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

from rescue_svc.embed import EmbedWorker, choose_embedder
from rescue_svc.errors import EmbedderUnavailableError, SessionNotFoundError
from rescue_svc.metrics import Metrics
from rescue_svc.opening import open_all
from rescue_svc.schemas import EmbedderInfo, RetrieveRequest
from rescue_svc.service.indexer import Indexer
from rescue_svc.service.rank import Found, Scored, each_alone, fuse, join_neighbours, merge_ranges
from rescue_svc.settings import Settings
from rescue_svc.store import READERS, IndexName, NewSpan, Session, Span, Vectors

# How deep each ranking is read before they are fused.
CANDIDATES = 100
Mode = Literal["hybrid", "dense", "bm25"]


@dataclass(frozen=True)
class Retrieved:
    """What a question found."""

    chunks: list[Found]
    session_total: int
    mode: Mode
    degraded: str | None


@dataclass(frozen=True)
class SessionState:
    """A session and how far its index is."""

    session: Session
    embedded: int
    resident: bool


class RescueService:
    """All calls of the service. Safe to use from many threads; `close` ends it cleanly."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.metrics = Metrics()
        chosen, self._no_embedder = choose_embedder(settings.embedder, settings.model_path)
        self.store, self._index = open_all(settings, chosen.model if chosen else "", self._dim)
        self._words = ThreadPoolExecutor(READERS, "words")  # more threads would wait for a connection
        self.embedder: EmbedWorker | None = None
        if chosen is not None:
            self.embedder = EmbedWorker(chosen, timeout_s=settings.embed_timeout_s, idle_s=settings.embed_idle_s)
            self._indexer = Indexer(self.store, self.embedder, settings.embed_batch)

    def _dim(self) -> int:
        return self.embedder.dim() if self.embedder else 0

    def close(self) -> None:
        """Finish: end the embedder, save the indexes, seal the store."""
        if self.embedder:
            self.embedder.close()
            self._indexer.close()
            self._index.save_all()
        self._words.shutdown()
        self.store.close()

    def write(self, session: str, spans: list[NewSpan]) -> tuple[int, int]:
        """Keep spans; return how many are new and how many the session holds. They are on disk when this returns."""
        accepted, total = self.store.write(session, spans)
        if self.embedder:
            self.embedder.warm()  # what leaves a cache is soon asked for
            self._indexer.wake()
        self.metrics.spans_written.inc(accepted)
        return accepted, total

    def retrieve(self, name: str, ask: RetrieveRequest) -> Retrieved:
        """Find what answers a question. A session that was never written is empty, not an error."""
        session = self.store.session(name)
        if session is None:
            return Retrieved([], 0, "bm25", None)
        began = time.perf_counter()
        asked, degraded = self._ask_embedder(ask.query) if ask.hybrid_alpha > 0 else (None, None)
        excluded = self.store.covered(session, merge_ranges(ask.exclude_ranges)) if ask.exclude_ranges else set()
        # SQLite searches on another thread while the embedder works, and then FAISS: both leave Python free.
        # Dense alone asks for the words too: they find the spans whose vector is not made yet.
        words = self._words.submit(self.store.bm25, session, ask.query, CANDIDATES, excluded)
        waits = time.perf_counter()
        vector, degraded = self._wait_for(asked) if asked else (None, degraded)
        waited = time.perf_counter() - waits
        by_meaning = self._by_meaning(session, vector, excluded, words) if vector is not None else {}
        alpha = ask.hybrid_alpha if vector is not None else 0.0
        mode: Mode = "hybrid" if 0 < alpha < 1 else "dense" if alpha else "bm25"
        ranked = fuse(by_meaning, words.result(), alpha)
        best = [s for s in ranked if self._is_near(s, ask.score_floor)][: ask.top_k]
        spans = {span.id: span for span in self.store.spans(session, [s.id for s in best])}
        best = [s for s in best if s.id in spans]  # a DELETE may have come between
        chunks = (join_neighbours if ask.join else each_alone)([spans[s.id] for s in best], best)
        self.metrics.retrieve_seconds.labels("embed").observe(waited)
        self.metrics.searched(time.perf_counter() - began - waited)
        self.metrics.retrievals.labels(mode, "hit" if chunks else "miss").inc()
        return Retrieved(chunks, session.spans, mode, degraded)

    def _is_near(self, scored: Scored, floor: float | None) -> bool:
        """Tell whether a span passes a floor. The embedder's own says nothing of a span that has no vector yet."""
        if floor is not None:
            return scored.similarity >= floor
        own = self.embedder.floor if self.embedder else None
        return own is None or scored.dense is None or scored.dense >= own

    def _ask_embedder(self, query: str) -> tuple[Future[Vectors] | None, str | None]:
        """Return the vector to come, or why there is none."""
        if self.embedder is None:
            return None, self._no_embedder
        try:
            return self.embedder.question(query), None
        except EmbedderUnavailableError as error:
            return None, str(error)

    def _wait_for(self, asked: Future[Vectors]) -> tuple[Vectors | None, str | None]:
        """Return the vector [D], or why there is none."""
        try:
            return asked.result(self.settings.query_timeout_s)[0], None
        except TimeoutError:
            asked.cancel()
            late = f"the embedder took longer than {self.settings.query_timeout_s} s"
            starting = self.embedder.reason if self.embedder else None
            return None, f"{starting}; {late}" if starting else late
        except EmbedderUnavailableError as error:
            return None, str(error)

    def _by_meaning(
        self, session: Session, vector: Vectors, excluded: set[int], words: Future[dict[int, float]]
    ) -> dict[int, float]:
        """Return the cosines of the nearest spans, and of those that the words found."""
        index = self._index.current(session.id)
        nearest = index.search(vector, CANDIDATES, excluded)
        return nearest | index.similarities(vector, words.result().keys() - nearest.keys())

    def embed(self, texts: list[str]) -> tuple[str, Vectors]:
        """Return the embedder's model and the vectors [N, D] of texts. Raises EmbedderUnavailableError."""
        if self.embedder is None:
            raise EmbedderUnavailableError(f"no embedder: {self._no_embedder}")
        return self.embedder.model, self.embedder.bulk(texts)

    def dump(self, name: str) -> list[Span]:
        """Return all spans of a session in the order of writing; none for a session that was never written."""
        session = self.store.session(name)
        return self.store.spans(session) if session else []

    def page(self, name: str, first: int, count: int) -> tuple[list[Span], int]:
        """Return `count` spans in the order of writing, behind the `first` ones, and how many there are in all.

        Raises SessionNotFoundError.
        """
        session = self._existing(name)
        return self.store.page(session, first, count), session.spans

    def sessions(self) -> list[SessionState]:
        """Return all sessions, the last written first."""
        return [
            SessionState(
                session,
                self.store.count_vectors(session.id, self.embedder.model) if self.embedder else 0,
                self._index.is_resident(session.id),
            )
            for session in self.store.sessions()
        ]

    def forget(self, name: str) -> int:
        """Forget a session for good; return how many spans it held. Raises SessionNotFoundError."""
        session = self.store.forget(name)
        self._index.forget(session.id)
        self.metrics.sessions_forgotten.inc()
        return session.spans

    def hibernate(self, name: str) -> int:
        """Let a session's index leave memory; return how many vectors it held. The next question brings it back."""
        session = self._existing(name)
        return self._index.hibernate(session.id)

    def resume(self, name: str) -> tuple[bool, int]:
        """Make a session's index ready ahead of a question; tell whether it is in memory, and its count of vectors."""
        session = self._existing(name)
        vectors = self._index.resume(session.id) if self.embedder else 0
        return self._index.is_resident(session.id), vectors

    @property
    def index(self) -> IndexName:
        """What searches by meaning."""
        return self._index.name

    def _existing(self, name: str) -> Session:
        session = self.store.session(name)
        if session is None:
            raise SessionNotFoundError(f"no session {name}; `GET /sessions` lists all")
        return session

    def embedder_info(self) -> EmbedderInfo:
        """Say which embedder there is and how it is."""
        if self.embedder is None:
            state: Literal["off", "unavailable"] = "off" if self.settings.embedder == "none" else "unavailable"
            return EmbedderInfo(name=self.settings.embedder, state=state, reason=self._no_embedder, pending=0)
        worker = self.embedder
        pending = self.store.count_pending(worker.model)
        return EmbedderInfo(name=worker.name, state=worker.state, reason=worker.reason, pending=pending)

    def refresh_gauges(self) -> EmbedderInfo:
        """Bring the gauges up to date; return the embedder's state, which they share."""
        sessions = self.store.sessions()
        info = self.embedder_info()
        self.metrics.sessions.set(len(sessions))
        self.metrics.spans.set(sum(session.spans for session in sessions))
        self.metrics.spans_pending.set(info.pending)
        self.metrics.embedder_ready.set(info.state == "ready")
        self.metrics.refresh_recent()
        if self.embedder:
            indexes, size = self._index.sizes()
            self.metrics.indexes.set(indexes)
            self.metrics.index_bytes.set(size)
            self.metrics.embedder_starts.set(self.embedder.starts)
        return info
