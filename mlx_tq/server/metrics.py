"""`Metrics`: the Prometheus metrics of one server."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()

        def counter(name: str, help_text: str, *labels: str) -> Counter:
            return Counter(f"mlx_tq_{name}", help_text, labels, registry=registry)

        def gauge(name: str, help_text: str) -> Gauge:
            return Gauge(f"mlx_tq_{name}", help_text, registry=registry)

        self.requests = counter("requests", "Responses by route and status", "route", "status")
        self.disconnects = counter("disconnects", "Clients that disconnected before their answer was complete")
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens")
        self.cached_tokens = counter("cached_tokens", "Prompt tokens found in memory or in the prefix cache")
        self.restored_tokens = counter("restored_tokens", "Prompt tokens restored from the prefix cache")
        self.prefill_tokens = counter("prefill_tokens", "Prompt tokens that were prefilled")
        self.generated_tokens = counter("generated_tokens", "Generated tokens")
        self.recalled_tokens = counter("recalled_tokens", "Archived tokens recalled as KV rows")
        self.rescued_tokens = counter("rescued_tokens", "Tokens of evicted text quoted to sessions")
        self.waiting = gauge("waiting", "Requests in the queue")
        self.running = gauge("running", "Requests in the batch")
        self.kv_bytes = gauge("kv_bytes", "Bytes of the batch's KV caches")
        native = "Bytes that mlx-lm's own caches, one for each request, would hold for the same tokens"
        self.kv_native_bytes = gauge("kv_native_bytes", native)
        self.memory_bytes = gauge("memory_bytes", "Bytes that mlx uses, including the model's weights")
        self.prompt_cache_bytes = gauge("prompt_cache_bytes", "Bytes of stored prompts in memory")
        self.prompt_cache_entries = gauge("prompt_cache_entries", "Stored prompts in memory")
        self.sessions = gauge("sessions", "Sessions")
        self.session_bytes = gauge("session_bytes", "Bytes of the sessions' KV caches")
        self.first_token_seconds = Histogram(
            "mlx_tq_first_token_seconds", "Time to first token", registry=registry, buckets=_SECONDS
        )
