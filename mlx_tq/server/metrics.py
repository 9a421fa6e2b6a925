"""What /metrics shows."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram


class Metrics:
    """Counters of one server, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def counter(name: str, what: str, *labels: str) -> Counter:
            return Counter(f"mlx_tq_{name}", what, labels, registry=self.registry)

        def gauge(name: str, what: str) -> Gauge:
            return Gauge(f"mlx_tq_{name}", what, registry=self.registry)

        self.requests = counter("requests", "Answers by route and status", "route", "status")
        self.disconnects = counter("disconnects", "Clients that left before their answer was complete")
        self.prompt_tokens = counter("prompt_tokens", "Tokens of prompts")
        self.cached_tokens = counter("cached_tokens", "Tokens of prompts that were in memory or in the store")
        self.restored_tokens = counter("restored_tokens", "Tokens of prompts that were in the store of prefixes")
        self.read_tokens = counter("read_tokens", "Tokens of prompts that were read")
        self.generated_tokens = counter("generated_tokens", "Tokens of answers")
        self.waiting = gauge("waiting", "Requests in the queue")
        self.running = gauge("running", "Requests in the batch")
        self.kv_bytes = gauge("kv_bytes", "Bytes of the caches of the batch")
        self.memory_bytes = gauge("memory_bytes", "Bytes that mlx holds, the model's weights too")
        self.kv_fp16_bytes = gauge("kv_fp16_bytes", "Bytes that the same tokens take at 16 bits")
        self.prompt_cache_bytes = gauge("prompt_cache_bytes", "Bytes of the caches kept for later requests")
        self.prompt_cache_entries = gauge("prompt_cache_entries", "Caches kept for later requests")
        self.sessions = gauge("sessions", "Sessions that are kept")
        self.session_bytes = gauge("session_bytes", "Bytes of the caches of kept sessions")
        self.recalled_tokens = counter("recalled_tokens", "Tokens whose rows came back for a question")
        self.rescued_tokens = counter("rescued_tokens", "Tokens of quotations that sessions were given")
        self.first_token_seconds = Histogram(
            "mlx_tq_first_token_seconds",
            "From a request to its first token",
            registry=self.registry,
            buckets=(0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300),
        )
