"""`tbq4_0`, `tbq3_0`: TurboQuant in blocks of 128 with a dense rotation, after the TBQ formats of llama.cpp forks.

{ uint8 qs[]; fp16 norm; }: codes of 4 bits as nibbles, the even value low; codes of 3 bits as one stream of bits, the
lowest first. One rotation serves all layers, keys and values. The forks make theirs by a QR on the user's machine,
which is not the same to the bit everywhere; here it is data (rotation_128.npy, a `Haar` of seed 42), so blocks have
their layout but not their rotation.
Levels: Lloyd-Max for N(0, 1) (Max 1960), over sqrt(128).
"""

import math
from functools import cache
from importlib.resources import files
from io import BytesIO
from typing import ClassVar

import mlx.core as mx
import numpy as np

from mlx_tq.codec.codebook import midpoints
from mlx_tq.codec.exact import pairwise_sum
from mlx_tq.codec.formats.base import FP16_MAX
from mlx_tq.codec.formats.block import BlockCodec, BlockFormat, inverse, scale_bytes
from mlx_tq.codec.rotation import Dense

_BLOCK = 128
_POSITIVE_LEVELS = {
    3: (0.2451, 0.7560, 1.3439, 2.1519),
    4: (0.1284, 0.3880, 0.6568, 0.9423, 1.2562, 1.6180, 2.0690, 2.7326),
}


def _levels(bits: int) -> np.ndarray:
    positive = np.array(_POSITIVE_LEVELS[bits])
    return np.concatenate([-positive[::-1], positive])


@cache
def _rotation() -> Dense:
    data = (files("mlx_tq.codec") / "rotation_128.npy").read_bytes()
    return Dense(mx.array(np.load(BytesIO(data), allow_pickle=False)))


class TBQCodec(BlockCodec):
    """Stores packed codes, then the norm."""

    block = _BLOCK
    bits: ClassVar[int]

    def __init__(self, head_dim: int) -> None:
        self._dense = _rotation()
        super().__init__(head_dim, self._dense)

    def encode_blocks(self, x: mx.array) -> mx.array:
        """fp32 [..., 128] -> uint8 [..., block_bytes]."""
        x = mx.clip(x, -FP16_MAX, FP16_MAX)
        norm = mx.sqrt(pairwise_sum(x * x))[..., None]
        t = self._dense.forward(x) * inverse(norm)
        code = mx.zeros(t.shape, mx.uint8)
        for boundary in midpoints(_levels(self.bits)).astype(np.float32).tolist():
            code = code + (t > boundary)
        return mx.concatenate([self._pack(code), scale_bytes(norm)], axis=-1)

    def decode_blocks(self, data: mx.array) -> mx.array:
        """uint8 [..., block_bytes] -> fp32 [..., 128]."""
        levels = mx.array((_levels(self.bits) / math.sqrt(_BLOCK)).astype(np.float32))
        return levels[self._unpack(data[..., : self.scale_at])] * self.scale_of(data)

    def _pack(self, code: mx.array) -> mx.array:
        """Codes [..., 128] as a stream of bits, lowest first: 8 of them fill `bits` bytes."""
        eights = code.astype(mx.uint32).reshape(*code.shape[:-1], -1, 8)
        stream = (eights << mx.arange(0, 8 * self.bits, self.bits, dtype=mx.uint32)).sum(axis=-1)
        return stream[..., None].view(mx.uint8)[..., : self.bits].reshape(*code.shape[:-1], -1)

    def _unpack(self, data: mx.array) -> mx.array:
        """The inverse of `_pack`."""
        runs = data.reshape(*data.shape[:-1], -1, self.bits).astype(mx.uint32)
        stream = (runs << mx.arange(0, 8 * self.bits, 8, dtype=mx.uint32)).sum(axis=-1)[..., None]
        code: mx.array = (stream >> mx.arange(0, 8 * self.bits, self.bits, dtype=mx.uint32)) & (2**self.bits - 1)
        return code.reshape(*data.shape[:-1], _BLOCK)


class TBQ4Codec(TBQCodec):
    """Nibbles: 64 bytes and the norm."""

    bits = 4
    block_bytes = 66
    scale_at = 64


class TBQ3Codec(TBQCodec):
    """A stream of 3-bit codes: 48 bytes and the norm."""

    bits = 3
    block_bytes = 50
    scale_at = 48


class TBQ4(BlockFormat):
    """4 bits, dense rotation: 66 bytes at head_dim 128."""

    name = "tbq4_0"
    bits = 4
    error = 0.00932
    codec_class = TBQ4Codec


class TBQ3(BlockFormat):
    """3 bits, dense rotation: 50 bytes at head_dim 128."""

    name = "tbq3_0"
    bits = 3
    error = 0.0339
    codec_class = TBQ3Codec
