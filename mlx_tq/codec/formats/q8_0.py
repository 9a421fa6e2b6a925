"""`q8_0`: GGML's 8-bit blocks. No rotation; 32 values share an fp16 scale.

Source: `block_q8_0` of ggml: { fp16 d; int8 qs[32]; }, d = amax / 127, qs = round(x / d), halves away from zero.
"""

import mlx.core as mx

from mlx_tq.codec.formats.block import BlockCodec, BlockFormat, inverse, scale_bytes

_LIMIT = 127.0


class Q8ZeroCodec(BlockCodec):
    """Symmetric int8 in steps of a block's amax / 127."""

    block = 32
    block_bytes = 34
    scale_at = 0

    def encode_blocks(self, x: mx.array) -> mx.array:
        """fp32 [..., 32] -> uint8 [..., 34]."""
        step = mx.abs(x).max(axis=-1, keepdims=True) / _LIMIT
        ratio = x * inverse(step)
        size = mx.abs(ratio)
        whole = mx.floor(size)
        rounded = whole + (size - whole >= 0.5)
        codes = (mx.sign(ratio) * rounded).astype(mx.int8)
        return mx.concatenate([scale_bytes(step), codes.view(mx.uint8)], axis=-1)

    def decode_blocks(self, data: mx.array) -> mx.array:
        """uint8 [..., 34] -> fp32 [..., 32]."""
        return data[..., 2:].view(mx.int8).astype(mx.float32) * self.scale_of(data)


class Q8Zero(BlockFormat):
    """8-bit integers in blocks of 32: 136 bytes at head_dim 128."""

    name = "q8_0"
    bits = 8
    error = 2.87e-5
    codec_class = Q8ZeroCodec
