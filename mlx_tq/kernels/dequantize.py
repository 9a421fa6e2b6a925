"""Decoding rows of the cache in rotated space, for prefill."""

from functools import partial
from itertools import pairwise

import mlx.core as mx

from mlx_tq.codec.formats import Codec, Encoded
from mlx_tq.codec.rows import RowLayout
from mlx_tq.kernels import build, impl
from mlx_tq.kernels.constants import check_can_run, flips, layout_constants, table
from mlx_tq.kernels.wht import wht_ref

KERNEL = build.Kernel(
    "dequantize",
    inputs=("packed_rows", "full_keys", "full_values", "key_flips", "value_flips", "dequantize_sizes"),
    outputs=("keys_out", "values_out"),
)
THREADS = 256
# Packed tokens that mlx's own operations decode at a time.
BLOCK_TOKENS = 256

Pair = tuple[mx.array, mx.array]


def dequantize(rows: mx.array, layout: RowLayout, dtype: mx.Dtype, following: Pair | None = None) -> Pair:
    """Rotated keys and values of packed rows, and behind them those of other tokens: no copy joins the two.

    Args:
        rows: uint32 [B, H, S, W].
        layout: of the rows.
        dtype: of the result.
        following: keys [B, H, L, Dk] and values [B, H, L, Dv] of type `dtype`, not rotated yet.

    Returns:
        Keys [B, H, S + L, Dk] and values [B, H, S + L, Dv].
    """
    check = partial(check_can_run, layout, dtype)
    return impl.call(_dequantize_gpu, dequantize_ref, rows, layout, dtype, following, check=check)


def dequantize_ref(rows: mx.array, layout: RowLayout, dtype: mx.Dtype, following: Pair | None = None) -> Pair:
    """`dequantize` in mlx's own operations, in blocks: what one of them needs in fp32 is gone before the next."""
    edges = [*range(0, rows.shape[2], BLOCK_TOKENS), rows.shape[2]]
    blocks = [rows[:, :, start:stop] for start, stop in pairwise(edges)]
    keys, values = following or (None, None)
    return (
        _joined(layout.key, [layout.keys(block) for block in blocks], dtype, keys),
        _joined(layout.value, [layout.values(block) for block in blocks], dtype, values),
    )


def _joined(codec: Codec, blocks: list[Encoded], dtype: mx.Dtype, following: mx.array | None) -> mx.array:
    parts = [codec.decode_rotated(block).astype(dtype) for block in blocks]
    if following is not None:
        parts.append(following if codec.rotation is None else wht_ref(following, codec.rotation))
    return mx.concatenate(parts, axis=2)


def _dequantize_gpu(rows: mx.array, layout: RowLayout, dtype: mx.Dtype, following: Pair | None = None) -> Pair:
    batch, heads, tokens, _ = rows.shape
    units = max(_units(layout.key), _units(layout.value))
    decoding = _whole(units * batch * heads * tokens)
    length = following[0].shape[2] if following else 0
    # Arrays must not be empty, and the kernel reads none of these where nothing follows.
    full = following or (table([], mx.float32).astype(dtype).reshape(1, 1, 1, -1),) * 2
    keys, values = build.run(
        KERNEL,
        inputs=[
            rows.view(mx.uint16),
            *full,
            flips(layout.key.rotation),
            flips(layout.value.rotation),
            table([length, decoding]),
        ],
        constants=(("T", dtype), *layout_constants(layout)),
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
