"""Formats by layer against one pair for all, at equal bits, on a text that their losses were not measured on."""

from collections.abc import Callable

from benchmarks.tables.markdown import RESULTS, Table, machine, report
from benchmarks.tables.normalized import MODELS

_COMMAND = (
    "python -m mlx_tq evaluate divergence --dtype float32 --profiles tq4/tq4,4.21bits,... --kv-sinks 32 "
    "--kv-window 64 --length 1024 --step 128 --chunks 2 --text REST [--model M --dequantize]"
)


def by_layer() -> Table:
    """A row for each model and arm."""
    files = [name for name in (f"by_layer_{model}.json" for model in MODELS) if (RESULTS / name).exists()]
    rows = []
    for name in files:
        model = MODELS[name.removeprefix("by_layer_").removesuffix(".json")]
        for arm, r in report(name)["results"].items():
            kld = f"{r['kld']:.6f} ± {r['kld_error']:.6f}"
            rows.append([model, arm, kld, f"{r['kld_99']:.4f}", f"{r['top1']:.1f} ± {r['top1_error']:.1f}"])
    first, *also = files
    columns = ["model", "formats", "KLD", "99 %", "top-1 %"]
    return Table(first, _COMMAND, machine(report(first)), columns, rows, model="the models named", also=tuple(also))


TABLES: dict[str, Callable[[], Table]] = {"by_layer": by_layer}
