"""Compare kernels with their reference implementations in several processes: compiling them takes most of the time.

    python -m benchmarks.gpu.selftest PROCESS PROCESSES

runs one share of `mlx_tq.doctor --kernels` on CUDA and prints a line of JSON for each comparison.
"""

import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from itertools import islice
from typing import Any

from mlx_tq.kernels.selftest import KernelCheck, check_kernels, kernel_cases

COMMAND = "python -m benchmarks.gpu selftest"


def check_share(process: int, processes: int, gpu: str = "cuda") -> Iterator[KernelCheck]:
    """Return the comparisons of one process: every `processes`-th one."""
    return check_kernels(gpu, islice(kernel_cases(), process, None, processes))


def join_lines(lines: Iterable[str]) -> dict[str, Any]:
    """Return the report of what the processes printed; the last line of one that was ended may be a part."""
    rows = [json.loads(line) for line in lines if line.endswith("}")]
    return {
        "tf32": False,
        "failed": [row for row in rows if row["difference"] > row["allowed"]],
        "rows": sorted(rows, key=lambda row: (row["case"], row["kernel"])),
    }


if __name__ == "__main__":
    for check in check_share(int(sys.argv[1]), int(sys.argv[2])):
        print(json.dumps(asdict(check)), flush=True)
