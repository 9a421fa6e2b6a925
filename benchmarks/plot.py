"""Plot JSON reports of `mlx_tq.bench`, of one layer or a model, and of `benchmarks.kernels.bench_kernels`, as SVG."""

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

# Our profiles in blues, mlx-lm's arms in grays.
COLORS = {
    "fp16": "#3a3a3a",
    "off": "#3a3a3a",
    "kv-bits 8": "#8a8a8a",
    "kv-bits 4": "#bdbdbd",
    "safe": "#08519c",
    "balanced": "#3182bd",
    "small": "#6baed6",
}


def plot_decode_attention(report: dict[str, Any], path: Path) -> None:
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
            axis.bar(places, medians, width, yerr=spread, label=arm, color=COLORS.get(arm), error_kw={"lw": 0.8})
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


def plot_model(report: dict[str, Any], path: Path) -> None:
    figures = [figure for figure in report["figures"] if figure["batch"] == 1]
    dtypes = list(dict.fromkeys(figure["dtype"] for figure in figures))
    arms = list(dict.fromkeys(figure["arm"] for figure in figures))
    measured = (("prefill_tps", 1, "read, tok/s"), ("decode_tps", 1, "answer, tok/s"), ("kv_nbytes", 1e9, "KV, GB"))
    figure, axes = plt.subplots(len(dtypes), 3, figsize=(11, 3.2 * len(dtypes)), squeeze=False)
    for row, dtype in zip(axes, dtypes, strict=True):
        for axis, (name, unit, title) in zip(row, measured, strict=True):
            for arm in arms:
                found = [(f["tokens"], f[name] / unit) for f in figures if f["arm"] == arm and f["dtype"] == dtype]
                axis.plot(*zip(*found, strict=True), marker="o", label=arm, color=COLORS.get(arm))
            axis.set(title=f"{title} ({dtype})", xscale="log", ylim=0, xlabel="tokens of the prompt")
            axis.spines[["top", "right"]].set_visible(False)
    figure.legend(*axes[0][0].get_legend_handles_labels(), ncols=len(arms), loc="lower center", frameon=False)
    about = report["environment"]
    figure.suptitle(f"{report['model']} on {about['device']} ({about['backend']}, {about['blas']})", fontsize=10)
    figure.tight_layout(rect=(0, 0.2 / len(dtypes), 1, 1))
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def plot_kernels(report: dict[str, Any], path: Path) -> None:
    rows = report["kernels"][::-1]
    field, label = ("gb_per_s", "GB/s") if "gb_per_s" in rows[0] else ("lane_operations", "lane operations per token")
    figure, axis = plt.subplots(figsize=(6, 0.4 * len(rows) + 1))
    bars = axis.barh([row["kernel"] for row in rows], [row[field] for row in rows], color=COLORS["balanced"])
    axis.bar_label(bars, fmt="%.0f", padding=3)
    axis.set(xlabel=label)
    axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


PLOTS = {"timings": plot_decode_attention, "figures": plot_model, "kernels": plot_kernels}


def main() -> None:
    for path in map(Path, sys.argv[1:]):
        report = json.loads(path.read_text(encoding="utf-8"))
        plot = next(plot for field, plot in PLOTS.items() if field in report)
        plot(report, path.with_suffix(".svg"))


if __name__ == "__main__":
    main()
