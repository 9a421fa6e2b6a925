"""Run the measurements on an NVIDIA GPU: `python -m benchmarks.gpu [attention] [selftest]`."""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

# The reference multiplies fp32 matrices in fp32; in TF32, mlx's default on CUDA, it is off by up to 4e-4.
EXACT = {"MLX_ENABLE_TF32": "0"}
PARTS = ("attention", "selftest")


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{' or '.join(PARTS)} (default: both)")
    parser.add_argument("--seconds", type=float, default=400, help="limit of each part; what it measured is written")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="that compile and test kernels")
    parser.add_argument("--folder", type=Path, help="where reports are written (default: benchmarks/results)")
    return parser


def main(words: Sequence[str] | None = None) -> None:
    parser = build_parser()
    args = parser.parse_args(words)
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"unknown parts: {', '.join(sorted(unknown))}")
    os.environ.update(EXACT)  # before mlx is loaded
    from benchmarks.reports import RESULTS
    from mlx_tq.kernels.gpu import gpu_backend

    if gpu_backend() != "cuda":
        sys.exit("this needs an NVIDIA GPU and mlx for CUDA: pip install 'mlx[cuda13]'")
    folder = (args.folder or RESULTS).resolve()
    if "attention" in (args.parts or PARTS):
        time_attention(folder / "attention_cuda.json", args.seconds)
    if "selftest" in (args.parts or PARTS):
        test_kernels(folder / "kernels_selftest_cuda.json", args.seconds, args.processes)


def time_attention(path: Path, seconds: float) -> None:
    from benchmarks.gpu.attention import SHAPES, cells, measure, measure_copy
    from benchmarks.reports import save

    end = time.monotonic() + seconds
    before, rows = measure_copy(), []
    for cell, arms in cells():
        for arm in arms:
            if time.monotonic() < end:
                try:
                    rows.append(measure(arm, cell))
                except RuntimeError as error:  # mlx has no kernel for some of mlx-lm's quantized caches
                    rows.append({"arm": arm, **cell._asdict(), "error": str(error)[:400]})
                print(rows[-1], flush=True)
        save(path, "python -m benchmarks.gpu", shapes=SHAPES, before=before, rows=rows)
    save(path, "python -m benchmarks.gpu", shapes=SHAPES, before=before, after=measure_copy(), rows=rows)


def test_kernels(path: Path, seconds: float, processes: int) -> None:
    """Start the processes, end them after the limit, and write what they compared."""
    from benchmarks.gpu.selftest import COMMAND, join_lines
    from benchmarks.reports import save

    with tempfile.TemporaryDirectory() as name:
        logs = [Path(name) / f"{number}.jsonl" for number in range(processes)]
        running = []
        for number, log in enumerate(logs):
            # mlx writes compiled files bit by bit, and another process would read half of one.
            own = {**os.environ, "MLX_PTX_CACHE_DIR": str(log.with_suffix(".ptx"))}
            command = [sys.executable, "-m", "benchmarks.gpu.selftest", str(number), str(processes)]
            with log.open("w") as output:
                running.append(subprocess.Popen(command, stdout=output, env=own))
        end = time.monotonic() + seconds
        while time.monotonic() < end and any(process.poll() is None for process in running):
            time.sleep(1)
        complete = all(process.poll() == 0 for process in running)
        for process in running:
            process.kill()
            process.wait()
        report = join_lines(line for log in logs for line in log.read_text().splitlines())
    save(path, f"{COMMAND} --processes {processes}", complete=complete, **report)
    print(f"{len(report['rows'])} comparisons, {len(report['failed'])} failed, complete: {complete}")


if __name__ == "__main__":
    main()
