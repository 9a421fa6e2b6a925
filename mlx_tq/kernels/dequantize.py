"""Decoding rows of the cache in rotated space, for prefill."""

from functools import partial

import mlx.core as mx

from mlx_tq.codec.formats import Codec
from mlx_tq.codec.rows import RowLayout
from mlx_tq.kernels import build, impl
from mlx_tq.kernels.constants import check_can_run, layout_constants

KERNEL = build.Kernel("dequantize", inputs=("packed_rows",), outputs=("keys_out", "values_out"))
THREADS = 256


def dequantize(rows: mx.array, layout: RowLayout, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
    """Rotated keys [B, H, S, Dk] and values [B, H, S, Dv] of packed rows uint32 [B, H, S, W]."""
    return impl.call(_dequantize_gpu, dequantize_ref, rows, layout, dtype, check=partial(check_can_run, layout, dtype))


def dequantize_ref(rows: mx.array, layout: RowLayout, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
    """`dequantize` in mlx's own operations."""
    keys, values = layout.key.decode_rotated(layout.keys(rows)), layout.value.decode_rotated(layout.values(rows))
    return keys.astype(dtype), values.astype(dtype)


def _dequantize_gpu(rows: mx.array, layout: RowLayout, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
    lead = rows.shape[:-1]
    units = max(_units(layout.key), _units(layout.value))
    threads = -(-units * rows.size // layout.words // THREADS) * THREADS
    keys, values = build.run(
        KERNEL,
        inputs=[rows.view(mx.uint16)],
        constants=(("T", dtype), *layout_constants(layout)),
        grid=(threads, 2, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[(*lead, layout.key.head_dim), (*lead, layout.value.head_dim)],
        output_dtypes=[dtype, dtype],
    )
    return keys, values


def _units(codec: Codec) -> int:
    """The pieces that one thread each decodes: words, or three words of 3-bit codes, or two of an fp32 number."""
    bits = 16 * codec.words // codec.head_dim
    return codec.words // {3: 3, 32: 2}.get(bits, 1)
