"""Formats of other programs, byte for byte: blocks of a vector with an fp16 scale each, and fp8.

- `q8_0`: GGML's `block_q8_0`; codes are rounded halves away from zero.
- `tq3_0`: TurboQuant in blocks of 32 for GGML, as in O. Church's proposal; other public formats have its name and
  another layout.
- `tbq4_0`, `tbq3_0`: TurboQuant in blocks of 128, after the TBQ formats of llama.cpp forks, with Lloyd-Max levels (Max
  1960). The forks make their dense rotation by a QR on the user's machine, which is not the same to the bit everywhere;
  here it is data (rotation_128.npy, a `Haar` of seed 42), so blocks have their layout but not their rotation.
- `fp8`: e4m3 without rotation or scale, the keys of vLLM's preset k8v4 (Micikevicius et al., arXiv 2209.05433).
"""

import math
from collections.abc import Callable
from functools import cache, partial, reduce
from importlib.resources import files
from io import BytesIO
from itertools import accumulate
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_tq.codec.codebook import midpoints
from mlx_tq.codec.formats.base import FP16_MAX, TINY, Codec, CodecOptions, Encoded, Format
from mlx_tq.codec.rotation import Dense, Rotation, WalshHadamard, pairwise_sum

_FP8_MAX = 448.0
_TQ3_0_SIGNS = "+-++--+-++-+-+--+--++-+--+++--+-"
_TQ3_0_LEVELS = (-2.1573, -1.3336, -0.7434, -0.2428, 0.2428, 0.7434, 1.3336, 2.1573)
_TQ3_0_BOUNDARIES = (-1.7455, -1.0385, -0.4931, 0.0, 0.4931, 1.0385, 1.7455)
_TBQ_BLOCK = 128
_TBQ_POSITIVE_LEVELS = {
    3: (0.2451, 0.7560, 1.3439, 2.1519),
    4: (0.1284, 0.3880, 0.6568, 0.9423, 1.2562, 1.6180, 2.0690, 2.7326),
}


Quantize = Callable[[mx.array], tuple[mx.array, mx.array]]  # fp32 [..., block] -> codes uint8, scale fp32 [..., 1]


class BlockCodec(Codec):
    """Stores vectors as runs of blocks in a published layout. All bytes of a vector are its codes."""

    def __init__(
        self,
        head_dim: int,
        block: int,  # values in a block
        fields: tuple[int, ...],  # bits of the fields of a code, lowest first; each field of a block is one stream
        levels: np.ndarray,  # of the codes, over the scale
        quantize: Quantize,
        rotation: Callable[[], Rotation] | None = None,  # of a block
        *,
        scale_first: bool = False,  # the fp16 scale comes before the codes, not after them
    ) -> None:
        self._block, self._quantize, self._scale_first = block, quantize, scale_first
        self._fields = [*zip(accumulate(fields, initial=0), fields, strict=False)]  # shift and bits
        self._levels = levels.astype(np.float32)
        self._block_bytes = block * sum(fields) // 8 + 2
        inner = None if rotation is None else BlockRotation(head_dim, rotation())
        super().__init__(head_dim, head_dim // block * self._block_bytes // 2, inner)

    def encode(self, x: mx.array) -> Encoded:
        lead = x.shape[:-1]
        codes, scale = self._quantize(x.astype(mx.float32).reshape(*lead, -1, self._block))
        parts = [_pack_bits((codes >> shift) & (2**bits - 1), bits) for shift, bits in self._fields]
        stored_scale = mx.minimum(scale, FP16_MAX).astype(mx.float16).view(mx.uint8)
        data = mx.concatenate([stored_scale, *parts] if self._scale_first else [*parts, stored_scale], axis=-1)
        return Encoded(data.reshape(*lead, 2 * self.words).view(mx.uint16), None)

    def decode_planes(self, codes: mx.array) -> list[mx.array]:
        data, scale = self._split(codes)
        streams = mx.split(data, [self._block * shift // 8 for shift, _ in self._fields[1:]], axis=-1)
        fields = zip(self._fields, streams, strict=True)
        code = reduce(mx.bitwise_or, [_unpack_bits(stream, bits) << shift for (shift, bits), stream in fields])
        return [(mx.array(self._levels)[code] * scale).reshape(*codes.shape[:-1], self.head_dim)]

    def find_clamped(self, peak: mx.array, encoded: Encoded) -> mx.array:
        return (self._split(encoded.codes)[1] >= FP16_MAX).any(axis=(-1, -2))

    def _split(self, words: mx.array) -> tuple[mx.array, mx.array]:
        """Return the bytes of the codes of each block, and the scales, fp32 [..., blocks, 1]."""
        blocks = words.view(mx.uint8).reshape(*words.shape[:-1], -1, self._block_bytes)
        first, last = mx.split(blocks, [2 if self._scale_first else -2], axis=-1)
        data, scale = (last, first) if self._scale_first else (first, last)
        return data, scale.view(mx.float16).astype(mx.float32)


class BlockRotation(Rotation):
    """The same rotation of each block of a vector."""

    def __init__(self, dim: int, inner: Rotation) -> None:
        self.dim = dim
        self._inner = inner

    def forward(self, x: mx.array) -> mx.array:
        blocks = self._inner.forward(x.reshape(*x.shape[:-1], -1, self._inner.dim))
        return blocks.reshape(x.shape) * math.sqrt(self.dim / self._inner.dim)

    def inverse(self, y: mx.array) -> mx.array:
        return self._inner.inverse(y.reshape(*y.shape[:-1], -1, self._inner.dim)).reshape(y.shape)


def _pack_bits(fields: mx.array, bits: int) -> mx.array:
    """Pack fields of `bits` bits as a stream, lowest first: uint8 [..., n] -> uint8 [..., n bits / 8]."""
    eights = fields.astype(mx.uint64).reshape(*fields.shape[:-1], -1, 8)
    stream = (eights << mx.arange(0, 8 * bits, bits, dtype=mx.uint64)).sum(axis=-1)
    return stream[..., None].view(mx.uint8)[..., :bits].reshape(*fields.shape[:-1], -1)


def _unpack_bits(data: mx.array, bits: int) -> mx.array:
    """Invert `_pack_bits`: uint32 [..., n]."""
    runs = data.reshape(*data.shape[:-1], -1, bits).astype(mx.uint64)
    stream = (runs << mx.arange(0, 8 * bits, 8, dtype=mx.uint64)).sum(axis=-1)[..., None]
    fields: mx.array = (stream >> mx.arange(0, 8 * bits, bits, dtype=mx.uint64)) & (2**bits - 1)
    return fields.astype(mx.uint32).reshape(*data.shape[:-1], -1)


def _inverse(scale: mx.array) -> mx.array:
    return mx.where(scale > TINY, 1.0 / scale, 0.0)


def _quantize_q8_0(x: mx.array) -> tuple[mx.array, mx.array]:
    step = mx.abs(x).max(axis=-1, keepdims=True) / 127.0
    ratio = x * _inverse(step)
    size = mx.abs(ratio)
    floor = mx.floor(size)
    codes = (mx.sign(ratio) * (floor + (size - floor >= 0.5))).astype(mx.int8)
    return codes.view(mx.uint8), step


@cache
def _tq3_0_rotation() -> Rotation:
    rotation = WalshHadamard(len(_TQ3_0_SIGNS))
    rotation.signs = mx.array([1.0 if sign == "+" else -1.0 for sign in _TQ3_0_SIGNS])
    return rotation


def _quantize_tq3_0(x: mx.array) -> tuple[mx.array, mx.array]:
    y = _tq3_0_rotation().forward(x) * (1 / math.sqrt(len(_TQ3_0_SIGNS)))
    scale = mx.abs(y).max(axis=-1, keepdims=True) / _TQ3_0_LEVELS[-1]
    t = y * _inverse(scale)
    return reduce(mx.add, [(t >= boundary).astype(mx.uint8) for boundary in _TQ3_0_BOUNDARIES]), scale


@cache
def _tbq_rotation() -> Rotation:
    data = (files("mlx_tq.codec.formats.compared") / "rotation_128.npy").read_bytes()
    return Dense(mx.array(np.load(BytesIO(data), allow_pickle=False)))


def _tbq_levels(bits: int) -> np.ndarray:
    positive = np.array(_TBQ_POSITIVE_LEVELS[bits])
    return np.concatenate([-positive[::-1], positive])


def _quantize_tbq(x: mx.array, bits: int) -> tuple[mx.array, mx.array]:
    x = mx.clip(x, -FP16_MAX, FP16_MAX)
    norm = mx.sqrt(pairwise_sum(x * x))[..., None]
    t = _tbq_rotation().forward(x) * _inverse(norm)
    boundaries = midpoints(_tbq_levels(bits)).astype(np.float32).tolist()
    return reduce(mx.add, [(t > boundary).astype(mx.uint8) for boundary in boundaries]), norm


class FP8Codec(Codec):
    """Stores one byte per value; values above 448 are clamped, and counted."""

    def encode(self, x: mx.array) -> Encoded:
        return Encoded(mx.to_fp8(mx.clip(x.astype(mx.float32), -_FP8_MAX, _FP8_MAX)).view(mx.uint16), None)

    def decode_planes(self, codes: mx.array) -> list[mx.array]:
        return [mx.from_fp8(codes.view(mx.uint8), mx.float32)]

    def find_clamped(self, peak: mx.array, encoded: Encoded) -> mx.array:
        return peak > _FP8_MAX


def _block_format(name: str, error: float, block: int, fields: tuple[int, ...], *layout: Any, **options: Any) -> Format:
    """Return a format of blocks; the other arguments are those of `BlockCodec`."""

    def make_codec(head_dim: int, _options: CodecOptions, dtype: mx.Dtype) -> Codec:
        return BlockCodec(head_dim, block, fields, *layout, **options)

    return Format(name, sum(fields), error, make_codec, multiple=block)


def _tbq_format(name: str, error: float, bits: int) -> Format:
    levels = _tbq_levels(bits) / math.sqrt(_TBQ_BLOCK)
    return _block_format(name, error, _TBQ_BLOCK, (bits,), levels, partial(_quantize_tbq, bits=bits), _tbq_rotation)


_INT8_LEVELS = np.arange(256).astype(np.uint8).view(np.int8)
FORMATS = (
    Format("fp8", 8, 7.05e-4, lambda head_dim, options, dtype: FP8Codec(head_dim, head_dim // 2)),
    _block_format("q8_0", 2.87e-5, 32, (8,), _INT8_LEVELS, _quantize_q8_0, scale_first=True),
    _tbq_format("tbq4_0", 0.00932, 4),
    _tbq_format("tbq3_0", 0.0339, 3),
    _block_format("tq3_0", 0.0316, 32, (2, 1), np.array(_TQ3_0_LEVELS), _quantize_tq3_0, _tq3_0_rotation),
)
