"""Each kernel's GB/s beside a plain copy's, and attention's time beside mlx's, in one run; without a GPU, its cost.

    python -m benchmarks.kernels.bench_kernels

A GPU is timed over many calls in one evaluation, `attend` with its `merge`. On a CPU the kernels run on `metal_sim`,
which counts bytes and lane operations: the difference between two contexts, per token and KV head.
"""

import argparse
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.base import quantized_scaled_dot_product_attention

from benchmarks.kernels.cases import DIM, GROUP, cases
from metal_sim.sdpa_vector import sdpa_vector
from mlx_tq.cli.environment import environment
from mlx_tq.kernels import backend, build, thresholds
from mlx_tq.kernels.thresholds import KernelThresholds

ROOT = Path(__file__).parents[2]
CALLS, ROUNDS = 50, 7
COUNTED = (96, 224)  # tokens
SHORT = 320  # packed tokens of a short context
ARCHIVED, QUESTIONS = 64, (2, 8, 32)  # archived tokens that are counted, and the tokens that ask them
ONE_BLOCK = KernelThresholds(least_block=4096, short=0)  # what merging several costs is no cost of a token
# Other ways of attention, and which of their kernels is counted: one for all, and what merges blocks of 64 tokens.
ATTENTION = {"attend_short": (KernelThresholds(short=4096), 0), "merge": (KernelThresholds(least_block=64, short=0), 1)}


def seconds(call: Callable[[], list[mx.array]]) -> float:
    """The median time of one of many calls."""
    mx.eval(call())
    found = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        mx.eval([call() for _ in range(CALLS)])
        found.append((time.perf_counter() - started) / CALLS)
    return statistics.median(found)


def timed(tokens: int, heads: int) -> dict[str, Any]:
    """Times and rates on a GPU; those of a copy, and of mlx's own attention in fp16 and on quantised caches."""
    keys, values = (mx.random.normal((1, heads, tokens, DIM)).astype(mx.float16) for _ in range(2))
    queries = mx.random.normal((1, heads * GROUP, 1, DIM)).astype(mx.float16)
    mx.eval(keys, values, queries)
    scale = DIM**-0.5
    rows = [{"kernel": "copy", "seconds": seconds(lambda: [keys + 0]), "nbytes": 2 * keys.nbytes}]
    fast = seconds(lambda: [mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale)])
    rows.append({"kernel": "mx.fast attention, fp16", "seconds": fast, "nbytes": 2 * keys.nbytes})
    for bits in (8, 4):
        packed = [mx.quantize(x, group_size=64, bits=bits) for x in (keys, values)]
        mx.eval(packed)
        took = seconds(
            lambda packed=packed, bits=bits: [
                quantized_scaled_dot_product_attention(queries, *packed, scale=scale, mask=None, bits=bits)
            ]
        )
        size = sum(part.nbytes for parts in packed for part in parts)
        rows.append({"kernel": f"mlx-lm kv-bits {bits}", "seconds": took, "nbytes": size})
    for case in cases(tokens, heads):
        rows.append({"kernel": case.kernel, "seconds": seconds(case.call), "nbytes": case.nbytes})
    for row in rows:
        row["gb_per_s"] = row["nbytes"] / row["seconds"] / 1e9
    return {"tokens": tokens, "heads": heads, "kernels": rows}


def counted() -> dict[str, Any]:
    """Bytes and lane operations on the simulator, per token and KV head; mlx's `sdpa_vector` beside them."""
    sys.path.insert(0, str(ROOT / "tests/kernels/metal"))
    from simulated import simulated

    mx.random.seed(0)  # how often a maximum grows is a matter of the numbers
    found: list[dict[str, Counter[str]]] = []
    for tokens in COUNTED:
        with backend.using("reference"):
            made = cases(tokens, 1)
        found.append({})
        for case in made:
            with simulated() as counters, thresholds.using(ONE_BLOCK):
                mx.eval(case.call())
            found[-1][case.kernel] = _total(counters)
        (attention,) = (case for case in made if case.kernel == "attend")
        for name, (way, place) in ATTENTION.items():
            with simulated() as counters, thresholds.using(way):
                mx.eval(attention.call())
            found[-1][name] = _total(counters[place : place + 1])
        shape = (1, tokens, DIM)
        numbers = [mx.random.normal(s).astype(mx.float16) for s in ((GROUP, DIM), shape, shape)]
        _, cost = sdpa_vector(*map(np.array, numbers))
        found[-1]["mx.fast attention, fp16"] = _total([cost])
    few, many = found
    more = COUNTED[1] - COUNTED[0]
    rows = [{"kernel": name, **{k: (many[name][k] - few[name][k]) / more for k in many[name]}} for name in many]
    whole = []
    for name, short in (("attend, then merge", 0), ("attend_short", 65536)):
        with backend.using("reference"):
            (attend,) = (case for case in cases(SHORT, 1) if case.kernel == "attend")
        with simulated() as counters, thresholds.using(KernelThresholds(short=short)):
            mx.eval(attend.call())
        whole.append({"kernel": name, "dispatches": len(counters), **_total(counters)})
    archived = []
    for question in QUESTIONS:
        with backend.using("reference"):
            (recall,) = (case for case in cases(ARCHIVED, 1, question) if case.kernel == "recall_score")
        with simulated() as counters:
            mx.eval(recall.call())
        archived.append({"queries": GROUP * question, "stored": recall.nbytes, **_by_part(*counters)})
    thousand = [{k: n if k == "queries" else 1000 * n / ARCHIVED for k, n in row.items()} for row in archived]
    short = {"packed_tokens": SHORT, "kernels": whole}
    return {"tokens": COUNTED, "kernels": rows, "short": short, "archived": thousand}


def _by_part(cost: Any) -> dict[str, int]:
    """Bytes that `recall_score` loads of keys and of queries, and what it does."""
    keys = cost.loaded["key_codes"] + cost.loaded["key_scales"]
    return {"keys": keys, "asked": cost.loaded["asked_queries"], "lane_operations": sum(cost.operations.values())}


def _total(counters: list[Any]) -> Counter[str]:
    total: Counter[str] = Counter()
    for c in counters:
        total["loaded"] += sum(size for name, size in c.loaded.items() if not name.endswith(("_shape", "_strides")))
        total["stored"] += sum(c.stored.values())
        total["lane_operations"] += sum(c.operations.values())
    return total


def main() -> None:
    """Measure what is here and write it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=32768, help="of the timed kernels")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--json", metavar="FILE", help="default: benchmarks/results/kernels_{metal,cuda,counted}.json")
    args = parser.parse_args()
    where = build.gpu_backend() or "counted"
    measured = timed(args.tokens, args.heads) if build.gpu_backend() else counted()
    path = Path(args.json or ROOT / f"benchmarks/results/kernels_{where}.json")
    command = "python -m benchmarks.kernels.bench_kernels"
    path.write_text(json.dumps({"command": command, "environment": environment(), **measured}, indent=1) + "\n")
    for row in measured["kernels"]:
        print(", ".join(f"{name} {value:.4g}" if name != "kernel" else value for name, value in row.items()))


if __name__ == "__main__":
    main()
