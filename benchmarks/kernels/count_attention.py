"""Count the lane operations and bytes of attention per packed token and KV head, beside those of mlx's kernel at fp16.

    python -m benchmarks.kernels.count_attention

Counts are the difference between two contexts on `metal_sim`. mlx's kernels run from the text of its wheel.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from itertools import product
from operator import sub
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from benchmarks.reports import RESULTS, save
from metal_sim.run import OPERATIONS, Counters
from metal_sim.sdpa_vector import choose_kernel, run_kernel
from mlx_tq.codec.formats import CodecOptions, get_format
from mlx_tq.codec.normalization import MEAN_TOKENS, KeyNormalization
from mlx_tq.codec.rows import RowLayout
from mlx_tq.kernels import backend, thresholds
from mlx_tq.kernels.attend import attend
from mlx_tq.kernels.encode import encode
from mlx_tq.kernels.regions import Regions
from mlx_tq.kernels.thresholds import KernelThresholds

ROOT = Path(__file__).parents[2]
FILE = "attention_counted.json"
DIMS, GROUPS, LENGTHS = (64, 128, 256, 512), (1, 2, 4, 6, 8, 16), (1, 4, 8)
FORMATS = ("q8/q8", "q8/tq4", "stcq4/tq4", "stcq4/tcq3")
CONTEXTS = (1024, 4096, 16384)  # tokens, for which mlx chooses its kernel
# Cycles on M1 and M2, by published microbenchmarks, where they are not 1. Threadgroup memory counts 1 for each 16 bytes
# of a load or store; its real cost depends on conflicts between banks, which the simulator does not know.
WEIGHTS = {"collective": 2, "transcendental": 4, "convert": 4}
FEW, MANY = 96, 96 + MEAN_TOKENS  # packed tokens
MLX_FEW, MLX_MANY = 256, 512  # so that each simdgroup of two passes has some
WINDOW = 32  # full-precision tokens
ONE_BLOCK = KernelThresholds(min_block=1024, short_tokens=0)  # merging is no cost per token


class Cost(NamedTuple):
    """What a token costs for one KV head and all its queries."""

    operations: dict[str, float]  # of lanes, by kind
    loaded: float  # bytes, by all lanes
    fetched: float  # bytes, each once for all lanes of a threadgroup: what leaves memory if no cache has it

    @property
    def plain(self) -> float:
        return sum(self.operations.values())

    @property
    def weighted(self) -> float:
        return sum(WEIGHTS.get(kind, 1) * number for kind, number in self.operations.items())


def count_attend(dim: int, groups: int, length: int, formats: str) -> Cost:
    """Return the cost of `attend` with such formats as "q8/tq4"."""
    from kernels.metal.simulated import simulated

    queries = mx.random.normal((1, groups, length, dim), dtype=mx.float16, key=mx.random.key(1))
    costs = []
    for tokens in (FEW, MANY):
        with simulated() as counters, thresholds.using(ONE_BLOCK):
            regions = replace(_make_cache(dim, formats), packed_tokens=tokens)
            mx.eval(attend(queries, regions, scale=dim**-0.5, mask="causal"))
        costs.append(counters)
    return _cost_of_token(*costs, MANY - FEW)


def count_mlx(kernel: str, dim: int, groups: int, length: int) -> Cost:
    """Return the cost of one of mlx's kernels."""
    rng, costs = np.random.default_rng(0), []
    for tokens in (MLX_FEW, MLX_MANY):
        shapes = [(groups, length, dim), (1, tokens, dim), (1, tokens, dim)]
        arrays = ((rng.standard_normal(shape) / dim**0.5).astype(np.float16) for shape in shapes)
        costs.append([run_kernel(kernel, *arrays)[1]])
    return _cost_of_token(*costs, MLX_MANY - MLX_FEW)


@cache
def _make_cache(dim: int, formats: str) -> Regions:
    key, value = (get_format(name).codec(dim, CodecOptions(), mx.float16) for name in formats.split("/"))
    layout = RowLayout(key, value)
    shape = (1, 1, MANY, dim)
    keys, values, means = (mx.random.normal(shape, dtype=mx.float16, key=mx.random.key(seed)) for seed in (2, 3, 4))
    if layout.learned_bytes:  # dims differ, as in models, so that groups have all widths
        keys *= mx.exp(1.2 * mx.random.normal((dim,), key=mx.random.key(5))).astype(keys.dtype)
        layout = layout.fit(keys, values)
    normalization = KeyNormalization(mx.ones((1, 1, dim)), means[:, :, :2])
    with backend.using("reference"):
        rows = encode(keys, values, layout, normalization).rows
    mx.eval(rows)
    return Regions(rows, MANY, layout, keys[:, :, :WINDOW], values[:, :, :WINDOW], 0, WINDOW, normalization)


def _cost_of_token(few: list[Counters], many: list[Counters], added: int) -> Cost:
    def per_token(numbers: Callable[[Counters], Iterable[int]]) -> float:
        totals = (sum(sum(numbers(counters)) for counters in cost) for cost in (many, few))
        return round(sub(*totals) / added, 2)

    kinds = {kind: per_token(lambda counters, kind=kind: [counters.operations[kind]]) for kind in OPERATIONS}
    return Cost(
        {kind: number for kind, number in kinds.items() if number},
        loaded=per_token(lambda counters: counters.loaded.values()),
        fetched=per_token(lambda counters: counters.fetched.values()),
    )


def count_shape(dim: int, groups: int, length: int) -> dict[str, Any]:
    """Return the costs of a shape by formats and by kernel of mlx, and which of these runs on which chip."""
    kernels = {
        chip: [choose_kernel(dim, groups, length, tokens, large_chip=chip == "large") for tokens in CONTEXTS]
        for chip in ("base", "large")
    }
    costs = {formats: count_attend(dim, groups, length, formats) for formats in FORMATS}
    run = sorted({name for names in kernels.values() for name in names if name})
    costs |= {name: count_mlx(name, dim, groups, length) for name in run}
    shape = {"dim": dim, "groups": groups, "length": length}
    return {**shape, "kernels": kernels, "costs": {name: cost._asdict() for name, cost in costs.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--resume", action="store_true", help="keep the shapes that the file has")
    args = parser.parse_args()
    sys.path.insert(0, str(ROOT / "tests"))
    rows = json.loads((RESULTS / FILE).read_text(encoding="utf-8"))["rows"] if args.resume else []
    done = {(row["length"], row["dim"], row["groups"]) for row in rows}
    about = {"contexts": CONTEXTS, "weights": WEIGHTS, "formats": FORMATS}
    for length, dim, groups in product(LENGTHS, DIMS, GROUPS):
        if (length, dim, groups) in done:
            continue
        rows.append(count_shape(dim, groups, length))
        totals = {name: Cost(**cost).plain for name, cost in rows[-1]["costs"].items()}
        print(f"D {dim}, G {groups}, L {length}: {totals}", flush=True)
        save(FILE, "python -m benchmarks.kernels.count_attention", **about, rows=rows)


if __name__ == "__main__":
    main()
