"""`mlx_tq.bench --report`: all that a machine has to say, in one Markdown file to attach to an issue."""

import json
from dataclasses import asdict
from typing import Any

from mlx_tq.bench.model import Figure
from mlx_tq.bench.tables import markdown
from mlx_tq.cli.environment import environment
from mlx_tq.cli.runs.doctor import Check
from mlx_tq.kernels.thresholds import KernelThresholds

COLUMNS = """KV is what the caches' arrays take after the answer, held all memory beyond that before the prompt, and
peak the most at once, weights included. Each line is the median of its rounds; the lines were run in turn."""


def report(
    model: str, checks: list[Check], best: KernelThresholds, figures: list[Figure], left_out: dict[str, str]
) -> str:
    """The file's text.

    Args:
        model: that was measured.
        checks: of the doctor.
        best: thresholds of this machine.
        figures: of the model.
        left_out: arms that could not be run, and why.
    """
    about = environment()
    failed = [check for check in checks if not check.passed]
    parts = [
        "# mlx_tq on this machine",
        _list(about),
        "## Self-tests",
        f"{len(checks) - len(failed)} of {len(checks)} passed.",
        *([_list({check.name: f"{check.measured}, expected {check.expected}" for check in failed})] if failed else []),
        "## Thresholds",
        _list(asdict(best)),
        f"## {model}",
        COLUMNS,
        markdown(figures),
        *([_list(left_out)] if left_out else []),
        "## The same as JSON",
        f"```json\n{json.dumps(data(model, figures, left_out) | {'thresholds': asdict(best)})}\n```",
    ]
    return "\n\n".join(parts) + "\n"


def data(model: str, figures: list[Figure], left_out: dict[str, str]) -> dict[str, Any]:
    """Figures of a model, with the machine that they belong to, as plain data."""
    return {
        "model": model,
        "environment": environment(),
        "figures": [asdict(figure) for figure in figures],
        "left_out": left_out,
    }


def _list(entries: dict[str, Any]) -> str:
    return "\n".join(f"- {name}: {value}" for name, value in entries.items())
