"""The tables that a run ends with, from its JSON: `python -m benchmarks.gpu.table FILE`."""

import json
import statistics
import sys
from pathlib import Path
from typing import Any

from benchmarks.tables import lines

Cells = dict[str, Any]
ALLOWED = 5e-3  # difference of fp16 outputs from the reference implementation, relative to the largest value


def print_tables(content: dict[str, Any]) -> None:
    cells: Cells = content["cells"]
    print(*summarize(content), sep="\n")
    for title, table in {
        "Attention of one layer": attention_table(measured(cells, "attention")),
        "Decode steps": arms_table(measured(cells, "decode")),
        "Prefill": arms_table(measured(cells, "prefill")),
        "Eviction and recall": seconds_table(measured(cells, "eviction")),
        "Kernels, many calls at once": kernels_table(measured(cells, "eviction")),
    }.items():
        if table:
            print(f"\n{title}\n\n{table}")


def measured(cells: Cells, part: str) -> Cells:
    """Return the cells of a part that have figures, by their names."""
    without = {"error", "skipped", "not_measured"}
    named = {key.partition("/")[2]: cell for key, cell in cells.items() if key.startswith(f"{part}/")}
    return {name: cell for name, cell in named.items() if not without & cell.keys()}


def summarize(content: dict[str, Any]) -> list[str]:
    """Return the machine, its floors, and what failed or was not measured."""
    cells, about = content["cells"], content["environment"]
    checks = [cell for cell in measured(cells, "comparisons").values() if "passed" in cell]
    shown = [", ".join(f"{name} {about[name]}" for name in ("device", "backend", "system", "mlx", "kernels"))]
    shown.append(f"{sum(check['passed'] for check in checks)} of {len(checks)} comparisons passed")
    for name, speed in measured(cells, "attention").items():
        if name.startswith("machine"):
            launch, chained = (f"{1e6 * speed[floor]:.0f} us" for floor in ("launch_seconds", "chained_seconds"))
            copy = f"a plain copy moves {speed['copy_gb_per_s']:.0f} GB/s"
            shown.append(f"{name}: launch floor {launch} alone, {chained} in a chain; {copy}")
    first, *_, last = content["states"].values()
    shown += [f"{name}: {first[name]} before, {last[name]} after" for name in first]
    wrong = {key: cell["error"] for key, cell in cells.items() if "error" in cell}
    wrong |= {key: "differs from the reference implementation" for key, cell in cells.items() if differs(cell)}
    shown += [f"FAILED {key}: {reason}" for key, reason in wrong.items()]
    missing = sum("not_measured" in cell for cell in cells.values())
    return [*shown, f"{missing} cells were not measured: the time was over"] if missing else shown


def differs(cell: dict[str, Any]) -> bool:
    if not cell.get("passed", True):
        return True
    return any((timing["difference"] or 0) > ALLOWED for timing in cell.get("timings", ()))


def attention_table(cells: Cells) -> str:
    """Return a row for each cell: microseconds and GB/s of fp16, and of each other arm how many times as fast it is."""
    cells = {name: cell for name, cell in cells.items() if cell.get("timings")}
    arms = list(dict.fromkeys(timing["arm"] for cell in cells.values() for timing in cell["timings"]))
    rows = []
    for name, cell in cells.items():
        timings = {timing["arm"]: timing for timing in cell["timings"]}
        first = next(iter(timings.values()))
        row = [name + ("" if cell["steady"] else " (unsteady)"), str(first["caches"])]
        row += [f"{1e6 * first['median']:.1f}", f"{first['gb_per_s']:.0f}"]
        ratios = {arm: f"{statistics.median(timing['ratios']):.2f}" for arm, timing in timings.items()}
        rows.append([*row, *(ratios.get(arm, "-") for arm in arms[1:])])
    return lines(["cell", "caches", f"{arms[0]}, us", "GB/s", *arms[1:]], rows) if rows else ""


def arms_table(cells: Cells) -> str:
    """Return a row for each cell and kind of cache of whole models."""
    rows = []
    for name, cell in cells.items():
        for arm, figures in cell["arms"].items():
            seconds = statistics.median(figures["seconds"])
            tokens = cell["tokens"] if "peak_nbytes" in figures else 1
            row = [f"{name}, {cell['layers']} layers", arm, f"{tokens / seconds:.1f}"]
            row += [f"{statistics.median(figures['ratios']):.2f}", f"{figures.get('bound', 0):.2f}"]
            rows.append([*row, f"{figures.get('peak_nbytes', figures.get('kv_nbytes')) / 1e9:.3f}"])
    columns = ["model", "cache", "tok/s", "times as fast as fp16", "bound by bytes", "KV or peak, GB"]
    return lines(columns, rows) if rows else ""


def seconds_table(cells: Cells) -> str:
    timed = {name: cell for name, cell in cells.items() if "seconds" in cell}
    rows = [[name, f"{c['tokens']:,}", f"{1e3 * statistics.median(c['seconds']):.2f}"] for name, c in timed.items()]
    return lines(["what", "tokens", "ms"], rows) if rows else ""


def kernels_table(cells: Cells) -> str:
    rows = cells.get("kernels", {"rows": []})["rows"]
    rates = [[row["kernel"], f"{row['nbytes'] / statistics.median(row['seconds']) / 1e9:.1f}"] for row in rows]
    return lines(["kernel", "GB/s"], rates) if rates else ""


if __name__ == "__main__":
    print_tables(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
