"""Decoding rows of the cache in rotated space, for prefill."""

from functools import partial
from itertools import pairwise

import mlx.core as mx

from mlx_tq.codec.formats import Codec
from mlx_tq.codec.normalization import KeyNormalization, cast_clamped, decode_rotated_keys
from mlx_tq.codec.rows import RowLayout
from mlx_tq.kernels import backend, build
from mlx_tq.kernels.constants import check_can_run, flips, layout_constants, means_inputs, table, with_levels
from mlx_tq.kernels.wht import wht_ref

KERNEL = build.Kernel(
    "dequantize",
    inputs=("packed_rows", "full_keys", "full_values", "key_flips", "value_flips", "dequantize_sizes"),
    outputs=("keys_out", "values_out"),
)
NORMALIZED = KERNEL.with_more(inputs=("key_scale", "key_means", "mean_index"))
THREADS = 256
# Packed tokens that mlx's own operations decode at a time.
BLOCK_TOKENS = 256

Pair = tuple[mx.array, mx.array]


def dequantize(
    rows: mx.array,
    layout: RowLayout,
    dtype: mx.Dtype,
    following: Pair | None = None,
    normalization: KeyNormalization | None = None,
) -> Pair:
    """Rotated keys and values of packed rows, and behind them those of other tokens: no copy joins the two.

    Keys are those that queries divided by w ask for: of packed rows with their mean, of other tokens times w.

    Args:
        rows: uint32 [B, H, S, W].
        layout: of the rows.
        dtype: of the result.
        following: keys [B, H, L, Dk] and values [B, H, L, Dv] of type `dtype`, not rotated yet.
        normalization: of the packed keys.

    Returns:
        Keys [B, H, S + L, Dk] and values [B, H, S + L, Dv].
    """
    check = partial(check_can_run, layout, dtype)
    return backend.call(_dequantize_gpu, dequantize_ref, rows, layout, dtype, following, normalization, check=check)


def dequantize_ref(
    rows: mx.array,
    layout: RowLayout,
    dtype: mx.Dtype,
    following: Pair | None = None,
    normalization: KeyNormalization | None = None,
) -> Pair:
    """`dequantize` in mlx's own operations, in blocks: what one of them needs in fp32 is gone before the next."""
    edges = [*range(0, rows.shape[2], BLOCK_TOKENS), rows.shape[2]]
    keys, values = [], []
    for start, stop in pairwise(edges):
        block, means = rows[:, :, start:stop], normalization and normalization.after(start)
        keys.append(cast_clamped(decode_rotated_keys(layout.key, layout.keys(block), means), dtype, means))
        values.append(layout.value.decode_rotated(layout.values(block)).astype(dtype))
    if following is not None:
        keys.append(_turned(following[0], layout.key, normalization))
        values.append(_turned(following[1], layout.value))
    return mx.concatenate(keys, axis=2), mx.concatenate(values, axis=2)


def _turned(x: mx.array, codec: Codec, normalization: KeyNormalization | None = None) -> mx.array:
    wide = x if normalization is None else x.astype(mx.float32) * normalization.scale[:, :, None]
    return cast_clamped(wide if codec.rotation is None else wht_ref(wide, codec.rotation), x.dtype, normalization)


def _dequantize_gpu(
    rows: mx.array,
    layout: RowLayout,
    dtype: mx.Dtype,
    following: Pair | None = None,
    normalization: KeyNormalization | None = None,
) -> Pair:
    batch, heads, tokens, _ = rows.shape
    units = max(_units(layout.key), _units(layout.value))
    decoding = _whole(units * batch * heads * tokens)
    length = following[0].shape[2] if following else 0
    # Arrays must not be empty, and the kernel reads none of these where nothing follows.
    full = following or (table([], mx.float32).astype(dtype).reshape(1, 1, 1, -1),) * 2
    kernel, levels = with_levels(KERNEL if normalization is None else NORMALIZED, layout.key, layout.value)
    keys, values = build.run(
        kernel,
        inputs=[
            rows.view(mx.uint16),
            *full,
            flips(layout.key.rotation),
            flips(layout.value.rotation),
            table([length, decoding]),
            *means_inputs(normalization, tokens),
            *levels,
        ],
        constants=(
            ("T", dtype),
            ("NORMALIZED", normalization is not None),
            ("CLAMPED", normalization is not None and dtype == mx.float16),
            *layout_constants(layout),
        ),
        grid=(decoding + _whole(32 * batch * heads * length), 2, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[(batch, heads, tokens + length, codec.head_dim) for codec in (layout.key, layout.value)],
        output_dtypes=[dtype, dtype],
    )
    return keys, values


def _whole(threads: int) -> int:
    """Threads of whole threadgroups."""
    return -(-threads // THREADS) * THREADS


def _units(codec: Codec) -> int:
    """The pieces that one thread each decodes: words, or three words of 3-bit codes, or two of an fp32 number."""
    bits = 16 * codec.words // codec.head_dim
    return codec.words // {3: 3, 32: 2}.get(bits, 1)
