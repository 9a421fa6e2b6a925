"""Measure what a search of the archive costs, compared with the decode steps between two searches.

    python -m benchmarks.recall.bench_look --models smollm2 --archived 10000,100000

Layers of the model's shape hold random keys and values, all but the budget evicted. The queries are those of a question
of 32 or 64 tokens in all layers that search, or the latest 64 in as many layers as decide a question of the grid.
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any
from unittest import mock

import mlx.core as mx
import numpy as np

from benchmarks.reports import ALL_NAMES, GEMMA, named_model, save
from mlx_tq import compressed_attention, make_prompt_cache
from mlx_tq.config import EvictConfig, KVConfig
from mlx_tq.prompt_cache.archive import ArchivedBlock
from mlx_tq.prompt_cache.compressed import plan_caches
from mlx_tq.prompt_cache.layer_group import begin_pass, evicting_layers, layer_group_of
from mlx_tq.prompt_cache.plan import Plan
from mlx_tq.prompt_cache.recall import search_layers

LIVE, STEP, ROUNDS = 512, 512, 5
DECIDING = {"embedded": 1, "smollm2": 5, GEMMA: 2}  # layers that decide a question of bench_grid, on average
STEPS = EvictConfig().recall_every  # between two looks, whose queries the second asks with
QUESTION = 32


def filled(model: Any, plan: Plan, archived: int, live: int = LIVE) -> list[Any]:
    """Return caches from which so many tokens were evicted; random keys, so that no model has to read them."""
    config = KVConfig(
        key=plan.config.key, value=plan.config.value, evict=EvictConfig("recency:trigger=256", live, "auto")
    )
    caches = make_prompt_cache(model, config)
    slots = [planned.slot for planned in plan.layers]
    sequence = layer_group_of(caches)
    assert sequence is not None
    sequence.plan = replace(sequence.plan, positions=None)  # no model reads these
    for start in range(0, archived + live, STEP):
        begin_pass(caches, STEP)
        for slot, cache in zip(slots, evicting_layers(caches), strict=True):
            shape = (1, slot.heads, STEP, slot.key_dim)
            pair = [mx.random.normal(shape, key=mx.random.key(2 * start + each)) for each in (0, 1)]
            view = cache.append(*pair)
            if start == 0:
                view.attend(pair[0], 0.1, "causal", None)
            mx.eval(cache.state)
    begin_pass(caches, 1)  # what the last step brought is no more than its budget leaves, as in the steps beside it
    return caches


def look(caches: list[Any], plan: Plan, heads: int, numbers: Sequence[int], asked: int) -> tuple[float, int]:
    """Return the seconds of a search by the latest `asked` queries of these layers, and the bytes of keys read."""
    sequence, layers = layer_group_of(caches), evicting_layers(caches)
    assert sequence is not None
    assert sequence.archive is not None
    sequence.archive.settle()
    sequence.capture_queries(numbers, rounds=True)
    for number in numbers:
        queries = mx.random.normal((1, heads, asked, plan.layers[number].slot.key_dim))
        mx.eval(queries)
        sequence.listeners(number, 0, 0)[0].notify(queries, 0.125)
    most, keys, nbytes = sequence.plan.max_recalled(layers[0].offset), sequence.archive.read_keys, 0

    def counted(blocks: Sequence[ArchivedBlock], number: int) -> tuple[np.ndarray, np.ndarray]:
        nonlocal nbytes
        found = keys(blocks, number)
        nbytes += sum(each.nbytes for each in found)
        return found

    with mock.patch.object(sequence.archive, "read_keys", counted):
        began = time.perf_counter()
        sequence.search_archive(layers, asked, most)
        return time.perf_counter() - began, nbytes


def just_read(model: Any, config: KVConfig) -> list[Any]:
    caches = make_prompt_cache(model, config)
    with compressed_attention(model):
        mx.eval(model(mx.arange(LIVE)[None], cache=caches))
    return caches


def steps(model: Any, caches: list[Any]) -> float:
    with compressed_attention(model):
        token = mx.array([[5]])
        mx.eval(model(token, cache=caches))
        began = time.perf_counter()
        for _ in range(STEPS):
            mx.eval(model(token, cache=caches))
        return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="embedded,smollm2", help="of the three, joined by commas")
    parser.add_argument("--archived", default="10000,100000", help="tokens in the archive")
    args = parser.parse_args()
    rows, config = [], KVConfig()
    for name, archived in product(args.models.split(","), map(int, args.archived.split(","))):
        model, _ = named_model(name)
        plan, heads = plan_caches(model, config), model.args.num_attention_heads
        caches = filled(model, plan, archived)
        every = search_layers(len(plan.layers))
        answering = every[: DECIDING[name]]
        sets = {("question", QUESTION): every, ("question", STEPS): every, ("answer", STEPS): answering}
        taken: dict[tuple[str, int], list[float]] = {each: [] for each in sets}
        nbytes, between = {}, []
        for _ in range(ROUNDS):
            for (when, asked), numbers in sets.items():
                seconds, nbytes[when, asked] = look(caches, plan, heads, numbers, asked)
                taken[when, asked].append(seconds)
            between.append(steps(model, just_read(model, config)))
        for (when, asked), numbers in sets.items():
            seconds = float(np.median(taken[when, asked]))
            row = {
                "model": ALL_NAMES[name],
                "when": when,
                "asked": asked,
                "layers": len(plan.layers),
                "looking": len(numbers),
                "archived": archived,
                "look_ms": 1000 * seconds,
                "nbytes": nbytes[when, asked],
                "steps_ms": 1000 * float(np.median(between)),
                "share": seconds / float(np.median(between)),
            }
            print(row)
            rows.append(row)
    command = f"python -m benchmarks.recall.bench_look --models {args.models} --archived {args.archived}"
    save("recall_look.json", command, rows=rows)


if __name__ == "__main__":
    main()
