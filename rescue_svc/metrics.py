"""Prometheus metrics, in a registry for each service."""

import math
from collections import deque

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

RECENT = 1000
BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)


class Metrics:
    """The metrics of one service. Labels are routes, modes and codes, never a session id or text."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "rescue_requests", "Requests by route and status.", ["method", "route", "status"], registry=self.registry
        )
        self.request_seconds = Histogram(
            "rescue_request_seconds", "Time of a request.", ["route"], buckets=BUCKETS_S, registry=self.registry
        )
        self.retrieve_seconds = Histogram(
            "rescue_retrieve_seconds",
            "Time of a retrieval by stage; embed is the wait for the vector after the BM25 search was started.",
            ["stage"],
            buckets=BUCKETS_S,
            registry=self.registry,
        )
        self.recent_seconds = Gauge(
            "rescue_recent_search_seconds",
            f"Quantiles of the last {RECENT} searches, without the embedder.",
            ["quantile"],
            registry=self.registry,
        )
        self._recent: deque[float] = deque(maxlen=RECENT)
        self.retrievals = Counter(
            "rescue_retrievals", "Retrievals by mode, hit or miss.", ["mode", "outcome"], registry=self.registry
        )
        self.spans_written = Counter("rescue_spans_written", "Spans stored for the first time.", registry=self.registry)
        self.sessions_forgotten = Counter("rescue_sessions_forgotten", "Sessions forgotten.", registry=self.registry)
        self.sessions = Gauge("rescue_sessions", "Stored sessions.", registry=self.registry)
        self.spans = Gauge("rescue_spans", "Stored spans.", registry=self.registry)
        self.spans_pending = Gauge("rescue_spans_pending", "Spans without a vector yet.", registry=self.registry)
        self.indexes = Gauge("rescue_resident_indexes", "Indexes in memory.", registry=self.registry)
        self.index_bytes = Gauge("rescue_resident_index_bytes", "Bytes of vectors in memory.", registry=self.registry)
        self.embedder_starts = Gauge("rescue_embedder_starts", "Starts of the embedder.", registry=self.registry)
        self.embedder_ready = Gauge("rescue_embedder_ready", "1 while the embedder is ready.", registry=self.registry)

    def record_search(self, seconds: float) -> None:
        self._recent.append(seconds)
        self.retrieve_seconds.labels("search").observe(seconds)

    def refresh_recent(self) -> None:
        times = sorted(self._recent.copy())
        for quantile in (0.5, 0.95) if times else ():
            self.recent_seconds.labels(quantile).set(times[math.ceil(quantile * len(times)) - 1])
