"""Plot how many next tokens stay the same, by stored bits per value: `make plot` writes frontier.svg."""

from itertools import combinations
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text

from benchmarks.reports import RESULTS
from benchmarks.tables import REAL_MODELS, Record, existing, pair, report
from mlx_tq.config import PROFILES

# Legible on a white page and on a dark one; the background is transparent.
INK, FRAME = "#777777", "#8b8b8b"
# Of each series: color, line and marker, and for each record its label and the label's place in points from the mark.
SERIES = {
    "mlx_tq": (
        "#2f81f7",
        "o-",
        {
            pair(PROFILES["safe"]): ("safe", (-16, 6)),
            pair(PROFILES["balanced"]): ("balanced", (-20, 6)),
            pair(PROFILES["small"]): ("small", (-24, 5)),
            "tq3/tq3": ("tq3/tq3", (-40, 4)),
            "tq2/tq2": ("tq2/tq2", (-40, 5)),
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
    models = {label: report(name)["results"] for name, label in existing("frontier_{}.json", REAL_MODELS).items()}
    style = {"font.size": 9, "axes.edgecolor": FRAME, "svg.hashsalt": "frontier"}
    style |= dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), INK)
    with plt.rc_context(style):
        figure, axes = plt.subplots(1, len(models), figsize=(9, 3.8), sharey=True, squeeze=False)
        for axis, (model, results) in zip(axes[0], models.items(), strict=True):
            draw(axis, results)
            axis.set(title=model, xlim=(0.8, 9), ylim=(54, 103), xlabel="stored bits per value (fp16: 16)")
            axis.set(xticks=range(2, 10), yticks=range(60, 101, 10))
            axis.spines[["top", "right"]].set_visible(False)
        axes[0][0].set_ylabel("same next token as fp16, %\n(higher is better)")
        axes[0][0].legend(loc="lower right", frameon=False)
        figure.tight_layout()
        check_labels(figure)
        figure.savefig(path, transparent=True, metadata={"Date": None})
    plt.close(figure)


def check_labels(figure: Figure) -> None:
    figure.draw_without_rendering()
    texts = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text()]
    boxes = [(text.get_text(), text.get_window_extent()) for text in texts]
    wrong = [f"{name!r} leaves the picture" for name, box in boxes if figure.bbox.count_contains(box.corners()) < 4]
    wrong += [f"{one!r} overlaps {other!r}" for (one, a), (other, b) in combinations(boxes, 2) if a.overlaps(b)]
    for line in (line for axis in figure.axes for line in axis.lines):
        path = line.get_transform().transform_path(line.get_path())
        wrong += [f"{name!r} lies on a line" for name, box in boxes if path.intersects_bbox(box, filled=False)]
    if wrong:
        raise ValueError("; ".join(wrong))


if __name__ == "__main__":
    plot(RESULTS / "frontier.svg")
