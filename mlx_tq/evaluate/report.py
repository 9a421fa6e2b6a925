"""What a measurement leaves: a table on stdout, a JSON file that can be resumed, a progress bar on stderr."""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from mlx_tq import __version__
from mlx_tq.cli import screen
from mlx_tq.cli.environment import blas
from mlx_tq.errors import ConfigError
from mlx_tq.evaluate.passes import Advance
from mlx_tq.files import atomic_write

STDOUT = "-"


class Results:
    """Rows of results by key, written to a JSON file after each.

    Attributes:
        rows: what has been measured, by key.
    """

    def __init__(self, target: str | None, command: str, settings: Mapping[str, Any], *, resume: bool = False) -> None:
        """Open the results.

        Args:
            target: a file, `-` for stdout at the end, or None.
            command: what is measured.
            settings: under which; plain data.
            resume: take up the rows of an existing file.

        Raises:
            ConfigError: the file cannot be written, or holds something else that must not be mixed in.
        """
        self.rows: dict[str, dict[str, Any]] = {}
        self._lines: dict[str, str] = {}  # the rows as they are written
        self._target = target
        self._head = {
            "command": command,
            "settings": json.loads(json.dumps(settings)),
            "versions": {"mlx_tq": __version__, "mlx": version("mlx"), "mlx_lm": version("mlx-lm")},
            "blas": blas(),
        }
        if target in (None, STDOUT):
            return
        path = Path(str(target))
        if not path.parent.is_dir():
            raise ConfigError(f"{path} cannot be written: there is no folder {path.parent}. Make it first.")
        if resume and path.exists():
            for key, row in self._load(path).items():
                self._keep(key, row)

    def _load(self, path: Path) -> dict[str, dict[str, Any]]:
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            same = all(found[name] == self._head[name] for name in ("command", "settings"))
            rows: dict[str, dict[str, Any]] = found["results"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path} holds no results to resume ({error!r}). Remove it or name another.") from error
        if not same:
            raise ConfigError(f"{path} holds results of other settings. Remove it or name another file.")
        return rows

    def add(self, key: str, row: dict[str, Any]) -> None:
        """Keep a row, on disk too."""
        self._keep(key, row)
        if self._target not in (None, STDOUT):
            self._write(Path(str(self._target)))

    def _keep(self, key: str, row: dict[str, Any]) -> None:
        self.rows[key] = row
        self._lines[key] = f"  {json.dumps(key)}: {json.dumps(row)}"

    def _write(self, path: Path) -> None:
        try:
            with atomic_write(path) as temporary:
                temporary.write_text(self.dumps(), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error}. Name another file.") from error

    def dumps(self) -> str:
        """The JSON text, a row a line."""
        head = json.dumps(self._head, indent=1).removesuffix("\n}")
        return head + ',\n "results": {\n' + ",\n".join(self._lines.values()) + "\n }\n}\n"

    def show(self, title: str, columns: Sequence[str], lines: Sequence[Sequence[str]], note: str = "") -> None:
        """Print a table, or the JSON where that goes to stdout."""
        if self._target == STDOUT:
            sys.stdout.write(self.dumps())
            return
        console = Console(highlight=False, width=None if sys.stdout.isatty() else 200)
        shown = screen.table(title, *columns)
        for line in lines:
            shown.add_row(*line)
        console.print(shown)
        if note:
            console.print(note, style="dim", soft_wrap=True)


@contextmanager
def progress(label: str, total: int) -> Iterator[Advance]:
    """A progress bar; yields a function that is told how much was done."""
    if not screen.console.is_terminal:
        yield lambda done: None
        return
    columns = (TextColumn(label), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=screen.console, transient=True) as shown:
        task = shown.add_task(label, total=total)
        yield lambda done: shown.advance(task, done)
