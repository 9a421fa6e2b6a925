"""`tq3_0`: TurboQuant in blocks of 32 for GGML, byte for byte as in O. Church's proposal.

{ uint8 qs[8]; uint8 qr[4]; fp16 d; }. The code of value j has its two low bits in qs[j / 4] at bit 2 (j % 4) and its
high bit in qr[j / 8] at bit j % 8. A block is multiplied by fixed signs, transformed (Walsh-Hadamard) and divided by
sqrt(32); d = amax / 2.1573, and a code is the number of boundaries that are not above y / d. Other public formats have
the same name and another layout.
"""

import math

import mlx.core as mx

from mlx_tq.codec.formats.block import BlockCodec, BlockFormat, inverse, scale_bytes
from mlx_tq.codec.rotation import WalshHadamard

_SIGNS = "+-++--+-++-+-+--+--++-+--+++--+-"
_LEVELS = (-2.1573, -1.3336, -0.7434, -0.2428, 0.2428, 0.7434, 1.3336, 2.1573)
_BOUNDARIES = (-1.7455, -1.0385, -0.4931, 0.0, 0.4931, 1.0385, 1.7455)


class TQ3ZeroCodec(BlockCodec):
    """3-bit codes as 2 low bits and 1 high bit, and the scale of the largest coordinate."""

    block = 32
    block_bytes = 14
    scale_at = 12

    def __init__(self, head_dim: int) -> None:
        self._transform = WalshHadamard(self.block, signs=[1.0 if sign == "+" else -1.0 for sign in _SIGNS])
        super().__init__(head_dim, self._transform)

    def encode_blocks(self, x: mx.array) -> mx.array:
        """fp32 [..., 32] -> uint8 [..., 14]. A zero block is qs 00, qr FF, d 0."""
        y = self._transform.forward(x) * (1 / math.sqrt(self.block))
        scale = mx.abs(y).max(axis=-1, keepdims=True) / _LEVELS[-1]
        t = y * inverse(scale)
        code = mx.zeros(t.shape, mx.uint8)
        for boundary in _BOUNDARIES:
            code = code + (t >= boundary)
        low, high = _gather(code & 3, 2), _gather(code >> 2, 1)
        return mx.concatenate([low, high, scale_bytes(scale)], axis=-1)

    def decode_blocks(self, data: mx.array) -> mx.array:
        """uint8 [..., 14] -> fp32 [..., 32]."""
        code = _spread(data[..., :8], 2) | (_spread(data[..., 8:12], 1) << 2)
        return mx.array(_LEVELS)[code] * self.scale_of(data)


def _gather(fields: mx.array, bits: int) -> mx.array:
    """Fields of `bits` bits side by side in bytes, the first lowest: uint8 [..., n] -> uint8 [..., n bits / 8]."""
    shifts = mx.arange(0, 8, bits, dtype=mx.uint8)
    grouped = fields.reshape(*fields.shape[:-1], -1, 8 // bits)
    return (grouped << shifts).sum(axis=-1).astype(mx.uint8)


def _spread(data: mx.array, bits: int) -> mx.array:
    """The inverse of `_gather`."""
    fields: mx.array = (data[..., None] >> mx.arange(0, 8, bits, dtype=mx.uint8)) & (2**bits - 1)
    return fields.reshape(*data.shape[:-1], -1)


class TQ3Zero(BlockFormat):
    """3 bits in blocks of 32: 56 bytes at head_dim 128."""

    name = "tq3_0"
    bits = 3
    error = 0.0316
    codec_class = TQ3ZeroCodec
