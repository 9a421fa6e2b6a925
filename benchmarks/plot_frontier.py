"""Plot how many next tokens stay the same, by stored bits per value: `make plot` writes frontier.svg."""

from pathlib import Path

from matplotlib.axes import Axes

from benchmarks.plots import drawing
from benchmarks.reports import RESULTS
from benchmarks.tables import REAL_MODELS, Record, frontier_results, pair
from mlx_tq.config import PROFILES

# Of each series: color, line and marker, and for each record its label and the label's place in points from the mark.
SERIES = {
    "mlx_tq": (
        "#2f81f7",
        "o-",
        {
            pair(PROFILES["safe"]): ("safe", (-16, 6)),
            pair(PROFILES["balanced"]): ("balanced", (-20, 6)),
            pair(PROFILES["small"]): ("small", (-24, 5)),
            pair(PROFILES["tiny"]): ("tiny", (0, -14)),
            "stcq3/tcq3": ("stcq3/tcq3", (-58, 2)),
            "stcq2/tcq2": ("stcq2/tcq2", (-58, 0)),
        },
    ),
    "mlx_lm --kv-bits": (
        "#c4621a",
        "s-",
        {
            "affine8_64:plain/affine8_64": ("8", (2, -16)),
            "affine4_64:plain/affine4_64": ("4", (4, -13)),
            "affine3_64:plain/affine3_64": ("3", (5, -11)),
            "affine2_64:plain/affine2_64": ("2", (6, -8)),
        },
    ),
    "llama.cpp q4_0, q8_0": ("#2f9e57", "^", {"q4_0:plain/q4_0": ("", (0, 0)), "q8_0:plain/q8_0": ("", (0, 0))}),
}


def bits(row: Record) -> float:
    """Return the stored bits per value, scales and means included; the models computed in float32."""
    return 32 / float(row["ratio"])


def draw(axis: Axes, results: Record) -> None:
    for series, (color, line, labels) in SERIES.items():
        rows = [results[name] for name in labels]
        axis.plot([bits(r) for r in rows], [r["top1"] for r in rows], line, ms=5, color=color, label=series)
        for row, (label, offset) in zip(rows, labels.values(), strict=True):
            axis.annotate(label, (bits(row), row["top1"]), textcoords="offset points", xytext=offset, color=color)


def plot(path: Path) -> None:
    """Write the plot; raise ValueError if a label cannot be read."""
    models = {label: frontier_results(model) for model, label in REAL_MODELS.items()}
    with drawing(path, 1, len(models), figsize=(9, 3.8), sharey=True) as (figure, axes):
        for axis, (model, results) in zip(axes[0], models.items(), strict=True):
            draw(axis, results)
            axis.set(title=model, xlim=(0.8, 9), ylim=(54, 103), xlabel="stored bits per value (fp16: 16)")
            axis.set(xticks=range(2, 10), yticks=range(60, 101, 10))
        axes[0][0].set_ylabel("same next token as fp16, %\n(higher is better)")
        axes[0][0].legend(loc="lower right", frameon=False)
        figure.tight_layout()


if __name__ == "__main__":
    plot(RESULTS / "frontier.svg")
