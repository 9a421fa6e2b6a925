"""Plot what each pair of formats costs against its bytes: python benchmarks/plot_formats.py writes results/formats.svg.

From the JSON of `python benchmarks/quality/run.py all_formats spectral`. The line is the Pareto front: no pair of
as few bytes diverges less.
"""

import json
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

from mlx_tq.config import PROFILES

RESULTS = Path(__file__).resolve().parent / "results"
# By who else writes such a format, or how it is built.
FAMILIES = {
    "tq": ("TurboQuant and q8", "#08519c"),
    "foreign": ("of other programs", "#8a8a8a"),
    "qjl": ("with a residual bit (QJL)", "#cb181d"),
    "spectral": ("spectral keys", "#fd8d3c"),
}
# Off the front, these have their names beside them.
NAMED = {"spectral8/tq4", "spectral16/tq4", "tq25/tq25"}
NAMED |= {"tq35/tq4", "tbq4_0/tbq4_0", "tq2/tq4", "q8/tq3", "fp8/tq4", "fp8/fp8"}


def family(name: str) -> str:
    """The family of a pair."""
    if "spectral" in name:
        return "spectral"
    if "tq35" in name or "tq25" in name:
        return "qjl"
    return "foreign" if "_0" in name or "fp8" in name else "tq"


def load() -> list[dict[str, Any]]:
    """The measured pairs of both files, smallest first."""
    found = []
    for name in ("all_formats", "spectral"):
        found += json.loads((RESULTS / f"quality_{name}.json").read_text(encoding="utf-8"))["results"].values()
    return sorted(found, key=lambda row: (row["nbytes"], row["kld"]))


def front(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those that diverge less than every smaller one."""
    return [row for i, row in enumerate(rows) if all(row["kld"] < other["kld"] for other in rows[:i])]


def main() -> None:
    """Draw and write the plot."""
    rows = load()
    figure, axis = plt.subplots(figsize=(8, 4.6))
    for key, (label, colour) in FAMILIES.items():
        own = [row for row in rows if family(row["name"]) == key]
        axis.plot([r["nbytes"] for r in own], [r["kld"] for r in own], "o", ms=4, label=label, color=colour)
    best = front(rows)
    axis.plot([r["nbytes"] for r in best], [r["kld"] for r in best], "-", lw=0.8, color="#08519c", zorder=0)
    profiles = {f"{config.key}/{config.value}": f" ({name})" for name, config in PROFILES.items() if not config.evict}
    for row in rows:
        name, on_front = row["name"], row in best
        if name in NAMED or (on_front and "+" not in name and "q8_0" not in name):
            place = {"xytext": (-3, -4), "ha": "right", "va": "top"} if on_front else {"xytext": (5, 2)}
            where = (row["nbytes"], row["kld"])
            axis.annotate(name + profiles.get(name, ""), where, textcoords="offset points", fontsize=7, **place)
    axis.set(yscale="log", xlabel="bytes a packed token, all layers (fp16: 6,144)", ylabel="KL divergence, nats")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(RESULTS / "formats.svg", metadata={"Date": None})
    plt.close(figure)
    print("on the front:", ", ".join(row["name"] for row in best))


if __name__ == "__main__":
    main()
