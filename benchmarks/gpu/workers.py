"""Processes that compile kernels at the same time, which takes longer than running them, on CUDA by far.

    python -m benchmarks.gpu.workers comparisons|compile NUMBER COUNT FILE [--dry]

Each does every COUNT-th piece of the work that FILE does not have yet, and prints a line of JSON for each piece.
mlx writes compiled kernels bit by bit into a folder, so each process has its own; `run_workers` joins them.
"""

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import mlx.core as mx

from benchmarks.gpu.attention import layer_cells
from benchmarks.gpu.results import Results
from benchmarks.gpu.setting import Cells, Setting
from mlx_tq.bench.layer import measure_cell
from mlx_tq.bench.layer_caches import Cell, LayerArm
from mlx_tq.kernels import backend
from mlx_tq.kernels.selftest import check_kernels, kernel_cases

FOLDER = "MLX_PTX_CACHE_DIR"  # where mlx for CUDA keeps compiled kernels
DRY_COMPARISONS = 8
COMPILE_TOKENS, COMPILE_MEMORY = 1024, 1 << 28


def run_workers(kind: str, count: int, results: Results, seconds: float, *, dry: bool) -> dict[str, Any]:
    """Start the processes, put what they print into the results, and end them after some seconds."""
    reading, writing = os.pipe()
    command = [sys.executable, "-m", "benchmarks.gpu.workers", kind]
    processes, folders = [], []
    for number in range(count):
        folder = Path(f"{os.environ[FOLDER]}-{kind}-{number}")
        folders.append(folder)
        words = [*command, str(number), str(count), str(results.path), *(["--dry"] if dry else [])]
        environment = {**os.environ, FOLDER: str(folder)}
        processes.append(subprocess.Popen(words, stdout=writing, env=environment))
    os.close(writing)
    timer = threading.Timer(seconds, lambda: [process.kill() for process in processes])
    timer.daemon = True
    timer.start()
    with os.fdopen(reading) as lines:
        for line in lines:
            if line.startswith('{"key": ') and line.endswith("}\n"):  # not the last line of one that was ended
                piece = json.loads(line)
                results.put(piece.pop("key"), piece)
    timer.cancel()
    codes = [process.wait() for process in processes]
    for folder in folders:
        _join_folder(folder)
    return {"processes": count, "complete": not any(codes)}


def _join_folder(folder: Path) -> None:
    """Move compiled kernels to the program's own folder; mlx writes the source last, so those without are parts."""
    for source in folder.rglob("*.cu"):
        for file in source.parent.glob(f"{source.stem}.*"):
            target = Path(os.environ[FOLDER]) / file.relative_to(folder)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, target)
    shutil.rmtree(folder, ignore_errors=True)


def comparisons(setting: Setting) -> Cells:
    """Yield comparisons of kernels with their reference implementations."""
    for kernel, case, call in islice(kernel_cases(setting.backend), DRY_COMPARISONS if setting.dry else None):
        yield f"comparisons/{kernel}, {case}", partial(compare, setting, kernel, case, call)


def compare(setting: Setting, kernel: str, case: str, call: Callable[[], list[mx.array]]) -> dict[str, Any]:
    (check,) = check_kernels(setting.backend, [(kernel, case, call)])
    return {"difference": check.difference, "allowed": check.allowed, "passed": check.passed}


def compilations(setting: Setting) -> Cells:
    """Yield a short run of every arm of each shape and number of queries: mlx compiles some of its own kernels too."""
    pieces = {
        (*cell.shape, cell.length, arm.name): (cell._replace(tokens=COMPILE_TOKENS, batch=1), arm)
        for _, cell, arms in layer_cells(setting)
        for arm in arms
    }
    for key, (cell, arm) in pieces.items():
        yield f"compiled/{key}", partial(compile_arm, cell, arm)


def compile_arm(cell: Cell, arm: LayerArm) -> dict[str, Any]:
    return {"failed": measure_cell(cell, [arm], rounds=1, seconds=0, memory=COMPILE_MEMORY).skipped_arms}


def main() -> None:
    kind, number, count, path, *flags = sys.argv[1:]
    setting = Setting(dry=bool(flags))
    with backend.using(setting.backend):
        results = Results(Path(path), dry=setting.dry)
        pieces = comparisons(setting) if kind == "comparisons" else compilations(setting)
        for key, run in islice(pieces, int(number), None, int(count)):
            if not results.has(key):
                try:
                    piece = run()
                except Exception as error:  # noqa: BLE001  the other pieces are still to be run
                    piece = {"error": f"{type(error).__name__}: {error}"[:400]}
                print(json.dumps({"key": key, **piece}), flush=True)


if __name__ == "__main__":
    main()
