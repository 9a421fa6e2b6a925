"""A table of measurements as Markdown: how it was measured, then its rows."""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "results"
EMBEDDED = "the embedded model (7 million weights)"
Record = dict[str, Any]


@dataclass(frozen=True)
class Table:
    """A table with what a reader needs to judge it, and to make it again.

    Attributes:
        source: file of benchmarks/results, without its folder.
        command: that measured it.
        machine: it ran on.
        columns: their heads.
        rows: of cells, as many as columns.
        model: it was measured on.
        also: further files.
    """

    source: str
    command: str
    machine: str
    columns: list[str]
    rows: list[list[str]]
    model: str = EMBEDDED
    also: tuple[str, ...] = ()

    def __str__(self) -> str:
        files = ", ".join(f"[{name}](../../benchmarks/results/{name})" for name in (self.source, *self.also))
        about = f"*Measured on {self.model}; {self.machine}; {files}.*"
        return "\n".join(["```", self.command, "```", "", about, "", lines(self.columns, self.rows)])


def by_row(source: str, columns: dict[str, Callable[[Record], str]], model: str = EMBEDDED, **fields: Any) -> Table:
    """The rows of a JSON with these fields, one for one: under each head what is shown of a row."""
    about = report(source)
    rows = [row for row in about["rows"] if fields.items() <= row.items()]
    cells = [[show(row) for show in columns.values()] for row in rows]
    return Table(source, about["command"], machine(about), list(columns), cells, model=model)


def with_missing(table: Table, missing: list[str]) -> str:
    """The table, and below it what was not measured."""
    return f"{table}\n\nNot measured: {', '.join(missing)}." if missing else str(table)


def lines(columns: list[str], rows: list[list[str]]) -> str:
    """The table itself.

    Raises:
        ValueError: no rows, or one that has not as many cells as there are columns.
    """
    wrong = [row for row in rows if len(row) != len(columns)]
    if wrong or not rows:
        raise ValueError(f"no rows, or rows that do not fit the columns {columns}: {wrong[:1]}")
    return "\n".join(f"| {' | '.join(row)} |" for row in (columns, ["---"] * len(columns), *rows))


def report(name: str) -> Record:
    """A JSON of benchmarks/results."""
    found: Record = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    return found


def machine(about: Record) -> str:
    """The machine that a report names: its processor, or its backend, and the versions of mlx."""
    about = {**about, **about.get("environment", {}), **about.get("machine", {}), **about.get("versions", {})}
    names = {name.replace("_", "-"): value for name, value in about.items()}
    if "processor" in names:
        return f"{names['cores']} cores of {names['processor']}"
    where = f"{names['backend'].upper()} ({names['device']})" if "backend" in names else "CPU"
    return f"{where}, mlx {names['mlx']}, mlx-lm {names['mlx-lm']}"


def machines(names: Iterable[str]) -> str:
    """Those that several files name, each once."""
    return "; ".join(dict.fromkeys(machine(report(name)) for name in names))


def in_order(records: Iterable[Record], field: str) -> list[Any]:
    """The values of a field, each once, in the order of the records."""
    return list(dict.fromkeys(record[field] for record in records))
