"""Aggregation and blocks of TriAttention, model by model, from evict_modes_*.json."""

from collections.abc import Callable

from benchmarks.tables.markdown import RESULTS, Table, machine, report, with_missing
from benchmarks.tables.shares import MODELS, RETENTIONS, cell

LABELS = {
    "triattention": "v3, single tokens",
    "triattention:aggregation=v3": "v3, single tokens, aggregation v3",
    "triattention:granularity=32": "v3, blocks of 32",
    "random": "random, single tokens",
    "random:granularity=32": "random, blocks of 32",
}
THREE = ("embedded", "smollm2", "gemma3-270m")
COMMAND = """python -m mlx_tq evaluate sweep [--model M --dequantize] --dtype float32 --kv-window 64 --prefixes 32 \\
    --triggers 32 --warmup 256 --retentions 90,75,50 --max-tokens 20 --once --kinds multi --depths middle --seeds 6 \\
    --lengths 1000 --chunks 0 \\
    --policies triattention,triattention:aggregation=v3,triattention:granularity=32,random,random:granularity=32"""


def modes() -> str:
    """A row for each variant; needle tokens alive in percent and answers found, at each retention of each model."""
    files = {model: f"evict_modes_{model}.json" for model in THREE}
    there = {model: name for model, name in files.items() if (RESULTS / name).exists()}
    rows = [[label] for label in LABELS.values()]
    for name in there.values():
        found = list(report(name)["results"].items())
        for row, variant in zip(rows, LABELS, strict=True):
            own = [(key, r) for key, r in found if r.get("variant") == variant]
            row += [cell(own, share) for share in RETENTIONS]
    first, *also = there.values()
    columns = ["variant", *(f"{MODELS[model]}, {share} %" for model in there for share in RETENTIONS)]
    which = ", ".join(MODELS[model] for model in there)
    table = Table(first, COMMAND, f"{machine(report(first))}, float32", columns, rows, model=which, also=tuple(also))
    return with_missing(table, [MODELS[model] for model in files if model not in there])


TABLES: dict[str, Callable[[], Table | str]] = {"evict_modes": modes}
