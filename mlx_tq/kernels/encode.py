"""Encoding keys and values into rows of the cache."""

from functools import partial

import mlx.core as mx

from mlx_tq.codec.normalization import KeyNormalization
from mlx_tq.codec.rows import RowLayout, Rows
from mlx_tq.kernels import backend, build
from mlx_tq.kernels.constants import check_can_run, filled, flips, layout_constants, with_levels
from mlx_tq.kernels.wht import wht

KERNEL = build.Kernel(
    "encode",
    inputs=("keys", "values", "key_flips", "value_flips"),
    outputs=("packed_rows", "health_flags"),
)
NORMALIZED = KERNEL.with_more(inputs=("key_scale", "key_centres", "mean_index"))
SIMDGROUPS = 4


def encode(keys: mx.array, values: mx.array, layout: RowLayout, normalization: KeyNormalization | None = None) -> Rows:
    """Encode tokens into rows uint32 [B, H, S, W].

    Args:
        keys: [B, H, S, Dk].
        values: [B, H, S, Dv], of the same type.
        layout: of the rows.
        normalization: of these keys: row s of it is token s.
    """
    check = partial(check_can_run, layout, keys.dtype)
    return backend.call(_encode_gpu, encode_ref, keys, values, layout, normalization, check=check)


def encode_ref(
    keys: mx.array, values: mx.array, layout: RowLayout, normalization: KeyNormalization | None = None
) -> Rows:
    """`encode` in mlx's own operations."""
    return layout.encode(keys, values, normalization)


def _encode_gpu(
    keys: mx.array, values: mx.array, layout: RowLayout, normalization: KeyNormalization | None = None
) -> Rows:
    batch, heads, tokens, _ = keys.shape
    count = batch * heads * tokens
    inputs = [keys, values, flips(layout.key.rotation), flips(layout.value.rotation)]
    if normalization is not None:
        scale, index = mx.contiguous(normalization.scale), filled(normalization.mean_index(tokens))
        inputs += [scale, _centres(normalization, layout), index]
    kernel, levels = with_levels(KERNEL if normalization is None else NORMALIZED, layout.key, layout.value)
    simdgroups = 1 if levels else SIMDGROUPS  # a search needs up to 20 KB of threadgroup memory
    words, flags = build.run(
        kernel,
        inputs=[*inputs, *levels],
        constants=(
            ("T", keys.dtype),
            ("SIMDGROUPS", simdgroups),
            ("NORMALIZED", normalization is not None),
            ("CLAMPED", normalization is not None and keys.dtype == mx.float16),
            *layout_constants(layout),
        ),
        grid=(32 * simdgroups, -(-count // simdgroups), 2),
        threadgroup=(32 * simdgroups, 1, 1),
        output_shapes=[(batch, heads, tokens, 2 * layout.words), (2, count)],
        output_dtypes=[mx.uint16, mx.uint8],
    )
    health = mx.stack([(flags & 1).sum(), (flags >> 1).sum()]).astype(mx.int32)
    return Rows(words.view(mx.uint32), health)


def _centres(normalization: KeyNormalization, layout: RowLayout) -> mx.array:
    means = normalization.means.astype(mx.float32)
    return mx.contiguous(means) if layout.key.rotation is None else wht(means, layout.key.rotation, inverse=True)
