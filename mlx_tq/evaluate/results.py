"""Output of a measurement: a table on stdout, a JSON file that can be resumed, a progress bar on stderr."""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from math import isfinite
from pathlib import Path
from typing import Any

from rich.console import Console

from mlx_tq import __version__
from mlx_tq.cli import screen
from mlx_tq.cli.fast_blas import describe_blas
from mlx_tq.cli.options import STDOUT, check_writable
from mlx_tq.errors import ConfigError
from mlx_tq.files import atomic_write

Record = dict[str, Any]  # one row of results, as JSON
Columns = Mapping[str, Callable[[Record], str]]  # how a table shows a record, by title
Advance = Callable[[int], None]  # receives the number of units of work done


def _without_infinity(row: Record) -> Record:
    """Return a row with null for numbers that JSON lacks, such as an error over one answer."""
    return {name: None if isinstance(value, float) and not isfinite(value) else value for name, value in row.items()}


class Results:
    """Records by key, written to `target` after each addition: a JSON file, `-` for stdout at the end, or None.

    With `resume` they continue those of an existing file, which is refused if its settings differ.
    """

    def __init__(self, target: str | None, command: str, settings: Mapping[str, Any], *, resume: bool = False) -> None:
        self.rows: dict[str, Record] = {}
        self._target = target
        self._file = None if target in (None, STDOUT) else Path(str(target))
        self._head = {
            "command": command,
            "settings": json.loads(json.dumps(settings)),
            "versions": {"mlx_tq": __version__, "mlx": version("mlx"), "mlx_lm": version("mlx-lm")},
            "blas": describe_blas(),
        }
        if self._file is None:
            return
        check_writable("--json", self._file, "file")
        if not resume or not self._file.exists():
            return
        try:
            saved = json.loads(self._file.read_text(encoding="utf-8"))
            compared = ("command", "settings", "versions")
            different = [name for name in compared if saved[name] != self._head[name]]
            self.rows = dict(saved["results"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{target} holds no results to resume ({error!r}). Remove it or name another.") from error
        if different:
            raise ConfigError(f"{target} holds results of other {different[-1]}. Remove it or name another file.")

    def add(self, key: str, row: Record) -> None:
        self.rows[key] = row
        if self._file is None:
            return
        try:
            with atomic_write(self._file) as temporary:
                temporary.write_text(self.dumps(), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{self._target} cannot be written: {error}. Name another file.") from error

    def dumps(self) -> str:
        head = json.dumps(self._head, indent=1).removesuffix("\n}")
        lines = [f"  {json.dumps(key)}: {json.dumps(_without_infinity(row))}" for key, row in self.rows.items()]
        return head + ',\n "results": {\n' + ",\n".join(lines) + "\n }\n}\n"

    def show(self, title: str, columns: Columns, rows: Sequence[Record], note: str = "") -> None:
        """Print the rows as a table, or the JSON where that goes to stdout."""
        if self._target == STDOUT:
            sys.stdout.write(self.dumps())
            return
        console = Console(highlight=False, width=None if sys.stdout.isatty() else 200)
        table = screen.table(title, *columns)
        for row in rows:
            table.add_row(*(show(row) for show in columns.values()))
        console.print(table)
        if note:
            console.print(note, style="dim", soft_wrap=True)
