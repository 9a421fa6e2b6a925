"""What a round of eviction costs beside the prefill between two rounds, in CPU seconds, by context.

python benchmarks/evict/bench_cost.py [--contexts 4096,16384,32768] [--json FILE]

At a budget of 90 % and a trigger of 128 tokens a round comes every 1,280 tokens. The caches of the embedded model are
filled with random keys and values, under random query statistics; then one step of the prefill runs at that context,
and rounds on copies. CPU time, of all threads, does not depend on what else the machine does.
"""

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from report import write

from mlx_tq.codec.dtypes import dtype_of
from mlx_tq.config import KVConfig
from mlx_tq.models import load
from mlx_tq.policies import EvictConfig
from mlx_tq.policies.queries import QueryStats
from mlx_tq.sequence.build import build_caches
from mlx_tq.sequence.compressed import compressed, plan_caches
from mlx_tq.sequence.passes import before_pass, compressed_caches, sequence_in
from mlx_tq.sequence.plan import LayerPlan

STEP = 256
EVICT = EvictConfig("triattention:stats=text:granularity=1", "90%", "off")
ROUNDS = 3


def seconds(work: Callable[[], Any]) -> float:
    """CPU seconds of a call."""
    started = time.process_time()
    work()
    return time.process_time() - started


def filled(model: Any, length: int) -> list[Any]:
    """Caches that hold `length` random tokens, ready to evict."""
    plan = plan_caches(model, KVConfig(evict=EVICT))
    rng = np.random.default_rng(0)
    heads = model.args.num_attention_heads

    def calibrated(layer: LayerPlan) -> LayerPlan:
        dim, pairs = layer.slot.key_dim, layer.rope.pairs.shape[1]
        stats = QueryStats(mx.array(rng.standard_normal((heads, dim), np.float32)), 2 * mx.ones((heads, pairs)))
        return replace(layer, queries=stats)

    plan = replace(plan, layers=[calibrated(layer) for layer in plan.layers])
    caches = build_caches(plan)
    for layer, cache in zip(plan.layers, compressed_caches(caches), strict=True):
        slot, sequence, cache.sequence = layer.slot, cache.sequence, None  # no round comes meanwhile
        while cache.offset < length:
            shape = (1, slot.heads, min(4096, length - cache.offset), slot.key_dim)
            pair = [mx.array(rng.standard_normal(shape, np.float32)).astype(dtype_of(slot.dtype)) for _ in range(2)]
            cache.append(*pair)
            cache.settle()
            mx.eval(cache.state)
        cache.sequence = sequence
    return caches


def measure(model: Any, length: int) -> dict[str, Any]:
    """One context."""
    caches = filled(model, length)
    rounds = []
    for _ in range(ROUNDS):
        twins = copy.deepcopy(caches)
        rounds.append(seconds(lambda twins=twins: before_pass(twins, 1)))
        sequence = sequence_in(twins)
        assert sequence is not None
        gone = sequence.stats
        assert gone.rounds == 1
    ids = mx.array([[i * 7919 % 3000 for i in range(STEP)]])
    with compressed(model):
        before_pass(caches, 1)
        step = seconds(lambda: mx.eval(model(ids, cache=caches)))
    every = EVICT.policy.trigger / (1 - 0.9)
    round_cost = statistics.median(rounds)
    return {
        "context": length,
        "evicted": gone.tokens,
        "step_seconds": step,
        "round_seconds": round_cost,
        "round_spread": max(rounds) - min(rounds),
        "percent": 100 * round_cost / (step * every / STEP),
    }


def main() -> None:
    """Measure every context."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--contexts", default="4096,16384,32768")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    model, _ = load()
    model.args.max_position_embeddings = 1 << 20
    rows = []
    for length in map(int, args.contexts.split(",")):
        rows.append(measure(model, length))
        print(rows[-1], flush=True)
        write(args.json, f"python benchmarks/evict/bench_cost.py --contexts {args.contexts}", rows)


if __name__ == "__main__":
    main()
