"""Measure what an eviction round costs compared with the prefill between two rounds, in CPU seconds, by context.

    OMP_NUM_THREADS=1 python -m benchmarks.evict.bench_cost --models embedded,smollm2,gemma-3-270m.gguf

At a budget of 90 % and a trigger of 128 tokens a round comes every 1,280 tokens. Caches hold random keys and values;
rounds and one prefill step run on copies. CPU time does not depend on other load, but counts threads of a BLAS that
wait for each other, so it gets one thread.
"""

import copy
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np

from benchmarks.reports import ALL_NAMES, named_model, survey_models
from mlx_tq.codec.formats.base import dtype_of
from mlx_tq.config import EvictConfig, KVConfig
from mlx_tq.policies.calibration import QueryStats
from mlx_tq.prompt_cache.build import build_caches
from mlx_tq.prompt_cache.compressed import compressed_attention, plan_caches
from mlx_tq.prompt_cache.layer_group import begin_pass, compressed_caches, layer_group_of
from mlx_tq.prompt_cache.plan import LayerPlan

STEP = 256
POLICY = "triattention"
ROUNDS = 5
CONTEXTS = (4096, 8192, 16384, 32768)


def seconds(work: Callable[[], Any]) -> float:
    started = time.process_time()
    work()
    return time.process_time() - started


def evicting(policy: str) -> EvictConfig:
    return EvictConfig(f"{policy}:calibration=text", "90%", "off")


def filled(model: Any, length: int, policy: str) -> list[Any]:
    """Return caches of `length` random tokens, ready to evict; those of sliding layers hold their window."""
    plan = plan_caches(model, KVConfig(evict=evicting(policy)))
    rng = np.random.default_rng(0)

    def calibrated(layer: LayerPlan) -> LayerPlan:
        dim, pairs, heads = layer.slot.key_dim, layer.rope.pairs.shape[1], model.args.num_attention_heads
        center = mx.array(rng.standard_normal((heads, dim), np.float32))
        stats = QueryStats(center, 2 * mx.ones((heads, pairs)), center[:, None] * center[..., None])
        return replace(layer, queries=stats)

    plan = replace(plan, layers=[calibrated(layer) for layer in plan.layers])
    plan = replace(plan, eviction=plan.eviction and replace(plan.eviction, positions=None))
    caches = build_caches(plan)
    compressed_ones = compressed_caches(caches)
    for layer, cache in zip(plan.layers, compressed_ones, strict=True):
        group, cache.group = cache.group, None  # no round comes meanwhile
        fill(cache.append, cache, layer.slot, length, 4096, rng)
        cache.stop_learning()
        mx.eval(cache.state)
        cache.group = group
    for cache in caches:
        if cache not in compressed_ones:
            fill(cache.update_and_fetch, cache, plan.layers[0].slot, length, STEP, rng)
    return caches


def fill(
    append: Callable[[mx.array, mx.array], Any], cache: Any, slot: Any, length: int, most: int, rng: np.random.Generator
) -> None:
    while cache.offset < length:
        shape = (1, slot.heads, min(most, length - cache.offset), slot.key_dim)
        pair = [mx.array(rng.standard_normal(shape, np.float32)).astype(dtype_of(slot.dtype)) for _ in range(2)]
        append(*pair)
        mx.eval(cache.state)


def measure(model: Any, length: int, policy: str = POLICY) -> dict[str, Any]:
    caches = filled(model, length, policy)
    rounds = []
    for _ in range(ROUNDS):
        twins = copy.deepcopy(caches)
        rounds.append(seconds(lambda twins=twins: begin_pass(twins, 1)))
        sequence = layer_group_of(twins)
        assert sequence is not None
        gone = sequence.stats
        assert gone.rounds == 1
    ids = mx.array([[i * 7919 % 3000 for i in range(STEP)]])
    steps = []
    with compressed_attention(model):
        begin_pass(caches, 1)
        for _ in range(ROUNDS):
            twins = copy.deepcopy(caches)
            steps.append(seconds(lambda twins=twins: mx.eval(model(ids, cache=twins))))
    every = evicting(policy).policy.trigger / (1 - 0.9)
    round_cost, step = statistics.median(rounds), statistics.median(steps)
    return {
        "context": length,
        "evicted": gone.tokens,
        "step_seconds": step,
        "round_seconds": round_cost,
        "round_spread": max(rounds) - min(rounds),
        "percent": 100 * round_cost / (step * every / STEP),
    }


def costs(name: str) -> Iterator[dict[str, Any]]:
    model, _ = named_model(name)
    for length in CONTEXTS:
        yield {"model": ALL_NAMES[name], **measure(model, length)}


if __name__ == "__main__":
    survey_models(__doc__, "benchmarks.evict.bench_cost", "evict_cost.json", costs)
