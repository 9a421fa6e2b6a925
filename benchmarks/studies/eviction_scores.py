"""Score the fp16 rows of caches that evicted nothing: policies, variants of TriAttention, and oracles."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_tq.cache.layer import CompressedKVCache
from mlx_tq.kernels.score import score
from mlx_tq.policies import CalibratedPolicy, PackedLayer, PackedTokens
from mlx_tq.policies.calibration import Calibrator, QueryStats
from mlx_tq.policies.triattention import query_spread, virtual_query
from mlx_tq.prompt_cache.layer_group import layer_group_of

Queries = list[mx.array]  # of each layer, before RoPE, [Hq, L, D]


class Recorder:
    """Replaces a cache's calibrator: keeps every query, as it was before RoPE."""

    is_gathering = ready = True
    stats = None

    def __init__(self, calibrator: Calibrator) -> None:
        self.rope = calibrator.rope
        self.parts: list[mx.array] = []

    def due(self, stop: int) -> bool:
        return True

    def observe(self, queries: mx.array, start: int, module: Any) -> list[mx.array]:
        self.parts.append(queries[0].astype(mx.float32))
        return [self.parts[-1]]

    def copy(self) -> "Recorder":
        return Recorder(self)  # type: ignore[arg-type]

    @property
    def queries(self) -> mx.array:
        return mx.concatenate(self.parts, axis=1)


def record(caches: list[CompressedKVCache]) -> None:
    found = calibrators(caches)
    for number, calibrator in found.items():
        found[number] = Recorder(calibrator)  # type: ignore[assignment]


def recorded(caches: list[CompressedKVCache]) -> Queries:
    return [recorder.queries for recorder in calibrators(caches).values()]  # type: ignore[attr-defined]


def calibrators(caches: list[CompressedKVCache]) -> dict[int, Calibrator]:
    sequence = layer_group_of(caches)
    assert sequence is not None
    return sequence.calibrators


def statistics(caches: list[CompressedKVCache], queries: Queries, policy: CalibratedPolicy) -> list[QueryStats]:
    found = []
    for calibrator, each in zip(calibrators(caches).values(), queries, strict=True):
        assert calibrator.rope is not None
        parts = [each.mean(axis=1), calibrator.rope.pair_norms(each).mean(axis=1)]
        if policy.needs_covariance:
            parts.append(each.swapaxes(-1, -2) @ each / each.shape[1])
        found.append(QueryStats(*parts))
    return found


def layers_of(caches: list[CompressedKVCache], stats: Sequence[QueryStats]) -> list[PackedLayer]:
    own = calibrators(caches)
    return [
        PackedLayer(*cache.packed_rows(), own[cache.number].rope, each)
        for cache, each in zip(caches, stats, strict=True)
    ]


def by_policy(caches: list[CompressedKVCache], stats: Sequence[QueryStats], policy: CalibratedPolicy) -> np.ndarray:
    positions = caches[0].packed_positions
    return policy.score(PackedTokens(layers_of(caches, stats), positions, caches[0].offset, 0))


def by_head(
    caches: list[CompressedKVCache], stats: Sequence[QueryStats], *, trig: float = 1.0, norm: float = 1.0
) -> np.ndarray:
    """Return scores of TriAttention before aggregation, [layers, Hq, S], with weights on its two terms."""
    tokens, last = len(caches[0].packed_positions), caches[0].offset - 1
    found = []
    for layer in layers_of(caches, stats):
        assert layer.rope is not None
        assert layer.queries is not None
        heads = layer.rows.shape[1]
        terms = (
            trig * virtual_query(layer.rope, layer.queries.center, last),
            norm * query_spread(layer.rope, layer.queries),
        )
        query, weights = (x.reshape(heads, -1, x.shape[1]) for x in terms)
        scores = score(layer.rows, tokens, layer.layout, query, weights, layer.rope.pairs)[0]
        found.append(np.array(scores).reshape(-1, tokens))
    return np.stack(found)


def attention_of(caches: list[CompressedKVCache], queries: Queries, start: int) -> np.ndarray:
    """Return the attention weights of queries at positions from `start` to packed rows: [layers, Hq, L, S]."""
    sinks, found = caches[0].spec.sinks, []
    tokens = len(caches[0].packed_positions)
    own = calibrators(caches)
    for cache, each in zip(caches, queries, strict=True):
        turned = own[cache.number].rope.module(each[None], offset=start)[0]  # type: ignore[union-attr]
        keys = cache.keys_and_values()[0].materialize()[0].astype(mx.float32)  # [H, T, D]
        keys = mx.repeat(keys, turned.shape[0] // keys.shape[0], axis=0)
        logits = turned @ keys.swapaxes(-1, -2) / each.shape[-1] ** 0.5
        rows, columns = np.arange(start, start + each.shape[1])[:, None], np.arange(keys.shape[1])[None]
        weights = mx.softmax(mx.where(mx.array(columns <= rows), logits, -mx.inf), axis=-1)
        found.append(np.array(weights[..., sinks : sinks + tokens]))
    return np.stack(found)


def standardized(scores: np.ndarray) -> np.ndarray:
    return (scores - scores.mean(axis=-1, keepdims=True)) / np.maximum(scores.std(axis=-1, keepdims=True), 1e-12)


def as_paper(scores: np.ndarray, heads: int) -> np.ndarray:
    """Return [S]: the maximum over the query heads of a KV head, then the mean over `heads` KV heads and layers."""
    layers, _, tokens = scores.shape
    found: np.ndarray = standardized(scores).reshape(layers, heads, -1, tokens).max(axis=2).mean(axis=(0, 1))
    return found


def as_maximum(scores: np.ndarray) -> np.ndarray:
    found: np.ndarray = standardized(scores).max(axis=(0, 1))
    return found
