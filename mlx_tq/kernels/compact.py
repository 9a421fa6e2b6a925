"""Compaction of packed rows after an eviction."""

import mlx.core as mx

from mlx_tq.kernels import arguments, backend
from mlx_tq.kernels.gpu import Kernel, simdgroup_grid

COMPACT = Kernel("compact", inputs=("packed_rows", "kept_rows", "compact_sizes"), outputs=("compacted",))
ROWS = 8  # of a threadgroup


def _launch(rows: mx.array, kept_rows: mx.array, capacity: int) -> mx.array:
    batch, heads, _, words = rows.shape
    shape = (batch, heads, capacity, words)
    if kept_rows.size == 0:
        return mx.zeros(shape, mx.uint32)
    (compacted,) = COMPACT.run(
        inputs=[rows, kept_rows, arguments.small_input([kept_rows.size, capacity])],
        constants=(),
        **simdgroup_grid(kept_rows.size, ROWS, batch * heads),
        output_shapes=[shape],
        output_dtypes=[mx.uint32],
    )
    return compacted


@backend.dispatch(_launch)
def compact(rows: mx.array, kept_rows: mx.array, capacity: int) -> mx.array:
    """Gather the rows [B, H, S, W] that an eviction keeps, ascending int32 [N], into a new buffer [B, H, capacity, W].

    Rows from N on are undefined.
    """
    batch, heads, count, words = rows.shape
    shape = (batch, heads, capacity, words)
    if kept_rows.size == 0:
        return mx.zeros(shape, mx.uint32)
    index = mx.concatenate([kept_rows, mx.zeros(capacity - kept_rows.size, mx.int32)])
    flat_index = mx.arange(batch * heads, dtype=mx.int32)[:, None] * count + index
    return mx.take(rows.reshape(-1, words), flat_index, axis=0).reshape(shape)  # along axis 2 it takes 8 times as long
