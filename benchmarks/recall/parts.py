"""A file of results that grows piece by piece, so that an interrupted run resumes."""

import json
from pathlib import Path
from typing import Any

from mlx_tq.cli.diagnostics import environment
from mlx_tq.files import atomic_write

# What is compared; `arms` has what each is.
ARMS = ("full", "evicted", "quoted", "words", "queries", "meaning", "both", "random", "oracle")


def one_a_line(report: dict[str, Any]) -> str:
    parts = []
    for name, value in report.items():
        records = isinstance(value, list) and value and isinstance(value[0], dict)
        text = "[\n" + ",\n".join(map(json.dumps, value)) + "\n]" if records else json.dumps(value)
        parts.append(f"{json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


class Part:
    """Results of one process; `done` are the numbers of the pieces in the file."""

    def __init__(self, path: Path, about: dict[str, Any]) -> None:
        self._path = path
        self._data: dict[str, Any] = {"about": about, "environment": environment(), "done": [], "rows": []}
        if path.exists():
            found = json.loads(path.read_text(encoding="utf-8"))
            if found["about"] != about:
                raise ValueError(f"{path} is of {found['about']}, not of {about}; name another file.")
            self._data = found
        self.done: set[int] = set(self._data["done"])

    def add(self, piece: int, rows: list[dict[str, Any]]) -> None:
        self._data["rows"] += rows
        self.done.add(piece)
        self._data["done"] = sorted(self.done)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(self._path) as temporary:
            temporary.write_text(one_a_line(self._data), encoding="utf-8")
        print(f"{self._path}: {len(self.done)} done, {len(self._data['rows'])} rows", flush=True)
