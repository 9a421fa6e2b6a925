"""Prometheus metrics, in a registry for each service."""

import math
from collections import deque

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

RECENT = 1000
BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)

GAUGES = {
    "sessions": "Stored sessions.",
    "spans": "Stored spans.",
    "spans_pending": "Spans without a vector yet.",
    "resident_indexes": "Indexes in memory.",
    "resident_index_bytes": "Bytes of vectors in memory.",
    "embedder_starts": "Starts of the embedder.",
    "embedder_ready": "1 while the embedder is ready.",
}


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
        self._recent_seconds = Gauge(
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
        self.sessions_forgotten = Counter("rescue_sessions_forgotten", "Sessions deleted.", registry=self.registry)
        self._gauges = {name: Gauge(f"rescue_{name}", help, registry=self.registry) for name, help in GAUGES.items()}

    def record_search(self, seconds: float) -> None:
        self._recent.append(seconds)
        self.retrieve_seconds.labels("search").observe(seconds)

    def refresh_gauges(self, **values: float) -> None:
        """Set gauges by name, and the quantiles of recent searches."""
        for name, value in values.items():
            self._gauges[name].set(value)
        times = sorted(self._recent.copy())
        for quantile in (0.5, 0.95) if times else ():
            self._recent_seconds.labels(quantile).set(times[math.ceil(quantile * len(times)) - 1])
