"""Figures of a model as a table, for a terminal and as Markdown."""

from collections.abc import Iterable
from itertools import groupby

from rich.table import Table

from mlx_tq.bench.model import Figure
from mlx_tq.cli.screen import table

Rows = list[list[str]]


def by_context(figures: Iterable[Figure]) -> Iterable[tuple[str, list[Figure]]]:
    """The figures of each type and context, under its title."""
    for (dtype, tokens), group in groupby(figures, key=lambda figure: (figure.dtype, figure.tokens)):
        yield f"{dtype}, {tokens:,} tokens", list(group)


def cells(figures: list[Figure]) -> tuple[list[str], Rows]:
    """Columns, and a row for each arm, of figures of one type and context."""
    batches = sorted({figure.batch for figure in figures})
    columns = ["cache", "KV, GB", "held, GB", "peak, GB", "read, tok/s", "first token, s"]
    columns += ["answer, tok/s", *(f"{batch} answers, tok/s" for batch in batches[1:]), "times off"]
    rows = []
    found = {(figure.arm, figure.batch): figure for figure in figures}
    base = figures[0]
    for arm in dict.fromkeys(figure.arm for figure in figures):
        alone = found[arm, 1]
        rates = [found.get((arm, batch)) for batch in batches]
        rows.append(
            [
                arm,
                *(f"{nbytes / 1e9:.4f}" for nbytes in (alone.kv_nbytes, alone.active_nbytes, alone.peak_nbytes)),
                f"{alone.prefill_tps or 0:.1f}",
                f"{alone.first_token or 0:.2f}",
                *("-" if figure is None else f"{figure.decode_tps:.1f}" for figure in rates),
                f"{alone.decode_tps / base.decode_tps:.2f}",
            ]
        )
    return columns, rows


def model_table(title: str, figures: list[Figure]) -> Table:
    """For a terminal."""
    columns, rows = cells(figures)
    shown = table(title, *columns)
    for row in rows:
        shown.add_row(*row)
    return shown


def markdown(figures: Iterable[Figure]) -> str:
    """All figures as Markdown, a table for each type and context."""
    parts = []
    for title, group in by_context(figures):
        columns, rows = cells(group)
        lines = [f"### {title}", "", _line(columns), _line(["---"] * len(columns)), *map(_line, rows)]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _line(row: list[str]) -> str:
    return f"| {' | '.join(row)} |"
