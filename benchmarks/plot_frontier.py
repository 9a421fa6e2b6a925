"""Plot divergence against stored bits on three models: `python -m benchmarks.plot_frontier` writes frontier.svg.

The line is each model's Pareto front: no pair with as few bits diverges less.
"""

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

from benchmarks.reports import RESULTS
from benchmarks.tables import Record, existing, report

COLORS = {
    "normalized keys": "#08519c",
    "trellis codes": "#d94801",
    "by layer": "#238b45",
    "plain keys": "#9ecae1",
    "others'": "#8a8a8a",
}
NAMED = {"affine4_32/affine4_32", "q4_0/q4_0", "affine2_32/affine2_32", "affine8_64/affine8_64"}


def bits(row: Record) -> float:
    """Return the stored bits per value, scales and means included; the models computed in float32."""
    return 32 / float(row["ratio"])


def kind(name: str) -> str:
    if name.endswith("bits"):
        return "by layer"
    if "tcq" in name:
        return "trellis codes"
    if ":plain" not in name:
        return "normalized keys"
    return "plain keys" if name.partition(":")[0] in ("q8", "tq4", "tq3", "tq2") else "others'"


def main() -> None:
    about = {label: report(name) for name, label in existing("frontier_{}.json").items()}
    figure, axes = plt.subplots(1, len(about), figsize=(4.4 * len(about), 4.2), squeeze=False)
    for axis, (model, found) in zip(axes[0], about.items(), strict=True):
        rows = sorted(found["results"].values(), key=lambda row: (bits(row), row["kld"]))
        for name, color in COLORS.items():
            own = [row for row in rows if kind(row["name"]) == name]
            axis.plot([bits(r) for r in own], [r["kld"] for r in own], "o", ms=4, color=color, label=name)
        front = [row for i, row in enumerate(rows) if all(row["kld"] < other["kld"] for other in rows[:i])]
        axis.plot([bits(r) for r in front], [r["kld"] for r in front], "-", lw=0.8, color="#444444", zorder=0)
        for row in rows:
            name = row["name"].replace(":plain", "")
            if row in front or name in NAMED:
                axis.annotate(name, (bits(row), row["kld"]), textcoords="offset points", xytext=(4, 2), fontsize=6)
        axis.set(yscale="log", xlabel="stored bits per value", title=model)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylabel("KL divergence, nats")
    axes[0][0].legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(RESULTS / "frontier.svg", metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    main()
