"""Calls of small kernels for the simulator's tests."""

from typing import Any

import mlx.core as mx


def small(
    source: str,
    inputs: list[mx.array],
    outputs: list[tuple[tuple[int, ...], mx.Dtype]],
    names: tuple[str, ...] | list[str] = ("result",),
    template: list[tuple[str, Any]] | None = None,
    **call: Any,
) -> dict[str, Any]:
    """Return the arguments of `simulate` for a kernel with one input, `values`, or none."""
    # Without an attribute, mlx would generate invalid text.
    source = f"{source}\n(void)thread_index_in_threadgroup;"
    kernel = mx.fast.metal_kernel(
        name="small",
        input_names=["values"][: len(inputs)],
        output_names=list(names),
        source=source,
        ensure_row_contiguous=False,
    )
    shapes, dtypes = zip(*outputs, strict=True)
    sizes = {"output_shapes": list(shapes), "output_dtypes": list(dtypes)}
    return {"kernel": kernel, "inputs": inputs, "template": template or [], **sizes, **call}


# The sum of each 64 values, through threadgroup memory.
TOTAL = small(
    """
    threadgroup float part[64];
    uint i = thread_index_in_threadgroup;
    part[i] = values[thread_position_in_grid.x];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint width = 32; width > 0; width /= 2) {
      if (i < width) { part[i] += part[i + width]; }
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    if (i == 0) { result[threadgroup_position_in_grid.x] = part[0]; }
    """,
    [mx.arange(128, dtype=mx.float32)],
    [((2,), mx.float32)],
    grid=(128, 1, 1),
    threadgroup=(64, 1, 1),
)
