"""Predicts decode attention on GPUs that are not here, from machine code and from counted operations.

    python -m benchmarks.kernels.predict

Needs nvcc and nvdisasm: `pip install '.[nvcc]'`. The costs on Macs are those of benchmarks.kernels.count_attention.
"""

import json
import sys
from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx

from benchmarks.kernels.count_attention import FILE as COUNTED
from benchmarks.kernels.count_attention import FORMATS, Cost
from benchmarks.kernels.roofline import (
    CHIPS,
    H100,
    H200,
    Chip,
    Launch,
    Prediction,
    predict,
    predict_warps,
    resident_warps,
)
from benchmarks.kernels.sass import Compiled, compile_kernels, count_kinds
from benchmarks.kernels.token_loop import PACKED, Sizes, TokenCost, cost_of_tokens
from benchmarks.reports import RESULTS, save
from metal_sim.sdpa_vector import choose_kernel
from mlx_tq.codec.formats import CodecOptions, get_format
from mlx_tq.codec.rotation import get_rotation
from mlx_tq.codec.rows import RowLayout
from mlx_tq.kernels import thresholds
from mlx_tq.kernels.attend import attend
from mlx_tq.kernels.encode import compact, encode
from mlx_tq.kernels.prefill import dequantize
from mlx_tq.kernels.recall_score import group_queries, recall_score
from mlx_tq.kernels.score import score
from mlx_tq.kernels.thresholds import KernelThresholds
from mlx_tq.kernels.wht import wht

FILE = "kernels_predicted.json"
ROOT = Path(__file__).parents[2]
DIMS, GROUPS = (64, 128, 256, 512), (4, 8)
PAIRS = (("q8", "tq4"), ("tq4", "tq4"), ("tq2", "tq2"), ("tcq3", "tcq3"))
SHAPES = {"32/8": (8, 4, 128), "16/2": (2, 8, 256), "16/4": (4, 4, 256), "24/4": (4, 6, 256), "64/8": (8, 8, 64)}
TOKENS = (4096, 16384, 65536)
# Loops that wait for each word, as nvcc makes them of a text without TQ_UNROLL_BY: what loading ahead is compared with,
# and what ran on the H200 of attention_cuda.json.
ROLLED = (
    ("TQ_UNROLL_BY(K::VALUES == 1 && QUERIES <= 4 ? 8 : 4)", "TQ_ROLLED"),
    ("TQ_UNROLL_BY(2)", "TQ_ROLLED"),
    ("TQ_UNROLL_BY(int(SPLIT::UNITS) > 1 ? 1 : AHEAD < TURNS ? AHEAD : TURNS)", ""),
)


class Report(NamedTuple):
    """A time of mlx's own attention on a Mac, reported by others."""

    chip: str
    shape: str  # query heads/KV heads/head size
    tokens: int
    milliseconds: float
    source: str


OPTIQ, RMLX = "mlx-optiq, bf16, one call", "Pushkinist/rMLX#292: slope of a step with 36 layers"
REPORTS = (
    Report("M4", "16/2/256", 16384, 0.59, OPTIQ),
    Report("M4", "16/2/256", 65536, 3.17, OPTIQ),
    Report("M4", "16/2/256", 131072, 8.85, OPTIQ),
    Report("M4", "16/4/256", 65536, 4.29, OPTIQ),
    Report("M4", "24/4/256", 65536, 5.92, OPTIQ),
    Report("M1 Ultra", "32/4/256", 100000, 2.3, "ml-explore/mlx#3837, bf16"),
    Report("M5 Max", "32/8/128", 65536, 0.32 / 36 * 64, RMLX),
)


class AttendKernel(NamedTuple):
    sizes: Sizes
    compiled: Compiled
    cost: TokenCost
    rolled: TokenCost  # of the text with ROLLED

    @property
    def warps(self) -> int:
        """Return the warps that an SM has room for."""
        return resident_warps(self.compiled.registers, self.compiled.shared, 32 * self.sizes.team)


def edited(text: str, edits: Iterable[tuple[str, str]]) -> str:
    for old, new in edits:
        if old not in text:
            raise ValueError(f"the text of attend has no {old!r}")
        text = text.replace(old, new)
    return text


Shape = tuple[int, int, tuple[str, str]]  # head size, group, and formats of keys and values


def compile_attend(shapes: Sequence[Shape], *, tables: bool = True) -> dict[Shape, AttendKernel]:
    """Compile `attend`, with levels looked up in tables or not."""
    from kernels.cases import make_problem
    from kernels.metal.simulated import captured

    texts = []
    for dim, groups, (key, value) in shapes:
        limits = KernelThresholds(short_tokens=0, level_tables=2 if tables else 0)
        with captured("cuda") as kernels, thresholds.using(limits):
            problem = make_problem(dims=(dim, dim), key=key, value=value, groups=groups, packed=4, batch=1, length=1)
            problem.solve(attend)
        texts.append(kernels["attend"].text)
    edits: tuple[list[tuple[str, str]], ...] = ([], [PACKED], [PACKED, *ROLLED])
    compiled = iter(compile_kernels([edited(text, edit) for text in texts for edit in edits]))
    kernels = []
    for text in texts:
        sizes, whole, packed, rolled = Sizes.of(text), *(next(compiled) for _ in edits)
        costs = (cost_of_tokens(one.program, sizes) for one in (packed, rolled))
        kernels.append(AttendKernel(sizes, whole, *costs))
    return dict(zip(shapes, kernels, strict=True))


def attend_rows(kernels: dict[Shape, AttendKernel]) -> list[dict[str, Any]]:
    """Describe the machine code of `attend`."""
    rows = []
    for (dim, groups, pair), kernel in kernels.items():
        tiles = -(-groups // kernel.sizes.rows)
        row: dict[str, Any] = {"dim": dim, "groups": groups, "formats": "/".join(pair), "warps": kernel.warps}
        row |= {name: getattr(kernel.compiled, name) for name in ("registers", "spilled", "shared")}
        row |= {"team": kernel.sizes.team, "tiles": tiles, "cycles": kernel.cost.cycles}
        row["rolled_cycles"] = kernel.rolled.cycles
        # Of all lanes, a token and KV head; a warp's are a 32nd.
        row["instructions"] = {kind: tiles * number for kind, number in kernel.cost.instructions.items()}
        rows.append(row)
    return rows


def other_rows() -> list[dict[str, Any]]:
    """Compile the other kernels for tq4 keys and values."""
    from kernels.cases import make_problem
    from kernels.metal.simulated import captured

    found = {}
    for dim in (128, 256):
        layout = RowLayout(*(get_format("tq4").codec(dim, CodecOptions(seed=seed), mx.float16) for seed in (0, 1)))
        problem = make_problem(dims=(dim, dim), key="tq4", value="tq4", groups=4, packed=64, batch=1, length=1)
        rows, limits = problem.rows, KernelThresholds()
        with captured("cuda") as kernels, thresholds.using(limits):
            problem.solve(attend)
            encode(*problem.packed, layout)
            dequantize(problem.regions())
            score(rows, 4, layout, mx.zeros((2, 2, dim)), mx.zeros((2, 2, 8)), mx.zeros((2, 8), mx.int32))
            queries = group_queries(problem.arguments["queries"].astype(mx.float32), 2, layout, None)
            recall_score(queries, layout.keys(rows[:, :, :64]), layout, None, [64])
            wht(mx.zeros((4, dim), mx.float16), get_rotation("wht", dim, 0))
            compact(rows, mx.arange(4), 4)
        with captured("cuda") as two, thresholds.using(KernelThresholds(short_tokens=0)):
            problem.solve(attend)
        kernels["merge"] = two["merge"]
        found.update({(name, dim): kernel for name, kernel in kernels.items()})
    result = []
    compiled = compile_kernels([kernel.text for kernel in found.values()])
    for ((name, dim), kernel), one in zip(found.items(), compiled, strict=True):
        inner = [one.program.code(loop.blocks) for loop in one.program.innermost()]
        row: dict[str, Any] = {"kernel": name, "dim": dim, "instructions": len(one.program.instructions)}
        row |= {name: getattr(one, name) for name in ("registers", "spilled", "shared")}
        row["warps"] = resident_warps(one.registers, one.shared, kernel.threads)
        row["loop"] = count_kinds(max(inner, key=len, default=[]))
        result.append(row)
    return result


def mac_rows() -> list[dict[str, Any]]:
    """Predict mlx's kernel and ours for each chip, shape and context."""
    counted = {
        (row["dim"], row["groups"]): {name: Cost(**cost) for name, cost in row["costs"].items()}
        for row in json.loads((RESULTS / COUNTED).read_text(encoding="utf-8"))["rows"]
        if row["length"] == 1
    }
    rows = []
    for (name, chip), (shape, (heads, groups, dim)), tokens in product(CHIPS.items(), SHAPES.items(), TOKENS):
        costs = counted[dim, groups]
        times = {"mlx": predict_mlx(chip, costs, heads, groups, dim, tokens)}
        times |= {pair: predict_cost(chip, costs[pair], heads * tokens) for pair in FORMATS}
        times = {arm: prediction._asdict() for arm, prediction in times.items()}
        rows.append({"chip": name, "shape": f"{shape}/{dim}", "tokens": tokens, **times})
    return rows


def predict_cost(chip: Chip, cost: Cost, head_tokens: int) -> Prediction:
    return predict(chip, head_tokens * cost.fetched, head_tokens * cost.weighted)


def predict_mlx(chip: Chip, costs: dict[str, Cost], heads: int, groups: int, dim: int, tokens: int) -> Prediction:
    kernel = choose_kernel(dim, groups, 1, tokens, large_chip=chip.is_large)
    assert kernel
    return predict_cost(chip, costs[kernel], heads * tokens)


def check_reports() -> list[dict[str, Any]]:
    """Predict what others reported of mlx's kernel."""
    counted = json.loads((RESULTS / COUNTED).read_text(encoding="utf-8"))["rows"]
    rows = []
    for report in REPORTS:
        query_heads, heads, dim = map(int, report.shape.split("/"))
        groups = query_heads // heads
        costs = next(r["costs"] for r in counted if (r["length"], r["dim"], r["groups"]) == (1, dim, groups))
        all_costs = {name: Cost(**cost) for name, cost in costs.items()}
        prediction = predict_mlx(CHIPS[report.chip], all_costs, heads, groups, dim, report.tokens)
        milliseconds = 1000 * prediction.seconds
        rows.append({**report._asdict(), "predicted": milliseconds, "bound": prediction.bound})
    return rows


def check_h200() -> list[dict[str, Any]]:
    """Predict what 64K tokens more took on an H200, with four query heads per KV head.

    What does not depend on the tokens is left out. Other groups were divided otherwise when they were measured.
    """
    measured = json.loads((RESULTS / "attention_cuda.json").read_text(encoding="utf-8"))
    shapes = {name: sizes for name, sizes in measured["shapes"].items() if sizes[0] == 4 * sizes[1]}
    cases = [(name, pair) for name in shapes for pair in PAIRS]
    dims = sorted({dim for *_, dim in shapes.values()})
    kernels = compile_attend([(dim, 4, pair) for dim in dims for pair in PAIRS], tables=False)
    rows = []
    for name, pair in cases:
        _, heads, dim = shapes[name]
        kernel = kernels[dim, 4, pair]
        found = {
            row["tokens"]: row
            for row in measured["rows"]
            if (row["shape"], row["arm"], row["batch"], row["length"]) == (name, "/".join(pair), 1, 1)
        }
        few, many = found[65536], found[131072]
        times = [
            predict_warps(
                *(H200, Launch.of(tokens, heads, kernel.sizes.team), kernel.rolled),
                *(heads * tokens * row_bytes(dim, pair), kernel.warps),
            ).seconds
            for tokens in (65536, 131072)
        ]
        seconds = times[1] - times[0]
        rows.append({"shape": name, "formats": "/".join(pair), "predicted": 1e6 * seconds})
        rows[-1]["measured"] = 1e6 * (many["seconds"] - few["seconds"])
    return rows


def row_bytes(dim: int, pair: tuple[str, str]) -> int:
    return sum(get_format(name).bytes_per_vector(dim) for name in pair)


def h100_rows(kernels: dict[Shape, AttendKernel]) -> list[dict[str, Any]]:
    """Predict the packed tokens of a call on an H100, with loads ahead and without."""
    rows = []
    for (shape, (heads, groups, dim)), pair, tokens in product(SHAPES.items(), PAIRS, TOKENS):
        kernel = kernels[dim, groups, pair]
        tiles = heads * -(-groups // kernel.sizes.rows)
        nbytes, launch = heads * tokens * row_bytes(dim, pair), Launch.of(tokens, tiles, kernel.sizes.team)
        ahead, rolled = (
            predict_warps(H100, launch, cost, nbytes, kernel.warps) for cost in (kernel.cost, kernel.rolled)
        )
        row: dict[str, Any] = {"shape": f"{shape}/{dim}", "formats": "/".join(pair), "tokens": tokens}
        row |= {"warps": launch.warps, "bytes_only": predict(H100, nbytes, 0).seconds}
        rows.append(row | {"prediction": ahead._asdict(), "rolled": rolled._asdict()})
    return rows


def main() -> None:
    sys.path.insert(0, str(ROOT / "tests"))
    groups = sorted({*product(DIMS, GROUPS), *((dim, groups) for _, groups, dim in SHAPES.values())})
    kernels = compile_attend([(*sizes, pair) for sizes in groups for pair in PAIRS])
    parts = {"attend": attend_rows(kernels), "others": other_rows(), "h100": h100_rows(kernels)}
    parts |= {"h200": check_h200(), "macs": mac_rows(), "reports": check_reports()}
    for row in (*parts["h200"], *parts["reports"]):
        print(row)
    save(FILE, "python -m benchmarks.kernels.predict", chips={k: c._asdict() for k, c in CHIPS.items()}, **parts)


if __name__ == "__main__":
    main()
