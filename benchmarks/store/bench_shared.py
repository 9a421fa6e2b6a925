"""Measure the memory of 1, 5 and 20 requests that share 4,000 tokens and continue with 40 of their own.

    python -m benchmarks.store.bench_shared

The caches are those of the embedded model with random keys and values in float16: once copies of one cache, which share
its rows, and once with their own rows. Memory is what mlx holds beyond that before, after a batched step.
"""

import argparse
import gc
import json

import mlx.core as mx

from benchmarks.reports import save
from mlx_tq.cache.batch import BatchCompressedKVCache
from mlx_tq.config import KVConfig
from mlx_tq.models import load
from mlx_tq.prompt_cache.build import build_caches
from mlx_tq.prompt_cache.compressed import compressed_attention, plan_caches

COUNTS, BEGINNING, OWN = (1, 5, 20), 4000, 40


def vectors(slot, rows, count):
    shape = (rows, slot.heads, count)
    return [mx.random.normal((*shape, dim)).astype(mx.float16) for dim in (slot.key_dim, slot.value_dim)]


def begun(plan):
    caches = build_caches(plan)
    for cache, layer in zip(caches, plan.layers, strict=True):
        for start in range(0, BEGINNING, 500):
            cache.append(*vectors(layer.slot, 1, min(500, BEGINNING - start)))
            cache.stop_learning()
        mx.eval(cache.state)
    return caches


def step(batches, plan, count):
    outs = []
    for batch, layer in zip(batches, plan.layers, strict=True):
        key, _ = batch.update_and_fetch(*vectors(layer.slot, count, 1))
        queries = mx.random.normal((count, 2 * layer.slot.heads, 1, layer.slot.key_dim)).astype(mx.float16)
        outs.append(key.view.attend(queries, layer.slot.key_dim**-0.5, None, None))
    mx.eval(outs, [batch.state for batch in batches])


def measure(plan, count, *, shared):
    gc.collect()
    mx.clear_cache()
    before = mx.get_active_memory()
    first = begun(plan)
    batches = []
    for cache in first:
        rows = [cache if shared else type(cache).from_state(cache.state) for _ in range(count)]
        if not shared:  # of a state the rows are views; rows of one's own are a copy
            for row in rows:
                row.replace_packed(row.packed_rows()[0] + 0, row.packed_positions)
        batches.append(BatchCompressedKVCache.merge(rows))
    del first, rows, cache
    for batch, layer in zip(batches, plan.layers, strict=True):
        batch.update_and_fetch(*vectors(layer.slot, count, OWN))
        mx.eval(batch.state)
    step(batches, plan, count)
    gc.collect()
    mx.clear_cache()
    nbytes = sum(batch.nbytes for batch in batches)
    return {"held": mx.get_active_memory() - before, "nbytes": nbytes}


def main():
    argparse.ArgumentParser(description=__doc__).parse_args()  # --help alone; it has no flags
    model, _ = load()
    plan = plan_caches(model, KVConfig.from_profile("balanced"))
    figures = []
    with compressed_attention(model):
        for count in COUNTS:
            arms = {name: measure(plan, count, shared=name == "shared") for name in ("own", "shared")}
            figures.append({"requests": count, **arms})
            print(json.dumps(figures[-1]), flush=True)
    command = "python -m benchmarks.store.bench_shared"
    save("store_shared.json", command, beginning=BEGINNING, own=OWN, figures=figures)


if __name__ == "__main__":
    main()
