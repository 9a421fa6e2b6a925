"""Tables of what was measured, and the report that users attach to an issue."""

import json
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from itertools import groupby
from typing import Any

from mlx_tq.bench.layer import UNSTEADY
from mlx_tq.bench.model import Figure
from mlx_tq.cli.diagnostics import Check, environment
from mlx_tq.cli.screen import human_bytes
from mlx_tq.kernels.thresholds import HeadShape, KernelThresholds, to_rows

_COLUMNS = """KV is the size of the caches' arrays after the answer, active all memory in use because of them, and peak
the maximum, weights included. Each line is the median of its rounds; the lines took turns."""


def figure_tables(figures: Iterable[Figure]) -> Iterator[tuple[str, list[str], list[list[str]]]]:
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
            row += [_number(alone.prefill_tps, 1), _number(alone.first_token, 2)]
            for batch in batches:
                figure = figures_of_group.get((arm, batch))
                row.append(_number(None if figure is None else figure.decode_tps, 1))
            rows.append([*row, f"{alone.decode_tps / base.decode_tps:.2f}"])
        yield f"{dtype}, {tokens:,} tokens", columns, rows


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def layer_table(timings: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return columns and rows of the timings of a cell; ratios are medians of the rounds."""
    anchor = timings[0]["arm"] if timings else "the first"
    columns = ["cache", "size", "ms", "low", "high", "GB/s", f"times as fast as {anchor}", "caches"]
    rows = []
    for timing in timings:
        times = [f"{1e3 * timing[name]:.3f}" for name in ("median", "low", "high")]
        speeds = [f"{timing['gb_per_s']:.1f}", f"{statistics.median(timing['ratios']):.2f}", str(timing["caches"])]
        rows.append([timing["arm"], human_bytes(timing["nbytes"]), *times, *speeds])
    return columns, rows


def markdown_tables(figures: Iterable[Figure]) -> str:
    return "\n\n".join(_markdown_table(*group) for group in figure_tables(figures))


def _markdown_table(title: str, columns: list[str], rows: list[list[str]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in (columns, ["---"] * len(columns), *rows)]
    return "\n".join([f"### {title}", "", *lines])


def markdown_report(
    model: str,
    checks: list[Check],
    best: dict[HeadShape, KernelThresholds],
    figures: list[Figure],
    skipped: dict[str, str],
    machine: dict[str, Any],
    layers: dict[str, Any],
) -> str:
    failed = {check.name: f"{check.measured}, expected {check.expected}" for check in checks if not check.passed}
    tuned = {"thresholds": to_rows(best), "machine": machine, "layers": layers}
    data = figures_as_dict(model, figures, skipped) | tuned
    parts = [
        "# mlx_tq on this machine",
        _list(environment() | machine),
        "## Self-tests",
        f"{len(checks) - len(failed)} of {len(checks)} passed.",
        _list(failed),
        "## Thresholds",
        *(f"Heads of {dim}, groups of {group}:\n\n{_list(asdict(values))}" for (dim, group), values in best.items()),
        f"## {model}",
        _COLUMNS,
        markdown_tables(figures),
        _list(skipped),
        *layer_parts(layers),
        "## The same as JSON",
        f"```json\n{json.dumps(data)}\n```",
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def layer_parts(layers: dict[str, Any]) -> list[str]:
    """Return the parts of the report on the attention of one layer."""
    floors = layers["floors"]
    launch, chained = (f"{1e6 * floors[name]:.0f} us" for name in ("launch_seconds", "chained_seconds"))
    parts = [
        "## The attention of one layer",
        f"Launch floor {launch} alone and {chained} in a chain; a plain copy moves {floors['copy_gb_per_s']:.0f} GB/s.",
    ]
    for cell in layers["cells"]:
        queries, heads, dim = cell["shape"]
        title = f"{queries}/{heads} heads of {dim}, {cell['tokens']:,} tokens{'' if cell['steady'] else UNSTEADY}"
        parts += [_markdown_table(title, *layer_table(cell["timings"])), _list(cell["skipped_arms"])]
    return parts


def figures_as_dict(model: str, figures: list[Figure], skipped: dict[str, str]) -> dict[str, Any]:
    rows = [asdict(figure) for figure in figures]
    return {"model": model, "environment": environment(), "figures": rows, "skipped": skipped}


def _list(entries: dict[str, Any]) -> str:
    return "\n".join(f"- {name}: {value}" for name, value in entries.items())
