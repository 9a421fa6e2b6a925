"""What a model predicts over some caches, and how far two predictions are apart."""

from typing import Any

import mlx.core as mx


def log_probabilities(model: Any, ids: list[int], caches: list[Any]) -> mx.array:
    """Of the next token after each of `ids`, which are appended to the caches: fp32 [L, V]."""
    logits = model(mx.array(ids)[None], cache=caches)[0].astype(mx.float32)
    found: mx.array = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    return found


def kl_divergence(reference: mx.array, other: mx.array) -> mx.array:
    """Of two log-probabilities [..., V], in nats: [...]."""
    divergence: mx.array = (mx.exp(reference) * (reference - other)).sum(axis=-1)
    return mx.maximum(divergence, 0)
