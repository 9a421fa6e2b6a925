"""Count what the kernels cost on the simulator, on any machine; `benchmarks.gpu` times them.

    python -m benchmarks.kernels.bench_kernels

The kernels run on `metal_sim`, which counts bytes and lane operations per token and KV head: the difference between two
contexts.
"""

import argparse
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from benchmarks.kernels.cases import DIM, GROUP, make_cases
from benchmarks.reports import save
from metal_sim.sdpa_vector import ONE_PASS, run_kernel
from mlx_tq.kernels import backend, thresholds
from mlx_tq.kernels.thresholds import KernelThresholds

ROOT = Path(__file__).parents[2]
COUNTED = (96, 224)  # tokens
SHORT = 320  # packed tokens of a short context
ARCHIVED, QUESTIONS = 64, (2, 8, 32)  # archived tokens, and tokens of questions
ONE_BLOCK = KernelThresholds(min_block=4096, short_tokens=0)  # without merging, which is not a cost per token
# Other ways to attend, and the number of the kernel to count.
ATTENTION = {
    "attend_short": (KernelThresholds(short_tokens=4096), 0),
    "merge": (KernelThresholds(min_block=64, short_tokens=0), 1),
}


def count_kernels() -> dict[str, Any]:
    """Return bytes and lane operations per token and KV head on the simulator, also of mlx's `sdpa_vector`."""
    sys.path.insert(0, str(ROOT / "tests"))
    from kernels.metal.simulated import simulated

    mx.random.seed(0)  # the data decides how often a maximum grows
    totals: list[dict[str, Counter[str]]] = []
    for tokens in COUNTED:
        with backend.using("reference"):
            cases = make_cases(tokens, 1)
        totals.append({})
        for case in cases:
            with simulated() as counters, thresholds.using(ONE_BLOCK):
                mx.eval(case.call())
            totals[-1][case.kernel] = _total(counters)
        (attention,) = (case for case in cases if case.kernel == "attend")
        for name, (limits, number) in ATTENTION.items():
            with simulated() as counters, thresholds.using(limits):
                mx.eval(attention.call())
            totals[-1][name] = _total(counters[number : number + 1])
        shape = (1, tokens, DIM)
        numbers = [mx.random.normal(s).astype(mx.float16) for s in ((GROUP, 1, DIM), shape, shape)]
        _, cost = run_kernel(ONE_PASS, *map(np.array, numbers))
        totals[-1]["mx.fast attention, fp16"] = _total([cost])
    few, many = totals
    added = COUNTED[1] - COUNTED[0]
    rows = [{"kernel": name, **{k: (many[name][k] - few[name][k]) / added for k in many[name]}} for name in many]
    whole = []
    for name, limit in (("attend, then merge", 0), ("attend_short", 65536)):
        with backend.using("reference"):
            (attend,) = (case for case in make_cases(SHORT, 1) if case.kernel == "attend")
        with simulated() as counters, thresholds.using(KernelThresholds(short_tokens=limit)):
            mx.eval(attend.call())
        whole.append({"kernel": name, "dispatches": len(counters), **_total(counters)})
    archived = []
    for question in QUESTIONS:
        with backend.using("reference"):
            (recall,) = (case for case in make_cases(ARCHIVED, 1, question) if case.kernel == "recall_score")
        with simulated() as counters:
            mx.eval(recall.call())
        archived.append({"queries": GROUP * question, "stored": recall.nbytes, **_by_part(*counters)})
    thousand = [{k: n if k == "queries" else 1000 * n / ARCHIVED for k, n in row.items()} for row in archived]
    short = {"packed_tokens": SHORT, "kernels": whole}
    return {"tokens": COUNTED, "kernels": rows, "short": short, "archived": thousand}


def _by_part(cost: Any) -> dict[str, int]:
    """Return the bytes of keys and of queries that `recall_score` loads, and its lane operations."""
    keys = cost.loaded["key_codes"] + cost.loaded["key_scales"]
    return {"keys": keys, "asked": cost.loaded["query_tiles"], "lane_operations": sum(cost.operations.values())}


def _total(counters: list[Any]) -> Counter[str]:
    total: Counter[str] = Counter()
    for c in counters:
        total["loaded"] += sum(size for name, size in c.loaded.items() if not name.endswith(("_shape", "_strides")))
        total["stored"] += sum(c.stored.values())
        total["lane_operations"] += sum(c.operations.values())
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE", help="default: benchmarks/results/kernels_counted.json")
    args = parser.parse_args()
    measured = count_kernels()
    path = Path(args.json).resolve() if args.json else "kernels_counted.json"
    save(path, "python -m benchmarks.kernels.bench_kernels", **measured)
    for row in measured["kernels"]:
        print(", ".join(f"{name} {value:.4g}" if name != "kernel" else value for name, value in row.items()))


if __name__ == "__main__":
    main()
