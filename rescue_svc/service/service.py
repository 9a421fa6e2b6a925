"""The calls of the service, without HTTP, on top of store, index and embedder."""

import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from typing import Literal

from rescue_svc.embed import EmbedWorker, choose_embedder
from rescue_svc.errors import EmbedderUnavailableError
from rescue_svc.metrics import Metrics
from rescue_svc.opening import open_all
from rescue_svc.schemas import EmbedderInfo, RetrieveRequest, RetrieveResponse
from rescue_svc.service.expiry import Expiry
from rescue_svc.service.indexer import Indexer
from rescue_svc.service.rank import Scored, fuse, merge_ranges, to_chunks
from rescue_svc.settings import Settings
from rescue_svc.store import READERS, NewSpan, Vectors

CANDIDATES = 100  # of each ranking, before they are fused


class RescueService:
    """All calls of the service, safe to use from many threads."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.metrics = Metrics()
        chosen, self._no_embedder_reason = choose_embedder(settings.embedder, settings.model_path)

        def dim() -> int:
            return self.embedder.dim() if self.embedder else 0

        self.store, self.index = open_all(settings, chosen.model if chosen else "", dim)
        self._bm25_pool = ThreadPoolExecutor(READERS, "bm25")  # more threads would wait for a connection
        self._expiry = Expiry(self.store, self.forget)
        self.embedder: EmbedWorker | None = None
        if chosen is not None:
            self.embedder = EmbedWorker(chosen, timeout_s=settings.embed_timeout_s, idle_s=settings.embed_idle_s)
            self.indexer = Indexer(self.store, self.embedder, settings.embed_batch)

    def close(self) -> None:
        """End the embedder, save the indexes and seal the store."""
        with closing(self.store):
            self._expiry.close()
            self._bm25_pool.shutdown()
            if self.embedder:
                self.embedder.close()
                self.indexer.close()
                self.index.save_all()

    def write(self, session: str, spans: list[NewSpan], *, temporary: bool = False) -> tuple[int, int]:
        """Store spans; return how many are new and how many the session has. They are on disk when this returns."""
        accepted, total = self.store.write(session, spans, self._next_expiry() if temporary else None)
        if self.embedder:
            self.embedder.warm()  # a query is likely to follow
            self.indexer.wake()
        self.metrics.spans_written.inc(accepted)
        return accepted, total

    def retrieve(self, name: str, request: RetrieveRequest) -> RetrieveResponse:
        session = self.store.session(name)
        if session is None:
            return RetrieveResponse(chunks=[], session_total=0, mode="bm25", degraded=None)
        start = time.perf_counter()
        is_dense = request.hybrid_alpha > 0
        pending = self.embedder.query(request.query) if self.embedder and is_dense else None
        ranges = merge_ranges(request.exclude_ranges)
        excluded = self.store.covered(session, ranges) if ranges else set()
        # SQLite searches on another thread while the embedder works, and then FAISS: both release the GIL.
        # A dense search needs BM25, too: that finds spans whose vector does not exist yet.
        sparse = self._bm25_pool.submit(self.store.bm25, session, request.query, CANDIDATES, excluded)
        wait_start = time.perf_counter()
        vector, degraded = self._wait_for_vector(pending) if is_dense else (None, None)
        waited = time.perf_counter() - wait_start
        dense: dict[int, float] = {}
        if vector is not None:
            nearest = self.index.search(session.id, vector, CANDIDATES, excluded)
            others = sparse.result().keys() - nearest.keys()
            dense = nearest | self.index.similarities(session.id, vector, others)
        alpha = request.hybrid_alpha if vector is not None else 0.0
        mode: Literal["hybrid", "dense", "bm25"] = "hybrid" if 0 < alpha < 1 else "dense" if alpha else "bm25"
        ranked = fuse(dense, sparse.result(), alpha)
        best = [scored for scored in ranked if self._passes_floor(scored, request.score_floor)][: request.top_k]
        spans = {span.id: span for span in self.store.spans(session, [scored.id for scored in best])}
        best = [scored for scored in best if scored.id in spans]  # the session may have been deleted meanwhile
        chunks = to_chunks([spans[scored.id] for scored in best], best, join=request.join)
        self.metrics.retrieve_seconds.labels("embed").observe(waited)
        self.metrics.record_search(time.perf_counter() - start - waited)
        self.metrics.retrievals.labels(mode, "hit" if chunks else "miss").inc()
        return RetrieveResponse(chunks=chunks, session_total=session.spans, mode=mode, degraded=degraded)

    def _passes_floor(self, scored: Scored, floor: float | None) -> bool:
        if floor is not None:
            return scored.similarity >= floor
        floor = self.embedder.floor if self.embedder else None  # does not apply to spans without a vector
        return floor is None or scored.dense is None or scored.dense >= floor

    def _wait_for_vector(self, pending: Future[Vectors] | None) -> tuple[Vectors | None, str | None]:
        """Return the vector [D] of the query; or None, and the reason why there is none."""
        if pending is None:
            return None, self._no_embedder_reason
        try:
            return pending.result(self.settings.query_timeout_s)[0], None
        except TimeoutError:
            pending.cancel()
            late = f"the embedder took longer than {self.settings.query_timeout_s} s"
            reason = self.embedder.reason if self.embedder else None
            return None, f"{reason}; {late}" if reason else late
        except EmbedderUnavailableError as error:
            return None, str(error)

    def embed(self, texts: list[str]) -> tuple[str, Vectors]:
        if self.embedder is None:
            raise EmbedderUnavailableError(f"no embedder: {self._no_embedder_reason}")
        return self.embedder.model, self.embedder.bulk(texts)

    def renew(self, name: str) -> float | None:
        """Let a temporary session live on; return when it expires, None for never."""
        return self.store.renew(name, self._next_expiry()).expires

    def _next_expiry(self) -> float:
        return time.time() + self.settings.session_lifetime_s

    def forget(self, name: str, expired_at: float | None = None) -> int:
        """Delete a session for good, as `Store.forget`; return how many spans it had."""
        session = self.store.forget(name, expired_at)
        self.index.forget(session.id)
        self.metrics.sessions_forgotten.inc()
        self.store.purge()
        return session.spans

    def embedder_info(self) -> EmbedderInfo:
        if self.embedder is None:
            state: Literal["off", "unavailable"] = "off" if self.settings.embedder == "none" else "unavailable"
            name, reason = self.settings.embedder, self._no_embedder_reason
            return EmbedderInfo(name=name, model=None, state=state, reason=reason, pending=0)
        worker = self.embedder
        pending = self.store.count_pending(worker.model)
        return EmbedderInfo(
            name=worker.name, model=worker.model, state=worker.state, reason=worker.reason, pending=pending
        )

    def refresh_gauges(self) -> None:
        sessions = self.store.sessions()
        info = self.embedder_info()
        indexes, size = self.index.sizes() if self.embedder else (0, 0)
        self.metrics.refresh_gauges(
            sessions=len(sessions),
            spans=sum(session.spans for session in sessions),
            spans_pending=info.pending,
            resident_indexes=indexes,
            resident_index_bytes=size,
            embedder_starts=self.embedder.starts if self.embedder else 0,
            embedder_ready=info.state == "ready",
        )
