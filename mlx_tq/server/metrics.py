"""Prometheus metrics: `Metrics` of a model, `ServerMetrics` of a server and all its models."""

from collections.abc import Iterator, Mapping

import mlx.core as mx
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric
from prometheus_client.registry import Collector

_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    """The metrics of one model."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()

        def counter(name: str, help_text: str) -> Counter:
            return Counter(f"mlx_tq_{name}", help_text, registry=registry)

        def gauge(name: str, help_text: str) -> Gauge:
            return Gauge(f"mlx_tq_{name}", help_text, registry=registry)

        self.disconnects = counter("disconnects", "Clients that disconnected before their answer was complete")
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens")
        self.cached_tokens = counter("cached_tokens", "Prompt tokens found in memory or in the prefix cache")
        self.restored_tokens = counter("restored_tokens", "Prompt tokens restored from the prefix cache")
        self.prefill_tokens = counter("prefill_tokens", "Prompt tokens that were prefilled")
        self.generated_tokens = counter("generated_tokens", "Generated tokens")
        self.drafted_tokens = counter("drafted_tokens", "Tokens drafted")
        self.accepted_tokens = counter("accepted_tokens", "Drafted tokens that were accepted")
        self.recalled_tokens = counter("recalled_tokens", "Archived tokens recalled as KV rows")
        self.rescued_tokens = counter("rescued_tokens", "Tokens of evicted text quoted to sessions")
        self.waiting_for_model = gauge("waiting_for_model", "Requests that wait until their model is loaded")
        self.waiting = gauge("waiting", "Requests in the queue")
        self.running = gauge("running", "Requests in the batch")
        self.kv_bytes = gauge("kv_bytes", "Bytes of the batch's KV caches")
        native = "Bytes that mlx-lm's own caches, one for each request, would hold for the same tokens"
        self.kv_native_bytes = gauge("kv_native_bytes", native)
        self.prompt_cache_bytes = gauge("prompt_cache_bytes", "Bytes of stored prompts in memory")
        self.prompt_cache_entries = gauge("prompt_cache_entries", "Stored prompts in memory")
        self.sessions = gauge("sessions", "Sessions")
        self.session_bytes = gauge("session_bytes", "Bytes of the sessions' KV caches")
        self.first_token_seconds = Histogram(
            "mlx_tq_first_token_seconds", "Time to first token", registry=registry, buckets=_SECONDS
        )

    def clear_gauges(self) -> None:
        """Reset the gauges of an unloaded model; counters keep their values."""
        for gauge in (self.waiting, self.running, self.kv_bytes, self.kv_native_bytes):
            gauge.set(0)
        self.prompt_cache_bytes.set(0)
        self.prompt_cache_entries.set(0)
        self.sessions.set_function(float)
        self.session_bytes.set_function(float)


def value_of(metric: Counter | Gauge) -> float:
    """Return the value of a metric without labels."""
    return next(iter(metric.collect())).samples[0].value


class ServerMetrics(Collector):
    """The metrics of a server and its models, which are by name; several have a label `model`."""

    def __init__(self, models: Mapping[str, Metrics]) -> None:
        self._models, self._registry = models, CollectorRegistry()
        self.requests = Counter(
            "mlx_tq_requests", "Responses by route and status", ("route", "status"), registry=self._registry
        )
        memory = Gauge("mlx_tq_memory_bytes", "Bytes that mlx uses, including weights", registry=self._registry)
        memory.set_function(mx.get_active_memory)

    def collect(self) -> Iterator[Metric]:
        yield from self._registry.collect()
        families: dict[str, Metric] = {}
        for model, metrics in self._models.items():
            label = {"model": model} if len(self._models) > 1 else {}
            for family in metrics.registry.collect():
                merged = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                merged.samples += [sample._replace(labels={**sample.labels, **label}) for sample in family.samples]
        yield from families.values()
