"""Plot a JSON of `mlx_tq.evaluate sweep`: what each policy costs and keeps, by the share of tokens that stays."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

from mlx_tq.evaluate.needle import VOID
from mlx_tq.evaluate.sweep_table import survival

# TriAttention in blues, the opposite sign in red, controls in greys.
COLOURS = {
    "triattention:calibration=text": "#08519c",
    "triattention:calibration=questions.safetensors": "#238b45",
    "triattention:mode=v1:calibration=questions.safetensors": "#a1d99b",
    "triattention:calibration=questions.safetensors:aggregation=v3": "#74c476",
    "expected_attention:calibration=questions.safetensors": "#006d2c",
    "triattention:calibration=text:score_unrotated_dims=on": "#6baed6",
    "triattention:calibration=text:evict=highest": "#cb181d",
    "triattention:calibration=text:evict=highest:score_unrotated_dims=on": "#fb6a4a",
    "triattention:calibration=text:mode=v2": "#9ecae1",
    "triattention:calibration=text:mode=v1": "#3182bd",
    "random": "#3a3a3a",
    "recency": "#8a8a8a",
    "streaming": "#a6a6a6",
    "knorm": "#bdbdbd",
}

LABELS = {
    "triattention:calibration=text": "v3",
    "triattention:calibration=text:mode=v1": "v1",
    "triattention:calibration=text:mode=v2": "v2",
    "triattention:calibration=questions.safetensors": "v3, questions",
    "triattention:mode=v1:calibration=questions.safetensors": "v1, questions",
    "triattention:calibration=questions.safetensors:aggregation=v3": "v3 aggregation, questions",
    "expected_attention:calibration=questions.safetensors": "expected_attention, questions",
    "triattention:calibration=text:evict=highest": "v3, highest leave",
}

_LEAST = 5  # retentions of a line

Record = dict[str, Any]


def _text(records: list[Record], field: str) -> float | None:
    found = [record[field] for record in records if field in record]
    return mean(found) if found else None


def _alive(records: list[Record]) -> float | None:
    found = [survival(record) for record in records if "kind" in record]
    return 100 * mean(found) if found else None


def _passed(records: list[Record]) -> float | None:
    found = [record["verdict"] == "PASS" for record in records if record.get("verdict", VOID) != VOID]
    return 100 * mean(found) if found else None


PANELS: dict[str, Callable[[list[Record]], float | None]] = {
    "change of perplexity, %": lambda records: _text(records, "delta"),
    "KL divergence, nats": lambda records: _text(records, "kld"),
    "needle tokens alive, %": _alive,
    "needles found, %": _passed,
}


def _usual(records: list[Record], *fields: str) -> list[Record]:
    """Those that agree in these fields with most."""
    about = [tuple(record.get(field) for field in fields) for record in records]
    most = Counter(about).most_common(1)
    return [record for record, found in zip(records, about, strict=True) if found == most[0][0]]


def plot_sweep(report: dict[str, Any], path: Path) -> None:
    """Four panels, of the scenes and the texts that were measured most.

    A line for each policy that evicts token by token and was measured at five retentions or more.
    """
    records = [record for record in report["results"].values() if record.get("granularity") == 1]
    asked = _usual([record for record in records if "kind" in record], "kind", "length", "once")
    read = _usual([record for record in records if "kind" not in record], "tokens", "trigger")
    records, variants = [], []
    for variant in dict.fromkeys(record["variant"] for record in [*asked, *read]):
        own = [_usual([r for r in kind if r["variant"] == variant], "sinks") for kind in (asked, read)]
        if len({record["retention"] for kind in own for record in kind}) >= _LEAST:
            variants.append(variant)
            records += [record for kind in own for record in kind]
    figure, axes = plt.subplots(1, len(PANELS), figsize=(3.4 * len(PANELS), 3.4))
    for axis, (title, measure) in zip(axes, PANELS.items(), strict=True):
        for variant in variants:
            own = [record for record in records if record["variant"] == variant]
            points = []
            for retention in sorted({record["retention"] for record in own}):
                found = measure([record for record in own if record["retention"] == retention])
                if found is not None:
                    points.append((retention, found))
            if len(points) > 1:
                name = variant.removesuffix(":aggregation=paper")
                label = LABELS.get(name, variant)
                axis.plot(*zip(*points, strict=True), marker="o", ms=3, label=label, color=COLOURS.get(name))
        axis.set(title=title, xlabel="tokens that stay, %")
        axis.title.set_fontsize(9)
        axis.invert_xaxis()
        axis.spines[["top", "right"]].set_visible(False)
    names = dict(pair for axis in axes for pair in zip(*reversed(axis.get_legend_handles_labels()), strict=True))
    figure.legend(names.values(), names.keys(), ncols=6, loc="lower center", frameon=False, fontsize=8)
    figure.tight_layout(rect=(0, 0.1, 1, 1))
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
