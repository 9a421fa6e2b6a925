"""Plot JSON reports of `mlx_tq.bench` and `mlx_tq.evaluate sweep` beside them, as SVG."""

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from plot_sweep import plot_sweep

# Our profiles in blues, mlx-lm's arms in greys.
COLOURS = {
    "fp16": "#3a3a3a",
    "kv-bits 8": "#8a8a8a",
    "kv-bits 4": "#bdbdbd",
    "safe": "#08519c",
    "balanced": "#3182bd",
    "small": "#6baed6",
}


def plot_decode_attention(report: dict[str, Any], path: Path) -> None:
    """One panel a type: milliseconds of one call on a log scale, grouped by context."""
    timings = report["timings"]
    dtypes = list(dict.fromkeys(t["dtype"] for t in timings))
    contexts = sorted({t["tokens"] for t in timings})
    arms = list(dict.fromkeys(t["arm"] for t in timings))
    figure, axes = plt.subplots(1, len(dtypes), figsize=(4.2 * len(dtypes), 3.4), sharey=True, squeeze=False)
    width = 0.8 / len(arms)
    for axis, dtype in zip(axes[0], dtypes, strict=True):
        for i, arm in enumerate(arms):
            found = {t["tokens"]: t for t in timings if t["arm"] == arm and t["dtype"] == dtype}
            places = [k - 0.4 + (i + 0.5) * width for k in range(len(contexts))]
            medians = [1e3 * found[n]["median"] for n in contexts]
            spread = [
                [1e3 * (found[n]["median"] - found[n]["low"]) for n in contexts],
                [1e3 * (found[n]["high"] - found[n]["median"]) for n in contexts],
            ]
            axis.bar(places, medians, width, yerr=spread, label=arm, color=COLOURS.get(arm), error_kw={"lw": 0.8})
        axis.set(title=dtype, yscale="log", xticks=range(len(contexts)), xlabel="tokens in the cache")
        axis.set_xticklabels([f"{n:,}" for n in contexts])
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylabel("ms a call, one layer")
    figure.legend(*axes[0][0].get_legend_handles_labels(), ncols=len(arms), loc="lower center", frameon=False)
    about, shape = report["environment"], report["shape"]
    figure.suptitle(
        f"Decode attention on {about['device']} ({about['backend']}): {shape['query_heads']} query heads, "
        f"{shape['kv_heads']} KV heads, D = {shape['head_dim']}",
        fontsize=10,
    )
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def main() -> None:
    """Plot each report named on the command line."""
    for name in sys.argv[1:]:
        path = Path(name)
        report = json.loads(path.read_text(encoding="utf-8"))
        plot = plot_sweep if report.get("command") == "sweep" else plot_decode_attention
        plot(report, path.with_suffix(".svg"))


if __name__ == "__main__":
    main()
