"""Gathering the packed rows that stay after an eviction."""

import mlx.core as mx

from mlx_tq.kernels import backend, build
from mlx_tq.kernels.constants import table

KERNEL = build.Kernel("compact", inputs=("packed_rows", "kept_rows", "compact_sizes"), outputs=("compacted",))
ROWS = 8  # of a threadgroup


def compact(rows: mx.array, kept: mx.array, capacity: int) -> mx.array:
    """Rows `kept` side by side in a buffer of `capacity` rows; what lies past them is unspecified.

    Args:
        rows: uint32 [B, H, S, W].
        kept: ascending indices into S, int32 [N], N at most `capacity`.
        capacity: rows of the result.

    Returns:
        uint32 [B, H, capacity, W].
    """
    return backend.call(_compact_gpu, compact_ref, rows, kept, capacity)


def compact_ref(rows: mx.array, kept: mx.array, capacity: int) -> mx.array:
    """`compact` in mlx's own operations."""
    if kept.size == 0:
        return _nothing(rows, capacity)
    batch, heads, count, words = rows.shape
    index = mx.concatenate([kept, mx.zeros(capacity - kept.size, mx.int32)])
    each = mx.arange(batch * heads, dtype=mx.int32)[:, None] * count + index
    found = mx.take(rows.reshape(-1, words), each, axis=0)  # axis 2 takes eight times as long
    return found.reshape(batch, heads, capacity, words)


def _compact_gpu(rows: mx.array, kept: mx.array, capacity: int) -> mx.array:
    if kept.size == 0:
        return _nothing(rows, capacity)
    batch, heads, _, words = rows.shape
    (compacted,) = build.run(
        KERNEL,
        inputs=[rows, kept, table([kept.size, capacity])],
        constants=(),
        grid=(32, -(-kept.size // ROWS) * ROWS, batch * heads),
        threadgroup=(32, ROWS, 1),
        output_shapes=[(batch, heads, capacity, words)],
        output_dtypes=[mx.uint32],
    )
    return compacted


def _nothing(rows: mx.array, capacity: int) -> mx.array:
    """A buffer of which no row counts, also of no rows."""
    batch, heads, _, words = rows.shape
    return mx.zeros((batch, heads, capacity, words), mx.uint32)
