"""The formats of published reports beside ours, on a real model, from quality_reports_*.json."""

from collections.abc import Callable

from benchmarks.tables.markdown import Table, machine, report
from mlx_tq.codec.formats import get_format

MODELS = {"smollm2": ("SmolLM2-135M", 64), "gemma3-270m": ("Gemma 3 270M", 256)}  # with the size of a head
_FLAGS = "--dequantize --dtype float32 --chunks 1 --kv-sinks 32 --kv-window 64"
FILES = [f"quality_reports_{model}.json" for model in MODELS]


def report_formats() -> Table:
    """A row for each pair on each model, smallest first."""
    rows, commands = [], []
    for file, (label, dim) in zip(FILES, MODELS.values(), strict=True):
        about = report(file)
        found = {name: r for name, r in about["results"].items() if name != "off"}
        pairs = {name: name.replace(":plain", "").split("/") for name in found}
        nbytes = {name: sum(get_format(each).bytes_per_vector(dim) for each in pair) for name, pair in pairs.items()}
        for name in sorted(found, key=lambda name: (nbytes[name], name)):
            r = found[name]
            row = [
                label,
                "/".join(pairs[name]),
                "plain" if ":plain" in name else "normalized",
                str(nbytes[name]),
                f"{4 * dim / nbytes[name]:.2f}",
            ]
            rows.append([*row, f"{r['kld']:.5f} ± {r['kld_error']:.5f}", f"{r['top1']:.1f} ± {r['top1_error']:.1f}"])
        asked = about["settings"]
        flags = f"--model {asked['model']} --length {asked['length']} --step {asked['step']} {_FLAGS}"
        commands.append(f"python -m mlx_tq evaluate divergence --profiles {','.join(found)} {flags}")
    columns = ["model", "K/V", "keys", "bytes a token and head", "of fp16's", "KLD", "top-1 %"]
    where = f"{machine(report(FILES[0]))}, float32"
    return Table(FILES[0], "\n".join(commands), where, columns, rows, model="the models named", also=tuple(FILES[1:]))


TABLES: dict[str, Callable[[], Table]] = {"report_formats": report_formats}
