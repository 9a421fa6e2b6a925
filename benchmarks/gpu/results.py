"""The JSON of a run: one entry a cell, written after every cell, so that a run that was killed goes on where it was."""

import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_tq.bench.machine import hide_home, machine_state
from mlx_tq.cli.diagnostics import environment
from mlx_tq.files import atomic_write
from mlx_tq.kernels.gpu import kernels_folder

ATTEMPTS = 3  # at a cell that ends the program
REMEDY = "Name another file with --json, or remove this one."
Cell = dict[str, Any]  # what was measured, or why it was not: "error", "skipped" or "not_measured"


class Results:
    """Cells by key, in the order in which they were measured."""

    def __init__(self, path: Path, *, dry: bool) -> None:
        self.path = path
        identity = {"dry": dry, "kernels": _hash_kernels(), **environment()}
        self.content: dict[str, Any] = {"command": "python -m benchmarks.gpu", "environment": identity}
        self.content |= {"states": {}, "attempts": {}, "cells": {}}
        if path.exists():
            before = json.loads(path.read_text(encoding="utf-8"))
            here = json.loads(_dump(identity))
            for name, value in before["environment"].items():
                if here.get(name) != value:
                    difference = f"{name} {value!r}, and here it is {here.get(name)!r}"
                    raise SystemExit(f"{path} has results with {difference}. {REMEDY}")
            self.content = before

    @property
    def cells(self) -> dict[str, Cell]:
        return self.content["cells"]  # type: ignore[no-any-return]

    @property
    def spent(self) -> float:
        """The seconds that all cells took."""
        return sum(cell.get("took", 0) for cell in self.cells.values())

    def has(self, key: str) -> bool:
        return key in self.cells and "not_measured" not in self.cells[key]

    def put(self, key: str, cell: Cell) -> None:
        self.cells[key] = cell
        self._write()

    def note_state(self, when: str) -> None:
        """Record low-power mode, thermal state and swap."""
        self.content["states"][when] = machine_state()
        self._write()

    def measure(self, key: str, run: Callable[[], Cell]) -> None:
        attempts = self.content["attempts"]
        if attempts.get(key, 0) >= ATTEMPTS:
            self.put(key, {"error": f"the program ended {ATTEMPTS} times while it measured this"})
            return
        attempts[key] = attempts.get(key, 0) + 1
        self._write()
        started = time.perf_counter()
        try:
            cell = run()
        except Exception as error:  # noqa: BLE001  the other cells are still to be measured
            cell = {"error": f"{type(error).__name__}: {error}"[:400]}
        mx.clear_cache()
        del attempts[key]
        self.put(key, cell | {"took": round(time.perf_counter() - started, 2)})

    def _write(self) -> None:
        with atomic_write(self.path) as temporary:
            temporary.write_text(_dump(self.content) + "\n", encoding="utf-8")


def _dump(content: dict[str, Any]) -> str:
    return hide_home(json.dumps(content, indent=1))


def _hash_kernels() -> str:
    """Return a hash of the kernels' text, so that figures of different kernels are not mixed."""
    texts = [file.read_bytes() for file in sorted(kernels_folder().iterdir(), key=lambda file: file.name)]
    return hashlib.sha256(b"".join(texts)).hexdigest()[:12]
