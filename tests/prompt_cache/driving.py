"""What tests of sequences share: a small model whose caches evict, and what of them can be compared."""

import mlx.core as mx
import numpy as np
from zoo import build

from mlx_tq.cache.batch import BatchCompressedKVCache
from mlx_tq.config import EvictConfig, KVConfig
from mlx_tq.prompt_cache.compressed import make_prompt_cache
from mlx_tq.prompt_cache.passes import sequence_in

MODEL = build("llama")
TOKENS = np.random.default_rng(5).integers(0, 160, 400).tolist()
# The second calibrates on queries; its warm-up ends in the middle of what the tests read.
POLICIES = [f"{each}:trigger=8:granularity=1" for each in ("knorm", "triattention:warmup=64")]


def config(policy=POLICIES[0], budget=60, **changes):
    """Plain keys unless they are asked to be normalized, which needs longer texts before something is packed."""
    evict = None if policy is None else EvictConfig(policy, budget, "off")
    plain = {"key": "q8", "value": "tq4", "sinks": 4, "window": 24, "normalize": False}
    return KVConfig(**{**plain, "evict": evict, **changes})


def fresh(policy=POLICIES[0], **changes):
    return make_prompt_cache(MODEL, config(policy, **changes))


def read(caches, start, stop, step=20, row=None):
    """The logits of TOKENS[start:stop], `step` at a time; in a batch each row of `row` reads from its own shift on."""
    logits = []
    for first in range(start, stop, step):
        ids = [TOKENS[shift:][first : min(first + step, stop)] for shift in row or [0]]
        logits.append(MODEL(mx.array(ids), cache=caches))
        mx.eval(logits)
    return mx.concatenate(logits, axis=1)


def merged(*rows):
    return [BatchCompressedKVCache.merge(list(layers)) for layers in zip(*rows, strict=True)]


def extracted(batch, row):
    return [layer.extract(row) for layer in batch]


def live(caches):
    """The positions that all layers hold."""
    (positions,) = {tuple(cache.positions.tolist()) for cache in caches}
    return list(positions)


def rounds(caches):
    return sequence_in(caches).stats.rounds
