"""Plot decode speed and KV memory by the length of the context: `make plot` writes contexts.svg."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from benchmarks.plots import INK, drawing
from benchmarks.reports import RESULTS
from benchmarks.tables import WHOLE_MODELS, Record, report

# Of each cache: its label, color and line.
CACHES = {
    "off": ("mlx-lm", INK, "o-"),
    "kv-bits 4": ("mlx_lm --kv-bits 4", "#c4621a", "s-"),
    "balanced": ("mlx_tq balanced", "#2f81f7", "o-"),
    "tq4/tq4": ("mlx_tq tq4/tq4", "#9a64d8", "^-"),
    "tq4/tcq3": ("mlx_tq tq4/tcq3", "#d0478f", "v-"),
}


def draw(axis: Axes, figures: list[Record], field: str, unit: float = 1) -> None:
    for arm, (_, color, line) in CACHES.items():
        points = sorted((figure["tokens"], figure[field] / unit) for figure in figures if figure["arm"] == arm)
        if points:  # mlx-lm does not quantize the caches of every model
            axis.plot(*zip(*points, strict=True), line, ms=4, color=color)
    for name, most in (("x", max(f["tokens"] for f in figures)), ("y", max(f[field] for f in figures) / unit)):
        ticks = MaxNLocator(4).tick_values(0, most)
        labels = [f"{tick:,g}" for tick in ticks]
        axis.set(**{f"{name}ticks": ticks, f"{name}ticklabels": labels, f"{name}lim": (0, ticks[-1])})


def measured_models() -> dict[str, list[Record]]:
    """Return the figures of each model that was measured at several contexts, in float32 and alone."""
    figures = {
        model: [figure for figure in report(name)["figures"] if (figure["dtype"], figure["batch"]) == ("float32", 1)]
        for name, model in WHOLE_MODELS.items()
    }
    return {model: some for model, some in figures.items() if len({figure["tokens"] for figure in some}) > 1}


def plot(path: Path) -> None:
    """Write the plot; raise ValueError if a label cannot be read."""
    models = measured_models()
    with drawing(path, 2, len(models), figsize=(9, 5), layout="constrained") as (figure, axes):
        for (model, figures), (speed, memory) in zip(models.items(), axes.T, strict=True):
            draw(speed, figures, "decode_tps")
            draw(memory, figures, "kv_nbytes", 1e6)
            speed.set_title(model)
            memory.set_xlabel("tokens in the context")
        axes[0][0].set_ylabel("decode, tokens per second\n(higher is better)")
        axes[1][0].set_ylabel("KV cache, MB\n(lower is better)")
        handles = [
            Line2D([], [], color=color, marker=line[0], ms=4, label=label) for label, color, line in CACHES.values()
        ]
        figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)


if __name__ == "__main__":
    plot(RESULTS / "contexts.svg")
