"""Plot how many times as fast as fp16 attention is by the context's length: `python -m benchmarks.gpu.plot FILE`.

Writes FILE with the ending .svg.
"""

import json
import statistics
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

from benchmarks.gpu.table import measured

SHOWN = ("fp16, queued writes", "kv-bits 4", "q8/tq4", "tq4/tq4")
INK = "#777777"  # legible on a white page and on a dark one; the background is transparent


def plot(path: Path) -> Path:
    content = json.loads(path.read_text(encoding="utf-8"))
    cells = [cell for cell in measured(content["cells"], "attention").values() if cell.get("timings")]
    alone = [cell for cell in cells if cell["batch"] == cell["length"] == 1]
    names = list(dict.fromkeys(cell["name"] for cell in alone))
    style = {"font.size": 9, "svg.hashsalt": "gpu", **dict.fromkeys(("text.color", "axes.labelcolor"), INK)}
    with plt.rc_context(style | dict.fromkeys(("xtick.color", "ytick.color", "axes.edgecolor"), INK)):
        figure, axes = plt.subplots(1, len(names), figsize=(3 * len(names), 3.2), sharey=True, squeeze=False)
        for axis, name in zip(axes[0], names, strict=True):
            draw(axis, [cell for cell in alone if cell["name"] == name])
        axes[0][0].set_ylabel("times as fast as fp16\n(higher is better)")
        axes[0][-1].legend(frameon=False)
        figure.suptitle(content["environment"]["device"])
        figure.tight_layout()
        target = path.with_suffix(".svg")
        figure.savefig(target, transparent=True, metadata={"Date": None})
    plt.close(figure)
    return target


def draw(axis: Any, cells: list[dict[str, Any]]) -> None:
    for arm in SHOWN:
        points = [
            (cell["tokens"], statistics.median(timing["ratios"]))
            for cell in cells
            for timing in cell["timings"]
            if timing["arm"] == arm
        ]
        axis.plot(*zip(*points, strict=True) if points else ([], []), "o-", ms=4, label=arm)
    shape = cells[0]["shape"]
    axis.axhline(1, color=INK, lw=0.8)
    axis.set(xscale="log", xlabel="tokens", title=f"{shape['query_heads']}/{shape['kv_heads']} of {shape['head_dim']}")


if __name__ == "__main__":
    print(plot(Path(sys.argv[1])))
