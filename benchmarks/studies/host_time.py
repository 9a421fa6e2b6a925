"""Study the host time of a kernel call by the length of its text and the number of its template values.

    python -m benchmarks.studies.host_time

A kernel cannot be called without a GPU, but a function that calls it can be traced for export, which builds the same.
"""

import os
import time
from contextlib import suppress
from typing import Any

import mlx.core as mx

from benchmarks.reports import save

INPUTS, CALLS, ROUNDS, PASSES = 9, 500, 5, 5
LINE = "float tq_function(float a, float b) { return tq_mul(a, b); }\n"


class _Measured(Exception):  # noqa: N818 - ends a trace, not an error
    pass


def microseconds(text_bytes: int, values: int) -> float:
    names = [f"input_{i}" for i in range(INPUTS)]
    kernel = mx.fast.metal_kernel(
        name="measured",
        input_names=names,
        output_names=["result"],
        header=(LINE * (text_bytes // len(LINE) + 1))[:text_bytes],
        source="uint lane = thread_index_in_simdgroup;",
        ensure_row_contiguous=False,
    )
    call: dict[str, Any] = {"template": [(f"CONSTANT_{i}", i) for i in range(values)]} if values else {}
    call |= {"grid": (32, 1, 1), "threadgroup": (32, 1, 1), "output_shapes": [(1,)], "output_dtypes": [mx.float32]}
    rounds: list[float] = []

    def traced(*arrays: mx.array) -> None:
        inputs = list(arrays)
        for _ in range(ROUNDS):
            started = time.perf_counter()
            for _ in range(CALLS):
                kernel(inputs=inputs, **call)
            rounds.append((time.perf_counter() - started) / CALLS * 1e6)
        raise _Measured

    with suppress(_Measured):
        mx.export_function(os.devnull, traced, *[mx.zeros(8) for _ in names])
    return min(rounds)


def main() -> None:
    cases = [(size, values) for size in (0, 5_000, 10_000, 20_000, 40_000) for values in (0, 20)]
    passes = [[microseconds(*case) for case in cases] for _ in range(PASSES)]
    rows = [
        {"text_bytes": size, "template_values": values, "microseconds": round(min(times), 2)}
        for (size, values), times in zip(cases, zip(*passes, strict=True), strict=True)
    ]
    save("kernels_host.json", "python -m benchmarks.studies.host_time", calls=rows)
    for row in rows:
        print(row)


if __name__ == "__main__":
    main()
