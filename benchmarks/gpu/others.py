"""A round of eviction, a search of an archive, and the thresholds."""

import copy
import time
from typing import Any

import mlx.core as mx

from benchmarks.evict.bench_cost import POLICY, filled
from benchmarks.gpu.models import make_model
from benchmarks.gpu.setting import Cells, Setting
from benchmarks.kernels.cases import make_cases
from mlx_tq.bench.tuning import tune
from mlx_tq.cache.spec import CacheSpec
from mlx_tq.config import BLOCK, KVConfig
from mlx_tq.kernels.encode import encode
from mlx_tq.kernels.recall_score import group_queries, recall_score
from mlx_tq.kernels.thresholds import to_rows
from mlx_tq.prompt_cache.layer_group import begin_pass, compressed_caches, layer_group_of

EVICT_TOKENS, EVICT_LAYERS = 16384, 2
KERNEL_TOKENS, CALLS = 32768, 20
ARCHIVED, HEADS, GROUP, DIM, QUESTION = 1 << 20, 8, 4, 128, 32
TUNE_TOKENS, TUNE_SECONDS = [4096, 32768], 60
DRY_TOKENS = 1024


def eviction_cells(setting: Setting) -> Cells:
    yield f"round of {POLICY}", lambda: measure_eviction(setting)
    yield "recall search", lambda: measure_search(setting)
    yield "kernels", lambda: measure_kernels(setting)


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
            started = time.perf_counter()
            mx.eval([case.call() for _ in range(1 if setting.dry else CALLS)])
            seconds.append((time.perf_counter() - started) / CALLS)
        rows.append({"kernel": case.kernel, "nbytes": case.nbytes, "seconds": seconds[1:]})
    return {"rows": rows}


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
