"""The table of the frontier: what pairs of formats cost at their bits, on three models."""

from collections.abc import Callable

from benchmarks.tables.markdown import RESULTS, Record, Table, machines, report, with_missing
from benchmarks.tables.normalized import MODELS
from mlx_tq.prompt_cache.allocation import CHOICES

FULL_BITS = 32  # the models computed in float32
BY_LAYER = "bits"
_COMMAND = (
    "python benchmarks/quality/frontier.py ours+trellis+layers+plain+field --kv-sinks 32 --kv-window 64 --length L "
    "--step 128 --chunks N --dtype float32 [--model M --dequantize]"
)


def measured() -> dict[str, Record]:
    """The results by model, of those that were measured."""
    files = {model: f"frontier_{model}.json" for model in MODELS}
    return {model: report(name) for model, name in files.items() if (RESULTS / name).exists()}


def bits(row: Record) -> float:
    """Stored bits a value of a packed token, scales and means included."""
    return FULL_BITS / float(row["ratio"])


def kind(name: str) -> str:
    """Whose codes they are, and how keys are stored."""
    if name.endswith(BY_LAYER):
        return "by layer"
    if "tcq" in name:
        return "trellis codes"
    if ":plain" not in name:
        return "normalized keys"
    return "plain keys" if name.partition(":")[0] in CHOICES else "others'"


def frontier() -> str:
    """A row for each pair, by kind and then by bits."""
    about = measured()
    names = list(dict.fromkeys(name for found in about.values() for name in found["results"]))
    kinds = ("normalized keys", "trellis codes", "by layer", "plain keys", "others'")
    first = next(iter(about.values()))["results"]
    names.sort(key=lambda name: (kinds.index(kind(name)), bits(first[name]) if name in first else 0))
    rows = [[name.replace(":plain", ""), kind(name), *_cells(name, about)] for name in names]
    columns = [
        "keys/values",
        "",
        *(f"{MODELS[model]}: {what}" for model in about for what in ("bits", "KLD", "top-1 %")),
    ]
    source, *also = files = [f"frontier_{model}.json" for model in about]
    found = Table(source, _COMMAND, machines(files), columns, rows, model="the models named", also=tuple(also))
    return with_missing(found, [MODELS[model] for model in MODELS if model not in about])


def _cells(name: str, about: dict[str, Record]) -> list[str]:
    cells = []
    for found in about.values():
        r = found["results"].get(name)
        cells += (
            [f"{bits(r):.2f}", f"{r['kld']:.6f} ± {r['kld_error']:.6f}", f"{r['top1']:.1f}"] if r else ["-", "-", "-"]
        )
    return cells


TABLES: dict[str, Callable[[], str]] = {"frontier": frontier}
