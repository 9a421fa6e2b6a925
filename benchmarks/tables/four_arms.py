"""The four arms of report 001 side by side: whole and evicted, in the model's type and compressed."""

from collections.abc import Callable

from benchmarks.tables.markdown import RESULTS, Record, Table, machines, report, with_missing
from benchmarks.tables.normalized import MODELS

ARMS = {"off": "fp16", "balanced": "TQ", "off@90%": "V3", "balanced@90%": "TQ and V3"}
LENGTHS = {"embedded": (3500,), "smollm2": (1000, 2000, 7500), "gemma3-270m": (8000, 16000, 32000)}
_FLAGS = (
    "--profiles off,balanced,off@90%,balanced@90% --kv-evict triattention:granularity=1:aggregation=paper "
    "--kv-sinks 32 --kv-window 64"
)
_PERPLEXITY = f"""python -m mlx_tq evaluate perplexity {_FLAGS} \\
    --length L --chunks N --step S --dtype float32 [--model M --dequantize]"""
_SHORT = _FLAGS.replace("triattention", "triattention:warmup=256:trigger=32")
_NEEDLES = f"""python -m mlx_tq evaluate needle {_SHORT} \\
    --lengths L,... --seeds 2 --step 256 --dtype float32 [--model M --dequantize]"""


def four_arms() -> str:
    """A row for each model, length and arm; what was not measured is named below."""
    files, rows, missing = [], [], []
    for model, lengths in LENGTHS.items():
        for length in lengths:
            name = f"four_arms_{model}_{length}.json"
            if not (RESULTS / name).exists():
                missing.append(f"{MODELS[model]} at {length:,}")
                continue
            files.append(name)
            about = report(name)
            timed = "backend" not in about["versions"]  # a GPU was shared with other measurements
            rows += [
                [f"{MODELS[model]}, {length:,}", label, *_cells(about["results"][arm], timed=timed)]
                for arm, label in ARMS.items()
            ]
    first, *also = files
    columns = ["model, tokens", "arm", "perplexity", "change %", "kept %", "MB", "reading, s"]
    found = Table(first, _PERPLEXITY, machines(files), columns, rows, model="the models named", also=tuple(also))
    return with_missing(found, missing)


def _cells(r: Record, *, timed: bool) -> list[str]:
    change, seconds = f"{r['delta']:+.2f} ± {r['delta_error']:.2f}", f"{r['seconds']:.0f}" if timed else "-"
    return [f"{r['ppl']:.2f}", change, f"{100 * r['kept']:.0f}", f"{r['nbytes'] / 1e6:.1f}", seconds]


def found() -> Table:
    """Needles found of those that the fp16 cache finds, by arm and length."""
    files = {path.name: model for model in MODELS for path in sorted(RESULTS.glob(f"four_arms_needles_{model}*.json"))}
    rows = []
    for name, each in files.items():
        cells, model = list(report(name)["results"].values()), MODELS[each]
        for length in sorted({cell["tokens"] for cell in cells}):
            row = [f"{model}, {length:,}"]
            for arm in ARMS:
                own = [c["verdict"] for c in cells if (c["name"], c["tokens"]) == (arm, length)]
                row.append(f"{own.count('PASS')} of {len(own) - own.count('VOID')}")
            rows.append(row)
    first, *also = files
    columns = ["model, tokens", *ARMS.values()]
    return Table(first, _NEEDLES, machines(files), columns, rows, model="the models named", also=tuple(also))


TABLES: dict[str, Callable[[], Table | str]] = {"four_arms": four_arms, "four_arms_needles": found}
