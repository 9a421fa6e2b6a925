"""Study a decode step of a batch of caches with different lengths: separate buffers, or one buffer for all.

    python -m benchmarks.studies.batch_attention

Three ways: one call per cache; one call with the buffers of all caches (what mlx_tq does); and one call on a joint
buffer, as long as the longest cache, with a mask. The CPU is timed, and `metal_sim` counts. Joining buffers is timed
separately: a joint buffer is copied when a cache joins or leaves the batch, outgrows it, or loses tokens.
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

from benchmarks.reports import save
from mlx_tq.codec.formats import CodecOptions, get_format
from mlx_tq.codec.rows import RowLayout
from mlx_tq.kernels import backend, gpu, thresholds
from mlx_tq.kernels.attend import attend, attend_batch
from mlx_tq.kernels.encode import encode
from mlx_tq.kernels.gpu import Constants, Kernel
from mlx_tq.kernels.regions import Regions
from mlx_tq.kernels.thresholds import KernelThresholds

ROOT = Path(__file__).parents[2]
DIM, GROUP, FULL_TOKENS, CAPACITY, SINKS, STEP = 128, 4, 160, 192, 32, 256
ROUNDS, CALLS = 7, 200
TIMED = {"alike": [2048] * 4, "uneven": [256, 512, 1024, 8192], "eight": [256, 256, 512, 512, 1024, 1024, 2048, 4096]}
COUNTED = {"alike": [96] * 8, "uneven": [32, 32, 64, 64, 96, 96, 128, 256]}

Step = Callable[[], mx.array]


def make_steps(packed: list[int], heads: int) -> tuple[dict[str, Step], dict[str, int]]:
    """Return a step in each way, and the bytes of packed rows in each."""
    layout = RowLayout(*(get_format("tq4").codec(DIM, CodecOptions(seed=seed), mx.float16) for seed in (0, 1)))
    batch = []
    for tokens in packed:
        rows = encode(_random(1, heads, tokens), _random(1, heads, tokens), layout).rows
        rows = _pad(rows, -(-tokens // STEP) * STEP)
        batch.append(
            Regions(rows, tokens, layout, _random(1, heads, CAPACITY), _random(1, heads, CAPACITY), SINKS, FULL_TOKENS)
        )
    queries, scale = _random(len(packed), heads * GROUP, 1), DIM**-0.5
    joint = _join(batch)
    positions = mx.arange(joint.tokens)[None]
    stop = SINKS + joint.packed_tokens
    hidden = mx.concatenate([(positions >= SINKS + mx.array(tokens)) & (positions < stop) for tokens in packed])
    mask = ~hidden[:, None, None]
    mx.eval(
        queries,
        mask,
        joint.packed_rows,
        joint.full_keys,
        joint.full_values,
        [(r.packed_rows, r.full_keys) for r in batch],
    )

    def row_by_row() -> mx.array:
        return mx.concatenate([attend(queries[i : i + 1], regions, scale=scale) for i, regions in enumerate(batch)])

    ways = {
        "row by row": row_by_row,
        "own buffers, one call": lambda: attend_batch(queries, batch, scale=scale),
        "one buffer, one call": lambda: attend(queries, joint, scale=scale, mask=mask),
        "joining the buffers": lambda: _join(batch).packed_rows,
    }
    sizes = {"own buffers": sum(r.packed_rows.nbytes for r in batch), "one buffer": joint.packed_rows.nbytes}
    return ways, sizes


def _join(batch: list[Regions]) -> Regions:
    capacity = max(regions.packed_rows.shape[2] for regions in batch)
    rows = mx.concatenate([_pad(regions.packed_rows, capacity) for regions in batch])
    keys, values = (
        mx.concatenate([getattr(regions, name) for regions in batch]) for name in ("full_keys", "full_values")
    )
    return Regions(
        rows, max(regions.packed_tokens for regions in batch), batch[0].layout, keys, values, SINKS, FULL_TOKENS
    )


def _pad(rows: mx.array, capacity: int) -> mx.array:
    return mx.pad(rows, ((0, 0), (0, 0), (0, capacity - rows.shape[2]), (0, 0)))


def _random(batch: int, heads: int, tokens: int) -> mx.array:
    return mx.random.normal((batch, heads, tokens, DIM)).astype(mx.float16)


def time_ways(packed: list[int], heads: int = 8) -> dict[str, Any]:
    with backend.using("reference"):
        ways, sizes = make_steps(packed, heads)
        times: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(ROUNDS + 1):
            for name, step in ways.items():
                started = time.perf_counter()
                mx.eval(step())
                times[name].append(time.perf_counter() - started)
    seconds = {name: round(statistics.median(values[1:]), 5) for name, values in times.items()}
    return {"packed_tokens": packed, "heads": heads, "seconds": seconds, "nbytes": sizes}


def count_ways(packed: list[int], short_tokens: int) -> dict[str, Any]:
    """Return dispatches, bytes loaded and lane operations of each way on the simulator, for one KV head."""
    sys.path.insert(0, str(ROOT / "tests"))
    from kernels.metal.simulated import simulated

    with backend.using("reference"):
        ways, _ = make_steps(packed, 1)
    rows = []
    for name, step in list(ways.items())[:3]:
        with simulated() as counters, thresholds.using(KernelThresholds(short_tokens=short_tokens)):
            mx.eval(step())
        rows.append(
            {
                "way": name,
                "dispatches": len(counters),
                "loaded": sum(sum(c.loaded.values()) for c in counters),
                "lane_operations": sum(sum(c.operations.values()) for c in counters),
            }
        )
    return {"packed_tokens": packed, "kernels": "one" if short_tokens else "two", "ways": rows}


class _Measured(Exception):  # noqa: N818 - ends a trace, not an error
    pass


def time_host(packed: list[int]) -> dict[str, Any]:
    """Return the smallest microseconds to build a step; kernels are traced, because they cannot run without a GPU."""
    with backend.using("reference"):
        ways, _ = make_steps(packed, 1)
    times: dict[str, list[float]] = {name: [] for name in list(ways)[:2]}

    def run(kernel: Kernel, *, inputs: list[mx.array], constants: Constants, **call: Any) -> list[mx.array]:
        return gpu.compile_kernel(kernel, "metal", constants)(inputs=inputs, **call)

    def traced(_: mx.array) -> None:
        for _ in range(CALLS):
            for name, values in times.items():
                started = time.perf_counter()
                ways[name]()
                values.append((time.perf_counter() - started) * 1e6)
        raise _Measured

    with (
        mock.patch.object(Kernel, "run", run),
        mock.patch.object(gpu, "gpu_backend", return_value="metal"),
        backend.using("metal"),
        suppress(_Measured),
    ):
        mx.export_function(os.devnull, traced, mx.zeros(1))
    return {"packed_tokens": packed, "microseconds": {name: round(min(values)) for name, values in times.items()}}


def main() -> None:
    mx.random.seed(0)
    report = {
        "host": time_host(COUNTED["alike"]),
        "cpu": {name: time_ways(packed) for name, packed in TIMED.items()},
        "counted": [count_ways(packed, limit) for packed in COUNTED.values() for limit in (0, 4096)],
    }
    save("batch_attend.json", "python -m benchmarks.studies.batch_attention", **report)
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
