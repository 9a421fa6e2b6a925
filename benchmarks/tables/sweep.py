"""Every policy at every share on three models, from evict_sweep_*.json: facts after one round, and text."""

from collections.abc import Callable
from functools import partial

from benchmarks.tables.eviction import RETENTIONS, Show, needles, text
from benchmarks.tables.markdown import Table, machines, report
from benchmarks.tables.normalized import MODELS

BLOCKS = ":granularity=32"
POLICIES = {
    f"triattention{BLOCKS}": "`triattention`",
    f"triattention{BLOCKS}:calibration=text": "`triattention`, statistics of the text",
    f"triattention{BLOCKS}:aggregation=paper": "`triattention`, aggregation paper",
    f"triattention{BLOCKS}:calibration=text:aggregation=paper": "`triattention`, aggregation paper, own text",
    f"expected_attention{BLOCKS}": "`expected_attention`",
    f"random{BLOCKS}": "`random`",
    f"recency{BLOCKS}": "`recency`",
    f"knorm{BLOCKS}": "`knorm`",
}
COMMAND = f"""python -m mlx_tq evaluate sweep [--model M --dequantize] --dtype float32 --kv-window 64 \\
    --prefixes 32 --triggers 32 --warmup 256 --policies {",".join(POLICIES)} \\
    """
NEEDLES = f"{COMMAND}--once --kinds multi --depths middle --seeds 3 --lengths 1000 --chunks 0 --max-tokens 20"
TEXT = f"{COMMAND}--text REST --seeds 0 --chunks 2 --length 1000"


def by_model(stem: str, field: str, show: Show, command: str) -> Table:
    """A row for each model and policy, a column for each share of tokens that stays."""
    files, rows = {name: f"{stem}_{name}.json" for name in MODELS}, []
    for name, file in files.items():
        records = [record for record in report(file)["results"].values() if field in record]
        for variant, label in POLICIES.items():
            own = [record for record in records if record.get("variant") == variant]
            cells = [[record for record in own if record["retention"] == share] for share in RETENTIONS]
            rows.append([MODELS[name], label, *(show(found) if found else "-" for found in cells)])
    first, *also = files.values()
    columns = ["model", "policy", *(f"{share} %" for share in RETENTIONS)]
    where = f"{machines(list(files.values()))}, float32"
    return Table(first, command, where, columns, rows, model="the models named", also=tuple(also))


TABLES: dict[str, Callable[[], Table]] = {
    "evict_sweep": partial(by_model, "evict_sweep", "live", needles, NEEDLES),
    "evict_sweep_text": partial(by_model, "evict_sweep_text", "delta", text, TEXT),
}
