"""Time decode attention of one layer on compressed caches, mx.fast and mlx-lm's quantized cache, in one run.

The caches take turns, several rounds, and each call waits for the previous one (its output is the next query), so that
the fixed cost of a launch is not what is measured. Ratios within a run hold on any machine; milliseconds do not.
"""

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.models.base import scaled_dot_product_attention as native_attention
from mlx_lm.models.cache import KVCache, QuantizedKVCache

from mlx_tq.cache.layer import CompressedKVCache
from mlx_tq.cache.spec import CacheSpec
from mlx_tq.codec.formats.base import dtype_of
from mlx_tq.config import KVConfig
from mlx_tq.integration.patches import patch_attention, scaled_dot_product_attention

_CHUNK = 2048  # tokens appended at a time while a cache is filled
_TARGET = 0.1  # seconds of chained calls in one measurement

Cache = Any  # mlx-lm's KVCache or QuantizedKVCache, or our CompressedKVCache


class LayerShape(NamedTuple):
    query_heads: int
    kv_heads: int
    head_dim: int


class Timing(NamedTuple):
    arm: str  # "off" (mx.fast on the model's dtype), "kv-bits 8", "kv-bits 4", or another profile
    dtype: str
    tokens: int
    nbytes: int  # of the cache
    median: float  # seconds of a call; low and high are the extremes of the rounds
    low: float
    high: float


def _attend(cache: Cache, scale: float, queries: mx.array) -> mx.array:
    run = scaled_dot_product_attention if isinstance(cache, CompressedKVCache) else native_attention
    keys, values = cache.keys_and_values()
    out: mx.array = run(queries, keys, values, cache=cache, scale=scale, mask=None)
    return out


def _time(call: Callable[[mx.array], mx.array], queries: mx.array, repeats: int) -> float:
    started = time.perf_counter()
    for _ in range(repeats):
        queries = call(queries)
    mx.eval(queries)
    return (time.perf_counter() - started) / repeats


def measure_layer(
    shape: LayerShape, tokens: int, dtype: str, profiles: dict[str, KVConfig], rounds: int
) -> list[Timing]:
    mx.random.seed(0)
    caches: dict[str, Cache] = {"off": KVCache()}
    caches |= {f"kv-bits {bits}": QuantizedKVCache(bits=bits) for bits in (8, 4)}
    for name, config in profiles.items():
        caches[name] = CompressedKVCache(CacheSpec.for_layer(config, 0, *config.formats_of(0, 1)))
    calls, sizes = {}, {}
    for name, cache in caches.items():
        for start in range(0, tokens, _CHUNK):
            rows = (1, shape.kv_heads, min(_CHUNK, tokens - start), shape.head_dim)
            with patch_attention():
                cache.update_and_fetch(*(mx.random.normal(rows).astype(dtype_of(dtype)) for _ in range(2)))
            if isinstance(cache, CompressedKVCache):
                cache.stop_learning()
            mx.eval(cache.state)
        calls[name], sizes[name] = partial(_attend, cache, shape.head_dim**-0.5), cache.nbytes
    queries = mx.random.normal((1, shape.query_heads, 1, shape.head_dim)).astype(dtype_of(dtype))
    mx.eval(queries)
    repeats = {name: max(1, int(_TARGET / max(_time(call, queries, 1), 1e-9))) for name, call in calls.items()}
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            seconds[name].append(_time(call, queries, repeats[name]))
    return [
        Timing(name, dtype, tokens, sizes[name], statistics.median(s), min(s), max(s)) for name, s in seconds.items()
    ]
