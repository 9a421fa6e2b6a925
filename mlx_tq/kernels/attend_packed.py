"""Attention of a few rotated queries over packed rows: the part of `attend` that reads the body."""

import math

import mlx.core as mx

from mlx_tq.codec.rows import RowLayout
from mlx_tq.kernels import build
from mlx_tq.kernels.constants import can_run, layout_constants
from mlx_tq.kernels.softmax import Partial, partial

KERNEL = build.Kernel(
    "attend",
    inputs=("queries", "packed_rows", "token_ranges"),
    outputs=("block_outputs", "block_maxima", "block_sums"),
)
QUERIES = 4  # rows whose sums fit a lane's registers
BLOCK_TOKENS = 256
_LEAST = 8  # values of an array that mlx passes in device memory


def attend_packed(queries: mx.array, rows: mx.array, body: int, layout: RowLayout) -> Partial:
    """Attend to the first `body` packed rows, all of them visible.

    Args:
        queries: fp32 [B, H, N, Dk], rotated and scaled.
        rows: uint32 [B, H, capacity, W]; what lies past `body` is never read.
        body: tokens, at least 1.
        layout: of the rows.

    Returns:
        Partial results [B, H, N, ...], the outputs in the values' rotated space.

    """
    run = _attend_packed_gpu if build.backend() and can_run(layout) else attend_packed_ref
    return run(queries, rows, body, layout)


def attend_packed_ref(queries: mx.array, rows: mx.array, body: int, layout: RowLayout) -> Partial:
    """`attend_packed` in mlx's own operations."""
    used = rows[:, :, :body]
    keys, values = layout.key.decode_rotated(layout.keys(used)), layout.value.decode_rotated(layout.values(used))
    return partial(queries @ keys.swapaxes(-1, -2), [values])


def _attend_packed_gpu(queries: mx.array, rows: mx.array, body: int, layout: RowLayout) -> Partial:
    batch, heads, count, _ = queries.shape
    padding = -count % QUERIES
    scaled = mx.contiguous(mx.pad(queries * math.log2(math.e), [(0, 0), (0, 0), (0, padding), (0, 0)]))
    blocks = -(-body // BLOCK_TOKENS)
    ranges = mx.array([0, body] * max(batch, _LEAST // 2), mx.int32)
    lead = (batch, heads, count + padding)
    outputs, maxima, sums = build.run(
        KERNEL,
        inputs=[scaled, rows.view(mx.uint16), ranges],
        template=(("QUERIES", QUERIES), *layout_constants(layout)),
        grid=(32, blocks, batch * heads * (lead[2] // QUERIES)),
        threadgroup=(32, 1, 1),
        output_shapes=[(*lead, blocks, layout.value.head_dim), (*lead, blocks), (*lead, blocks)],
        output_dtypes=[mx.float32] * 3,
    )
    return _merge(outputs[:, :, :count], maxima[:, :, :count], sums[:, :, :count])


def _merge(outputs: mx.array, maxima: mx.array, sums: mx.array) -> Partial:
    """Blocks whose maxima count powers of two, merged into one result whose maximum counts powers of e."""
    maxima = maxima * math.log(2)
    m = maxima.max(axis=-1, keepdims=True)
    weight = mx.exp(maxima - m)
    o = (weight[..., None] * outputs).sum(axis=-2)
    return Partial(m, (weight * sums).sum(axis=-1, keepdims=True), o)
