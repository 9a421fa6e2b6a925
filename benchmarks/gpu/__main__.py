"""Measure everything that a GPU has to tell about mlx_tq: `python -m benchmarks.gpu`."""

import argparse
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.gpu.results import Results
    from benchmarks.gpu.setting import Cells, Setting

# The part of the time by the end of which each part of the run starts no further cell, in the order in which they run.
PARTS = {"comparisons": 0.14, "attention": 0.56, "decode": 0.78, "prefill": 0.88, "eviction": 0.92, "tune": 1.0}
SECONDS = {"cuda": 480, "metal": 900, "reference": 900}
COMPARISONS, COMPILING = 60, 90  # seconds at most


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"some of {', '.join(PARTS)} (default: all)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="results (default: benchmarks/results/gpu_CHIP.json)")
    parser.add_argument("--seconds", type=float, help="for all parts (default: 480 on CUDA, 900 on a Mac)")
    parser.add_argument("--processes", type=int, help="that compile kernels (default: CPUs on CUDA, 1 on a Mac)")
    parser.add_argument("--dry", action="store_true", help="run everything in tiny sizes without a GPU; needs --json")
    return parser


def main(words: Sequence[str] | None = None) -> None:
    parser = build_parser()
    args = parser.parse_args(words)
    if unknown := sorted(set(args.parts) - set(PARTS)):
        parser.error(f"unknown parts: {', '.join(unknown)}; valid are {', '.join(PARTS)}")
    if args.dry and args.json is None:
        parser.error("--dry needs --json FILE")
    # Before mlx is loaded: in TF32, mlx's default on CUDA, the reference implementation is off by up to 4e-4.
    os.environ.setdefault("MLX_ENABLE_TF32", "0")
    os.environ.setdefault("MLX_PTX_CACHE_DIR", str(Path.home() / ".cache" / "mlx_tq" / "ptx"))

    from benchmarks.gpu.results import Results
    from benchmarks.gpu.setting import Setting
    from benchmarks.gpu.table import print_tables
    from mlx_tq.kernels import backend

    setting = Setting(dry=args.dry)
    if setting.backend == "reference" and not args.dry:
        sys.exit("this needs a GPU: a Mac, or pip install 'mlx[cuda13]' with an NVIDIA GPU; --dry tries it without one")
    with backend.using(setting.backend):  # which raises where a kernel fails, and never runs the reference instead
        results = Results((args.json or default_path()).resolve(), dry=args.dry)
        seconds = args.seconds or SECONDS[setting.backend]
        processes = args.processes or (os.cpu_count() or 1 if setting.backend == "cuda" else 1)
        results.note_state("before")
        for part in PARTS:
            if part in (args.parts or PARTS):
                run_part(part, results, setting, seconds, processes)
                results.note_state(f"after {part}")
    print_tables(results.content)
    print(f"written: {results.path}")


def run_part(part: str, results: "Results", setting: "Setting", seconds: float, processes: int) -> None:
    """Measure the cells of a part that the results do not have yet, until its time is over."""
    limit = PARTS[part] * seconds
    if part == "comparisons":
        run_processes(results, setting, processes)
    for name, measure in part_cells(part)(setting):
        key = f"{part}/{name}"
        if results.has(key):
            continue
        if results.spent >= limit:
            results.put(key, {"not_measured": f"{limit:.0f} of {seconds:.0f} s were over"})
            continue
        print(f"{results.spent:5.0f} s  {key}", flush=True)
        results.measure(key, measure)


def run_processes(results: "Results", setting: "Setting", processes: int) -> None:
    """Compare kernels in processes of their own, and on CUDA compile those that will be timed."""
    from benchmarks.gpu.workers import run_workers

    kinds = {"comparisons": COMPARISONS} | ({"compile": COMPILING} if setting.backend == "cuda" else {})
    for kind, most in kinds.items():
        key = f"comparisons/all: {kind}"
        if not results.has(key):
            print(f"{results.spent:5.0f} s  {key}", flush=True)
            started = time.perf_counter()
            cell = run_workers(kind, processes, results, most, dry=setting.dry)
            results.put(key, cell | {"took": round(time.perf_counter() - started, 2)})


def part_cells(part: str) -> Callable[["Setting"], "Cells"]:
    from benchmarks.gpu import attention, limits, others, steps

    cells: dict[str, Callable[[Any], Cells]] = {
        "comparisons": limits.cells,
        "attention": attention.cells,
        "decode": steps.decode_cells,
        "prefill": steps.prefill_cells,
        "eviction": others.eviction_cells,
        "tune": others.tune_cells,
    }
    return cells[part]


def default_path() -> Path:
    from benchmarks.reports import RESULTS
    from mlx_tq.cli.diagnostics import environment

    return RESULTS / f"gpu_{re.sub('[^a-z0-9]+', '-', environment()['device'].lower()).strip('-')}.json"


if __name__ == "__main__":
    main()
