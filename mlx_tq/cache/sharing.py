"""What copies of caches hold once, and what that saves each of them."""

import weakref
from collections.abc import Sequence

from mlx_tq.cache.body import Buffer
from mlx_tq.cache.buffers import STEP
from mlx_tq.cache.layer import CompressedKVCache

# Buffers that several caches have, as long as one of them has, and the bytes that each need not have of its own.
Shared = list[tuple[weakref.ref[Buffer], int]]


def shared_rows(caches: Sequence[CompressedKVCache]) -> Shared:
    """The packed rows that copies of these caches share while none leaves, in whole steps of a buffer.

    A layer with two formats of keys moves its rows, so that its copies soon share none.
    """
    return [
        (weakref.ref(buffer), buffer.nbytes // buffer.rows.shape[2] * whole_steps(count))
        for cache in caches
        if type(cache) is CompressedKVCache
        for buffer, count in cache._body.lasting(cache.body_tokens)
        if buffer.rows is not None
    ]


def whole_steps(rows: int) -> int:
    """Of so many rows those that fill steps of a buffer: a buffer for the others has no more room in exchange."""
    return rows // STEP * STEP
