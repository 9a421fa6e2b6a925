"""A round of eviction, a search of an archive, and the thresholds."""

import copy
import time
from functools import partial
from typing import Any

import mlx.core as mx

from benchmarks.evict.bench_cost import POLICY, filled
from benchmarks.gpu.models import make_model
from benchmarks.gpu.setting import Cells, Setting
from benchmarks.kernels.cases import make_cases
from mlx_tq.bench.tuning import tune
from mlx_tq.cache.spec import CacheSpec
from mlx_tq.config import BLOCK, KVConfig
from mlx_tq.kernels.attend import attend
from mlx_tq.kernels.by_head import attend_by_head
from mlx_tq.kernels.encode import encode
from mlx_tq.kernels.recall_score import group_queries, recall_score
from mlx_tq.kernels.regions import HeadRows, Regions
from mlx_tq.kernels.thresholds import to_rows
from mlx_tq.prompt_cache.layer_group import begin_pass, compressed_caches, layer_group_of

EVICT_TOKENS, EVICT_LAYERS = 16384, 2
KERNEL_TOKENS, CALLS = 32768, 20
RETRIEVAL_HEADS, STREAMING_SHARE = 3, 0.04  # of eight heads, and of the rows of each other one
ARCHIVED, HEADS, GROUP, DIM, QUESTION = 1 << 20, 8, 4, 128, 32
TUNE_TOKENS, TUNE_SECONDS = [4096, 32768], 60
DRY_TOKENS = 1024


def eviction_cells(setting: Setting) -> Cells:
    yield f"round of {POLICY}", lambda: measure_eviction(setting)
    yield "recall search", lambda: measure_search(setting)
    yield "kernels", lambda: measure_kernels(setting)
    for name, retrieval_heads in (("all rows", HEADS), ("40 % of the rows, by head", RETRIEVAL_HEADS)):
        yield f"attention to {name}", partial(measure_heads, setting, retrieval_heads)


def tune_cells(setting: Setting) -> Cells:
    yield "thresholds", lambda: measure_thresholds(setting)


def measure_eviction(setting: Setting) -> dict[str, Any]:
    """Return the seconds of a round in which all layers together evict a tenth of the tokens."""
    tokens = 4 * DRY_TOKENS if setting.dry else EVICT_TOKENS
    shaped = make_model("Qwen3-8B", setting, tokens, EVICT_LAYERS)
    if shaped is None:
        return {"skipped": "does not fit in memory"}
    caches, seconds, evicted = filled(shaped.model, tokens, POLICY), [], 0
    for _ in range(setting.rounds + 1):
        twins = copy.deepcopy(caches)
        mx.synchronize()
        started = time.perf_counter()
        begin_pass(twins, 1)
        mx.eval([cache.state for cache in compressed_caches(twins)])
        seconds.append(time.perf_counter() - started)
        group = layer_group_of(twins)
        evicted = 0 if group is None else group.stats.tokens
    return {"tokens": tokens, "layers": shaped.layers, "evicted": evicted, "seconds": seconds[1:]}


def measure_search(setting: Setting) -> dict[str, Any]:
    """Return the seconds in which one layer scores all archived tokens for a question."""
    tokens = DRY_TOKENS if setting.dry else ARCHIVED
    layout = CacheSpec.for_layer(KVConfig(), 0, "q8", "tq4").layout(DIM, DIM, mx.float16)
    pair = (mx.random.normal((1, HEADS, DRY_TOKENS, DIM)).astype(mx.float16) for _ in range(2))
    keys = layout.keys(mx.tile(encode(*pair, layout).rows, (1, 1, tokens // DRY_TOKENS, 1)))
    queries = mx.random.normal((1, HEADS * GROUP, QUESTION, DIM)) * DIM**-0.5
    grouped = group_queries(queries, HEADS, layout, None)
    mx.eval(*keys, grouped)
    seconds = []
    for _ in range(setting.rounds + 1):
        started = time.perf_counter()
        mx.eval(*recall_score(grouped, keys, layout, None, [BLOCK] * (tokens // BLOCK)))
        seconds.append(time.perf_counter() - started)
    return {"tokens": tokens, "queries": GROUP * QUESTION, "kv_heads": HEADS, "seconds": seconds[1:]}


def measure_kernels(setting: Setting) -> dict[str, Any]:
    """Return the seconds of each kernel if many calls run at once, which is not so in a decode step."""
    rows = []
    for case in make_cases(*((BLOCK, 1) if setting.dry else (KERNEL_TOKENS, HEADS))):
        seconds = []
        for _ in range(setting.rounds + 1):
            results = [case.call() for _ in range(1 if setting.dry else CALLS)]
            started = time.perf_counter()
            mx.eval(results)
            seconds.append((time.perf_counter() - started) / CALLS)
        rows.append({"kernel": case.kernel, "nbytes": case.nbytes, "seconds": seconds[1:]})
    return {"rows": rows}


def measure_heads(setting: Setting, retrieval_heads: int) -> dict[str, Any]:
    """Return the seconds of a layer's attention for one query, where some heads keep all rows and the others a few.

    They do not include building the call in Python, which overlaps with the step before in a model.
    """
    tokens = DRY_TOKENS if setting.dry else KERNEL_TOKENS
    layout = CacheSpec.for_layer(KVConfig(), 0, "q8", "tq4").layout(DIM, DIM, mx.float16)
    keys, values = (mx.random.normal((1, HEADS, DRY_TOKENS, DIM)).astype(mx.float16) for _ in range(2))
    rows = mx.tile(encode(keys, values, layout).rows, (1, 1, tokens // DRY_TOKENS, 1))
    regions = Regions(rows, tokens, layout, keys[:, :, :BLOCK], values[:, :, :BLOCK], 0, BLOCK)
    if retrieval_heads < HEADS:
        few, heads = int(STREAMING_SHARE * tokens), tuple(range(HEADS))
        kinds = ((heads[:retrieval_heads], tokens), (heads[retrieval_heads:], few))
        groups = [
            HeadRows(each, mx.contiguous(rows[:, each[0] : each[-1] + 1, :count]), count) for each, count in kinds
        ]
        regions = regions.with_groups(groups)
    attend_rows = attend_by_head if regions.groups else attend
    mx.eval(rows, [group.rows for group in regions.groups])
    seconds: list[float] = []
    build: list[float] = []
    for _ in range(setting.rounds + 1):
        queries = mx.random.normal((1, HEADS * GROUP, 1, DIM)).astype(mx.float16)
        mx.eval(queries)
        started = time.perf_counter()
        for _ in range(CALLS):
            queries = attend_rows(queries, regions, scale=DIM**-0.5)
        built = time.perf_counter()
        mx.eval(queries)
        seconds.append((time.perf_counter() - built) / CALLS)
        build.append((built - started) / CALLS)
    measured = {"seconds": seconds[1:], "build": build[1:]}
    return {"tokens": tokens, "retrieval_heads": retrieval_heads, "heads": HEADS} | measured


def measure_thresholds(setting: Setting) -> dict[str, Any]:
    """Return the thresholds that are best here; `mlx_tq.bench --tune` would save them."""
    started, steps, complete = time.perf_counter(), [], True
    for step in tune([DRY_TOKENS] if setting.dry else TUNE_TOKENS, setting.rounds):
        steps.append(step)
        if time.perf_counter() - started > (1 if setting.dry else TUNE_SECONDS):
            complete = False
            break
    best = to_rows({step.shape: step.best for step in steps})
    return {"steps": [step[:4] for step in steps], "best": best, "complete": complete}
