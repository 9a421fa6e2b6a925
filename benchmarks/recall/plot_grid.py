"""Plot the recall grid: python -m benchmarks.recall.plot_grid writes results/recall_grid.svg from recall_grid.json.

A panel a budget: the mean log-probability of the right answer, by cell, in every arm.
"""

from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

from benchmarks.recall.parts import ARMS
from benchmarks.tables.markdown import RESULTS
from benchmarks.tables.recall_grid import cells

_SHADES = ("#3a3a3a", "#bdbdbd", "#fd8d3c", "#e6550d", "#08519c", "#31a354", "#756bb1", "#8a8a8a", "#6baed6")
COLOURS = dict(zip(ARMS, _SHADES, strict=True))
MARKERS = dict(zip(ARMS, "oxs^DP*+v", strict=True))


def main() -> None:
    """Draw and write the plot."""
    found = cells()
    budgets = sorted({names[3] for names, _ in found}, key=lambda budget: -float(budget.rstrip("%")))
    shown: dict[str, Any] = {}
    figure, axes = plt.subplots(len(budgets), 1, figsize=(9, 3.6 * len(budgets)), squeeze=False)
    for axis, budget in zip(axes[:, 0], budgets, strict=True):
        own = [(names, rows) for names, rows in found if names[3] == budget]
        for arm in ARMS:
            logs = [[row["arms"][arm]["log"] for row in rows if arm in row["arms"]] for _, rows in own]
            points = [(i, sum(each) / len(each)) for i, each in enumerate(logs) if each]
            if points:
                shown[arm] = axis.plot(*zip(*points, strict=True), MARKERS[arm], color=COLOURS[arm], ms=6)[0]
        axis.set(title=f"{budget} kept", ylabel="log-probability of the answer", xticks=range(len(own)))
        axis.set_xticklabels([f"{n[2]}\n{n[1]}\n{n[0].split()[0].split('-')[0]}" for n, _ in own], fontsize=7)
        axis.spines[["top", "right"]].set_visible(False)
    arms = [arm for arm in ARMS if arm in shown]
    figure.legend([shown[arm] for arm in arms], arms, ncols=len(arms), loc="upper center", frameon=False)
    figure.tight_layout(rect=(0, 0, 1, 1 - 0.1 / len(budgets)))
    figure.savefig(RESULTS / "recall_grid.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
