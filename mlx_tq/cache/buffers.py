"""Buffers of tokens [B, H, capacity, D], written in place as long as there is room."""

import mlx.core as mx

from mlx_tq.config import BLOCK

# Rows by which the body's buffer grows once it holds as many; a shorter one grows by blocks.
STEP = 256

Pair = tuple[mx.array, mx.array]


def body_capacity(rows: int) -> int:
    """Rows that the buffer of a body of so many has room for."""
    step = STEP if rows > STEP else BLOCK
    return -(-rows // step) * step


def buffer(parts: list[mx.array], capacity: int) -> mx.array:
    """Parts [B, H, n, D] side by side in a buffer of `capacity` tokens, or of as many as they are."""
    shape = parts[0].shape
    rest = max(0, capacity - sum(part.shape[2] for part in parts))
    return mx.concatenate([*parts, mx.zeros((*shape[:2], rest, shape[3]), parts[0].dtype)], axis=2)


def write_rows(body: mx.array | None, rows: mx.array, start: int) -> mx.array:
    """The body with rows [B, H, n, W] from row `start` on; a longer buffer where they do not fit, or none is there."""
    stop = start + rows.shape[2]
    if body is None or stop > body.shape[2]:
        body = buffer([rows[:, :, :0] if body is None else body], body_capacity(stop))
    body[:, :, start:stop] = rows
    return body


def write_tokens(full: Pair, tokens: Pair, start: int) -> Pair:
    """Keys and values with new ones from token `start` on; longer arrays of their own where they do not fit."""
    count = tokens[0].shape[2]
    if start + count > full[0].shape[2]:
        keys, values = (mx.concatenate([x[:, :, :start], new], axis=2) for x, new in zip(full, tokens, strict=True))
        return keys, values
    for each, new in zip(full, tokens, strict=True):
        each[:, :, start : start + count] = new
    return full
