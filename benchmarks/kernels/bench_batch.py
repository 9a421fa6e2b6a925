"""A decode step of a batch whose rows have lengths of their own: rows with buffers of their own, or one buffer for all.

    python -m benchmarks.kernels.bench_batch

Three ways: a call a row; one call that is given each row's own buffers (what the cache does); and one call on a buffer
of all rows, as long as the longest, whose unused part a mask hides. The CPU is timed, in turn; `metal_sim` counts
dispatches, bytes and lane operations. Joining rows in one buffer is timed by itself: a batch that owned such a buffer
would copy it when a row joins, leaves, outgrows it or loses tokens.
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import mlx.core as mx

from mlx_tq.cli.environment import environment
from mlx_tq.codec.formats import CodecOptions, get_format
from mlx_tq.codec.rows import RowLayout
from mlx_tq.kernels import backend, build, thresholds
from mlx_tq.kernels.attend import attend, attend_batch
from mlx_tq.kernels.encode import encode
from mlx_tq.kernels.regions import Regions
from mlx_tq.kernels.thresholds import KernelThresholds

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "benchmarks/results/batch_attend.json"
DIM, GROUP, BESIDE, CAPACITY, PREFIX, STEP = 128, 4, 160, 192, 32, 256
ROUNDS, CALLS = 7, 200
TIMED = {"alike": [2048] * 4, "uneven": [256, 512, 1024, 8192], "eight": [256, 256, 512, 512, 1024, 1024, 2048, 4096]}
COUNTED = {"alike": [96] * 8, "uneven": [32, 32, 64, 64, 96, 96, 128, 256]}

Step = Callable[[], mx.array]


def steps(bodies: list[int], heads: int) -> tuple[dict[str, Step], dict[str, int]]:
    """A step in each way, and the bytes that packed rows take in each."""
    layout = RowLayout(*(get_format("tq4").codec(DIM, CodecOptions(seed=seed), mx.float16) for seed in (0, 1)))
    batch = []
    for body in bodies:
        rows = encode(_random(1, heads, body), _random(1, heads, body), layout).rows
        capacity = -(-body // STEP) * STEP
        rows = _grown(rows, capacity)
        batch.append(
            Regions(rows, body, layout, _random(1, heads, CAPACITY), _random(1, heads, CAPACITY), PREFIX, BESIDE)
        )
    queries, scale = _random(len(bodies), heads * GROUP, 1), DIM**-0.5
    joined = _joined(batch)
    places = mx.arange(joined.tokens)[None]
    hidden = mx.concatenate(
        [(places >= PREFIX + body) & (places < PREFIX + joined.body) for body in map(mx.array, bodies)]
    )
    mask = ~hidden[:, None, None]
    mx.eval(queries, mask, joined.rows, joined.full_keys, joined.full_values, [(r.rows, r.full_keys) for r in batch])

    def row_by_row() -> mx.array:
        return mx.concatenate([attend(queries[i : i + 1], regions, scale=scale) for i, regions in enumerate(batch)])

    ways = {
        "row by row": row_by_row,
        "own buffers, one call": lambda: attend_batch(queries, batch, scale=scale),
        "one buffer, one call": lambda: attend(queries, joined, scale=scale, mask=mask),
        "joining the buffers": lambda: _joined(batch).rows,
    }
    sizes = {"own buffers": sum(r.rows.nbytes for r in batch), "one buffer": joined.rows.nbytes}
    return ways, sizes


def _joined(batch: list[Regions]) -> Regions:
    capacity = max(regions.rows.shape[2] for regions in batch)
    rows = mx.concatenate([_grown(regions.rows, capacity) for regions in batch])
    keys, values = (
        mx.concatenate([getattr(regions, name) for regions in batch]) for name in ("full_keys", "full_values")
    )
    return Regions(rows, max(regions.body for regions in batch), batch[0].layout, keys, values, PREFIX, BESIDE)


def _grown(rows: mx.array, capacity: int) -> mx.array:
    return mx.pad(rows, ((0, 0), (0, 0), (0, capacity - rows.shape[2]), (0, 0)))


def _random(batch: int, heads: int, tokens: int) -> mx.array:
    return mx.random.normal((batch, heads, tokens, DIM)).astype(mx.float16)


def timed(bodies: list[int], heads: int = 8) -> dict[str, Any]:
    """Median seconds of each way on mlx's own operations, in turn."""
    with backend.using("reference"):
        ways, sizes = steps(bodies, heads)
        found: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(ROUNDS + 1):
            for name, step in ways.items():
                started = time.perf_counter()
                mx.eval(step())
                found[name].append(time.perf_counter() - started)
    seconds = {name: round(statistics.median(times[1:]), 5) for name, times in found.items()}
    return {"packed_tokens": bodies, "heads": heads, "seconds": seconds, "nbytes": sizes}


def counted(bodies: list[int], short: int) -> dict[str, Any]:
    """Dispatches, bytes loaded and lane operations of each way on the simulator, one KV head."""
    sys.path.insert(0, str(ROOT / "tests/kernels/metal"))
    from simulated import simulated

    with backend.using("reference"):
        ways, _ = steps(bodies, 1)
    rows = []
    for name, step in list(ways.items())[:3]:
        with simulated() as counters, thresholds.using(KernelThresholds(short=short)):
            mx.eval(step())
        rows.append(
            {
                "way": name,
                "dispatches": len(counters),
                "loaded": sum(sum(c.loaded.values()) for c in counters),
                "lane_operations": sum(sum(c.operations.values()) for c in counters),
            }
        )
    return {"packed_tokens": bodies, "kernels": "one" if short else "two", "ways": rows}


class _Measured(Exception):  # noqa: N818  it ends a trace, it is no error
    pass


def host(bodies: list[int]) -> dict[str, Any]:
    """The least microseconds until mlx has a step's kernels, which are traced: they cannot run without a GPU."""
    with backend.using("reference"):
        ways, _ = steps(bodies, 1)
    found: dict[str, list[float]] = {name: [] for name in list(ways)[:2]}

    def run(kernel: build.Kernel, *, inputs: list[mx.array], constants: build.Constants, **call: Any) -> list[mx.array]:
        return build.built(kernel, "metal", constants)(inputs=inputs, **call)

    def traced(_: mx.array) -> None:
        for _ in range(CALLS):
            for name, times in found.items():
                started = time.perf_counter()
                ways[name]()
                times.append((time.perf_counter() - started) * 1e6)
        raise _Measured

    with (
        mock.patch.object(build, "run", run),
        mock.patch.object(build, "backend", return_value="metal"),
        backend.using("metal"),
        suppress(_Measured),
    ):
        mx.export_function(os.devnull, traced, mx.zeros(1))
    return {"packed_tokens": bodies, "microseconds": {name: round(min(times)) for name, times in found.items()}}


def main() -> None:
    """Measure and write."""
    mx.random.seed(0)
    report = {
        "command": "python -m benchmarks.kernels.bench_batch",
        "environment": environment(),
        "host": host(COUNTED["alike"]),
        "cpu": {name: timed(bodies) for name, bodies in TIMED.items()},
        "counted": [counted(bodies, short) for bodies in COUNTED.values() for short in (0, 4096)],
    }
    RESULT.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps({name: report[name] for name in ("host", "cpu", "counted")}, indent=1))


if __name__ == "__main__":
    main()
