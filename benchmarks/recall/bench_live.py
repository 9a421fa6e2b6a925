"""Measure what the sum of all live attention weights costs a search while decoding, compared with 64 steps.

    python -m benchmarks.recall.bench_live --models embedded,smollm2

The sum is computed anew, because a question is prefilled by mlx's own attention, which does not return it.
"""

import time
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np

from benchmarks.recall.bench_look import DECIDING, ROUNDS, STEPS, filled, steps
from benchmarks.reports import NAMES, named_model, survey_models
from mlx_tq.config import KVConfig
from mlx_tq.prompt_cache.compressed import plan_caches
from mlx_tq.prompt_cache.layer_group import evicting_layers
from mlx_tq.prompt_cache.recall import QueryBuffer, search_layers

LIVE = (512, 4096, 7500)  # tokens that the steps attend to


def sums(caches: list[Any], heads: int, numbers: range) -> float:
    asking = []
    for layer in (evicting_layers(caches)[number] for number in numbers):
        listener, dim = QueryBuffer(), layer.keys_and_values()[0].shape[-1]
        queries = mx.random.normal((1, heads, STEPS, dim))
        mx.eval(queries)
        listener.append(queries, 0.125)
        asking.append((listener, layer))
    began = time.perf_counter()
    for listener, layer in asking:
        listener.last(layer, STEPS)
    return time.perf_counter() - began


def rows(name: str) -> Iterator[dict[str, Any]]:
    model, _ = named_model(name)
    plan, heads = plan_caches(model, KVConfig()), model.args.num_attention_heads
    numbers = search_layers(len(plan.layers))[: DECIDING[name]]
    for live in LIVE:
        caches = filled(model, plan, 0, live)
        taken = [(sums(caches, heads, numbers), steps(model, caches)) for _ in range(ROUNDS)]
        summing, stepping = (1000 * float(np.median(each)) for each in zip(*taken, strict=True))
        found = {"model": NAMES[name], "live": live, "layers": len(plan.layers), "looking": len(numbers)}
        yield found | {"sums_ms": summing, "steps_ms": stepping, "share": summing / stepping}


if __name__ == "__main__":
    survey_models(__doc__, "benchmarks.recall.bench_live", "recall_live.json", rows, NAMES)
