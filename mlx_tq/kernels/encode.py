"""Encoding of keys and values into packed rows, and compaction of rows after an eviction."""

from dataclasses import replace

import mlx.core as mx

from mlx_tq.codec.normalization import KeyNormalization
from mlx_tq.codec.rows import RowLayout, Rows
from mlx_tq.kernels import arguments, backend
from mlx_tq.kernels.cpu.encode import launch_encode
from mlx_tq.kernels.gpu import Kernel, fit_simdgroups, simdgroup_grid
from mlx_tq.kernels.wht import wht

ENCODE = Kernel(
    "encode",
    inputs=("keys", "values", "key_flips", "value_flips"),
    outputs=("packed_rows", "health_flags"),
    normalized=("key_scale", "key_centers", "mean_index"),
)
COMPACT = Kernel("compact", inputs=("packed_rows", "kept_rows", "compact_sizes"), outputs=("compacted",))


def _launch_encode(
    keys: mx.array, values: mx.array, layout: RowLayout, normalization: KeyNormalization | None = None
) -> Rows:
    arguments.check_can_run(layout, keys.dtype)
    batch, heads, tokens, _ = keys.shape
    count = batch * heads * tokens
    inputs = [keys, values, arguments.sign_flips(layout.key.rotation), arguments.sign_flips(layout.value.rotation)]
    inputs += arguments.key_groups(layout.key, batch, heads)
    if normalization is not None:
        means, rotation = normalization.means.astype(mx.float32), layout.key.rotation
        means = means if rotation is None else wht(means, rotation, inverse=True)
        inputs += arguments.normalization_inputs(replace(normalization, means=means), tokens)
    levels = arguments.trellis_levels(layout.key, layout.value)
    constants = (
        *arguments.normalization_constants(normalization, keys.dtype),
        *arguments.layout_constants(layout),
    )
    words, flags = fit_simdgroups(
        1 if levels else 4,  # a trellis search needs up to 20 KB of threadgroup memory
        lambda simdgroups: ENCODE.run(
            inputs=[*inputs, *levels],
            constants=(("T", keys.dtype), ("SIMDGROUPS", simdgroups), *constants),
            **simdgroup_grid(count, simdgroups, 2),
            output_shapes=[(batch, heads, tokens, 2 * layout.words), (2, count)],
            output_dtypes=[mx.uint16, mx.uint8],
        ),
    )
    health = mx.stack([(flags & 1).sum(), (flags >> 1).sum()]).astype(mx.int32)
    return Rows(words.view(mx.uint32), health)


@backend.dispatch(_launch_encode, launch_encode)
def encode(keys: mx.array, values: mx.array, layout: RowLayout, normalization: KeyNormalization | None = None) -> Rows:
    """Encode keys [B, H, S, Dk] and values [B, H, S, Dv], bit for bit the same on every backend.

    Row s of `normalization` is token s.
    """
    return layout.encode(keys, values, normalization)


def _launch_compact(rows: mx.array, kept_rows: mx.array, capacity: int) -> mx.array:
    batch, heads, _, words = rows.shape
    shape = (batch, heads, capacity, words)
    if kept_rows.size == 0:
        return mx.zeros(shape, mx.uint32)
    (compacted,) = fit_simdgroups(
        8,
        lambda simdgroups: COMPACT.run(
            inputs=[rows, kept_rows, arguments.small_input([kept_rows.size, capacity])],
            constants=(),
            **simdgroup_grid(kept_rows.size, simdgroups, batch * heads),
            output_shapes=[shape],
            output_dtypes=[mx.uint32],
        ),
    )
    return compacted


@backend.dispatch(_launch_compact)
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
