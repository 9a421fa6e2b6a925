"""Plots a report of `bench_kernels` as SVG: rates on a GPU, or lane operations on the simulator.

python -m benchmarks.kernels.plot benchmarks/results/kernels_counted.json
"""

import json
import sys
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

LABELS = {"gb_per_s": "GB/s", "lane_operations": "lane operations per token and KV head"}
TITLES = {"gb_per_s": "Kernels on a GPU", "lane_operations": "Kernels on the simulator"}


def main() -> None:
    for path in map(Path, sys.argv[1:]):
        report = json.loads(path.read_text(encoding="utf-8"))
        rows = report["kernels"][::-1]
        figure_of = next(name for name in LABELS if name in rows[0])
        figure, axis = plt.subplots(figsize=(6, 0.4 * len(rows) + 1))
        bars = axis.barh([row["kernel"] for row in rows], [row[figure_of] for row in rows], color="#3182bd")
        axis.bar_label(bars, fmt="%.0f", padding=3)
        axis.set(xlabel=LABELS[figure_of], title=TITLES[figure_of])
        axis.spines[["top", "right"]].set_visible(False)
        figure.tight_layout()
        figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})


if __name__ == "__main__":
    main()
