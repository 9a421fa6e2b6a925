"""Plot the rescue ramp: the answers, by arm, for each budget and rung.

python -m benchmarks.rescue.plot_ramp rescue_ramp.json     (a report of bench_ramp before benchmarks.summarize)
"""

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl

from benchmarks.reports import RESULTS
from benchmarks.rescue.ramp_cells import ARMS, DEPTHS, cells_of, outcome, settings

mpl.use("Agg")
import matplotlib.pyplot as plt

COLORS = {"native": "#3182bd", "rescue": "#31a354", "miss": "#d9d9d9", "luck": "#fdae6b", "void": "#636363"}
NAMES = {"none": "no eviction", "evict": "eviction", "rescue": "eviction\nand rescue", "retrieval": "only\nretrieval"}


def plot(cells: dict[str, dict[str, Any]]) -> None:
    groups = [group for group in settings(cells) if len(cells_of("none", group, cells)) >= len(DEPTHS)]
    figure, axes = plt.subplots(1, len(groups), figsize=(2.5 * len(groups), 2.9), sharey=True, squeeze=False)
    for axis, group in zip(axes[0], groups, strict=True):
        policy, budget, rung = group
        count = len(cells_of("none", group, cells))
        bottom = [0.0] * len(ARMS)
        for kind, color in COLORS.items():
            counts = []
            for arm in ARMS:
                kinds = [outcome(cell, cells) for cell in cells_of(arm, group, cells)]
                counts.append(kinds.count(kind) / len(kinds))
            axis.bar([NAMES[arm] for arm in ARMS], counts, bottom=bottom, color=color, label=kind)
            bottom = [low + count for low, count in zip(bottom, counts, strict=True)]
        axis.set_title(f"{rung:,} tokens\n{policy}, {budget}, n = {count}", fontsize=7)
        axis.tick_params(axis="x", labelsize=6)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylabel("share of the cases")
    figure.legend(*axes[0][0].get_legend_handles_labels(), ncols=len(COLORS), loc="lower center", frameon=False)
    figure.tight_layout(rect=(0, 0.09, 1, 1))
    figure.savefig(RESULTS / "rescue_ramp.svg", metadata={"Date": None})


if __name__ == "__main__":
    plot(json.loads(Path(sys.argv[1]).read_text())["cells"])
