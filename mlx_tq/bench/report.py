"""Show the figures of a model as tables for a terminal and in Markdown, as JSON, and as a report for an issue."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from itertools import groupby
from typing import Any

from rich.table import Table

from mlx_tq.bench.model import Figure
from mlx_tq.cli.diagnostics import Check, environment
from mlx_tq.cli.screen import table
from mlx_tq.kernels.thresholds import KernelThresholds

_COLUMNS = """KV is the size of the caches' arrays after the answer, active all memory beyond that before the prompt,
and peak the maximum, weights included. Each line is the median of its rounds; the lines took turns."""


def _groups(figures: Iterable[Figure]) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """Yield title, columns and rows of the figures of each type and context; a row for each cache."""
    for (dtype, tokens), group in groupby(figures, key=lambda figure: (figure.dtype, figure.tokens)):
        figures_of_group = {(figure.arm, figure.batch): figure for figure in group}
        base = next(iter(figures_of_group.values()))
        batches = sorted({batch for _, batch in figures_of_group})
        columns = ["cache", "KV, GB", "active, GB", "peak, GB", "prefill, tok/s", "first token, s", "decode, tok/s"]
        columns += [*(f"batch {batch}, tok/s" for batch in batches[1:]), "speedup"]
        rows = []
        for arm in dict.fromkeys(arm for arm, _ in figures_of_group):
            alone = figures_of_group[arm, 1]
            row = [arm]
            row += [f"{nbytes / 1e9:.4f}" for nbytes in (alone.kv_nbytes, alone.active_nbytes, alone.peak_nbytes)]
            row += [f"{alone.prefill_tps or 0:.1f}", f"{alone.first_token or 0:.2f}"]
            for batch in batches:
                figure = figures_of_group.get((arm, batch))
                row.append("-" if figure is None else f"{figure.decode_tps:.1f}")
            rows.append([*row, f"{alone.decode_tps / base.decode_tps:.2f}"])
        yield f"{dtype}, {tokens:,} tokens", columns, rows


def model_tables(figures: list[Figure]) -> Iterator[Table]:
    for title, columns, rows in _groups(figures):
        shown = table(title, *columns)
        for row in rows:
            shown.add_row(*row)
        yield shown


def markdown_tables(figures: Iterable[Figure]) -> str:
    parts = []
    for title, columns, rows in _groups(figures):
        lines = [f"| {' | '.join(row)} |" for row in (columns, ["---"] * len(columns), *rows)]
        parts.append("\n".join([f"### {title}", "", *lines]))
    return "\n\n".join(parts)


def markdown_report(
    model: str, checks: list[Check], best: KernelThresholds, figures: list[Figure], skipped: dict[str, str]
) -> str:
    failed = {check.name: f"{check.measured}, expected {check.expected}" for check in checks if not check.passed}
    data = figures_as_dict(model, figures, skipped) | {"thresholds": asdict(best)}
    parts = [
        "# mlx_tq on this machine",
        _list(environment()),
        "## Self-tests",
        f"{len(checks) - len(failed)} of {len(checks)} passed.",
        _list(failed),
        "## Thresholds",
        _list(asdict(best)),
        f"## {model}",
        _COLUMNS,
        markdown_tables(figures),
        _list(skipped),
        "## The same as JSON",
        f"```json\n{json.dumps(data)}\n```",
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def figures_as_dict(model: str | None, figures: list[Figure], skipped: dict[str, str]) -> dict[str, Any]:
    """Return the figures of a model with its machine, as plain data."""
    rows = [asdict(figure) for figure in figures]
    return {"model": model, "environment": environment(), "figures": rows, "skipped": skipped}


def _list(entries: dict[str, Any]) -> str:
    return "\n".join(f"- {name}: {value}" for name, value in entries.items())
