"""Measure pairs of key and value formats: bytes, error of the stored vectors, and what that does to predictions."""

from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_tq.errors import ConfigError
from mlx_tq.evaluate.arms import Arm
from mlx_tq.evaluate.results import Advance, Record
from mlx_tq.evaluate.teacher_forced import divergence, normalization_hint, perplexity, score_text
from mlx_tq.prompt_cache.build import make_cache
from mlx_tq.prompt_cache.compressed import plan_caches
from mlx_tq.prompt_cache.recording import Attended, record_attention

TOGETHER = 4  # pairs that share one pass of the uncompressed cache
QUERIES = 64  # last tokens of the recorded text, whose attention is compared


def measure_formats(
    model: Any, chunks: list[list[int]], arms: Sequence[Arm], step: int = 512, advance: Advance = lambda tokens: None
) -> Iterator[Record]:
    """Measure each pair, a few at a time, so that finished ones can be saved."""
    if not arms:
        return
    recorded = record_attention(model, chunks[0], QUERIES)
    for start in range(0, len(arms), TOGETHER):
        members = arms[start : start + TOGETHER]
        reference, *scores = score_text(model, chunks, members, step, advance)
        for arm, score in zip(members, scores, strict=True):
            predictions = perplexity(arm.name, score, reference.nll) | divergence(arm.name, score)
            names = ("kld", "kld_error", "top1", "ppl", "delta", "delta_error", "packed", "clusters")
            storage = _measure_storage(model, arm, recorded)
            yield {"name": arm.name, **storage, **{name: predictions[name] for name in names}}


def _measure_storage(model: Any, arm: Arm, recorded: list[Attended]) -> Record:
    """Put recorded keys and values through the cache of each layer, and attend with the recorded queries.

    Bytes are of one token in all layers; errors are squared and relative, and with the cosine means over the layers.
    """
    full = sum((kv.keys.nbytes + kv.values.nbytes) / (kv.keys.shape[0] * kv.keys.shape[2]) for kv in recorded)
    if arm.config.is_off:
        return {"nbytes": full, "ratio": 1.0, "key_error": 0.0, "value_error": 0.0, "cosine": 1.0}
    nbytes, rows = 0.0, []
    for planned, layer in zip(plan_caches(model, arm.config).layers, recorded, strict=True):
        cache = make_cache(planned.spec)
        past = layer.keys.shape[2] - QUERIES
        earlier = cache.append(layer.keys[:, :, :past], layer.values[:, :, :past])
        earlier.attend(layer.earlier_queries, layer.scale, "causal", layer.sinks)  # keys are normalized by queries
        if not cache.packed_tokens:
            raise ConfigError(
                f"{past} tokens with sinks {planned.spec.sinks} and window {planned.spec.window} pack none. Use a "
                f"longer --length, or a smaller --kv-sinks or --kv-window.{normalization_hint(planned.spec, past)}"
            )
        nbytes += cache.packed_nbytes / (layer.keys.shape[0] * cache.packed_tokens)
        packed = slice(planned.spec.sinks, planned.spec.sinks + cache.packed_tokens)
        view = cache.append(layer.keys[:, :, past:], layer.values[:, :, past:])
        output = view.attend(layer.queries, layer.scale, layer.mask, layer.sinks)
        keys, values = (handle.materialize() for handle in cache.keys_and_values())
        errors = []
        for pair in ((keys, layer.keys), (values, layer.values)):
            stored, exact = (part[:, :, packed].astype(mx.float32) for part in pair)
            errors.append(float(mx.square(stored - exact).sum() / mx.square(exact).sum()))
        rows.append([*errors, float(_cosine(output, layer.output))])
    names = ("key_error", "value_error", "cosine")
    return {"nbytes": nbytes, "ratio": full / nbytes, **dict(zip(names, np.mean(rows, axis=0).tolist(), strict=True))}


def _cosine(output: mx.array, exact: mx.array) -> mx.array:
    output, exact = output.astype(mx.float32), exact.astype(mx.float32)
    norms = mx.linalg.norm(output, axis=-1) * mx.linalg.norm(exact, axis=-1)
    return ((output * exact).sum(axis=-1) / mx.maximum(norms, 1e-12)).mean()
