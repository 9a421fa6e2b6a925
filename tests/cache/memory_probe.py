"""Run in a fresh process: memory of a few compressed layers as their context grows. Prints one JSON object.

Arguments: layers, key format, value format, queries of a chunk that attend, lengths at which to measure.
"""

import json
import sys

import mlx.core as mx

from mlx_tq.cache import CompressedKVCache
from mlx_tq.cache.spec import CacheSpec
from mlx_tq.config import KVConfig

HEADS, QUERY_HEADS, DIM, CHUNK = 1, 2, 128, 512
STEPS = 40  # of one token, before each measure: some block is packed among them


def forward(caches, chunk, queries):
    """What a model does with its caches, layer by layer in one graph; each layer needs the output of the one before."""
    out = mx.array(0.0)
    for cache in caches:
        keys, values, q = (mx.random.normal((1, heads, chunk, DIM)) for heads in (HEADS, HEADS, QUERY_HEADS))
        view = cache.append(keys + out.mean(), values)
        out = view.attend(q[:, :, -queries:], DIM**-0.5, "causal" if chunk > 1 else None, None)
    mx.eval(out, [cache.state for cache in caches])


def main(layers, key, value, queries, lengths):
    config = KVConfig(key=key, value=value)
    caches = [CompressedKVCache(CacheSpec.for_layer(config, i, key, value)) for i in range(layers)]
    seen = []
    for length in lengths:
        while caches[0].offset < length - STEPS:
            mx.clear_cache()
            mx.reset_peak_memory()
            forward(caches, min(CHUNK, length - STEPS - caches[0].offset), queries)
            peak = mx.get_peak_memory() - mx.get_active_memory()
        for _ in range(STEPS):
            forward(caches, 1, 1)
        mx.clear_cache()
        active, declared = mx.get_active_memory(), sum(cache.nbytes for cache in caches)
        seen.append({"active": active, "declared": declared, "peak": peak})
    print(json.dumps(seen))


if __name__ == "__main__":
    layers, key, value, queries, *lengths = sys.argv[1:]
    main(int(layers), key, value, int(queries), [int(length) for length in lengths])
