"""Gathering the packed rows that stay after an eviction."""

import mlx.core as mx


def compact_ref(rows: mx.array, kept: mx.array, capacity: int) -> mx.array:
    """Rows `kept` side by side in a buffer of `capacity` rows; what lies past them is unspecified.

    Args:
        rows: uint32 [B, H, S, W].
        kept: ascending indices into S, int32 [N], N at most `capacity`.
        capacity: rows of the result.

    Returns:
        uint32 [B, H, capacity, W].
    """
    index = mx.concatenate([kept, mx.zeros(capacity - kept.size, mx.int32)])
    return mx.take(rows, index, axis=2)
