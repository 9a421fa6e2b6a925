"""Formats of other programs, byte for byte: blocks of a vector with an fp16 scale each, and fp8.

- `q8_0`: 8-bit blocks of GGML (`block_q8_0`): d = amax / 127, codes = round(x / d), halves away from zero.
- `tq3_0`: TurboQuant in blocks of 32 for GGML, as in O. Church's proposal. A block is multiplied by fixed signs,
  transformed (Walsh-Hadamard) and divided by sqrt(32); d = amax / 2.1573, and a code is the number of boundaries that
  are not above y / d. Other public formats have the same name and another layout.
- `tbq4_0`, `tbq3_0`: TurboQuant in blocks of 128 with a dense rotation, after the TBQ formats of llama.cpp forks.
  Levels: Lloyd-Max for N(0, 1) (Max 1960), over sqrt(128). The forks make their rotation by a QR on the user's machine,
  which is not the same to the bit everywhere; here it is data (rotation_128.npy, a `Haar` of seed 42), so blocks have
  their layout but not their rotation.
- `fp8`: e4m3 without rotation or scale, the keys of vLLM's preset k8v4. Source: Micikevicius et al., FP8 Formats for
  Deep Learning (arXiv 2209.05433), E4M3: largest 448, no infinities.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property, partial
from importlib.resources import files
from io import BytesIO

import mlx.core as mx
import numpy as np

from mlx_tq.codec.codebook import midpoints
from mlx_tq.codec.formats.base import FP16_MAX, TINY, Codec, CodecOptions, Encoded, Format
from mlx_tq.codec.rotation import Dense, Rotation, WalshHadamard, pairwise_sum, parse_signs

_FP8_MAX = 448.0
_TQ3_0_SIGNS = "+-++--+-++-+-+--+--++-+--+++--+-"
_TQ3_0_LEVELS = (-2.1573, -1.3336, -0.7434, -0.2428, 0.2428, 0.7434, 1.3336, 2.1573)
_TQ3_0_BOUNDARIES = (-1.7455, -1.0385, -0.4931, 0.0, 0.4931, 1.0385, 1.7455)
_TBQ_BLOCK = 128
_TBQ_POSITIVE_LEVELS = {
    3: (0.2451, 0.7560, 1.3439, 2.1519),
    4: (0.1284, 0.3880, 0.6568, 0.9423, 1.2562, 1.6180, 2.0690, 2.7326),
}


@dataclass(frozen=True)
class BlockLayout:
    """Describe a published block format.

    Attributes:
        block: values in a block.
        fields: widths in bits of the fields that hold a code, its lowest bits first. A field of all values of a block
            is one stream of bits, the lowest first.
        levels: value of each code over the scale, fp32 [2^bits].
        quantize: fp32 [..., block] -> codes uint8 [..., block] and the scale fp32 [..., 1].
        rotation: makes the rotation of a block, or None.
        scale_first: the fp16 scale comes before the codes, not after them.
    """

    block: int
    fields: tuple[int, ...]
    levels: np.ndarray
    quantize: Callable[[mx.array], tuple[mx.array, mx.array]]
    rotation: Callable[[], Rotation] | None = None
    scale_first: bool = False


class BlockCodec(Codec):
    """Stores vectors as runs of blocks in a published layout. All bytes of a vector are its codes."""

    def __init__(self, head_dim: int, layout: BlockLayout) -> None:
        self._layout = layout
        self._sizes = [layout.block * bits // 8 for bits in layout.fields]
        self._block_bytes = sum(self._sizes) + 2
        rotation = None if layout.rotation is None else BlockRotation(head_dim, layout.rotation())
        super().__init__(head_dim, head_dim // layout.block * self._block_bytes // 2, rotation)

    def encode(self, x: mx.array) -> Encoded:
        lead = x.shape[:-1]
        codes, scale = self._layout.quantize(x.astype(mx.float32).reshape(*lead, -1, self._layout.block))
        parts, shift = [], 0
        for bits in self._layout.fields:
            parts.append(_pack_bits((codes >> shift) & (2**bits - 1), bits))
            shift += bits
        parts.insert(0 if self._layout.scale_first else len(parts), _scale_bytes(scale))
        data = mx.concatenate(parts, axis=-1)
        return Encoded(data.reshape(*lead, 2 * self.words).view(mx.uint16), None)

    def decode_planes(self, codes: mx.array) -> list[mx.array]:
        blocks = self._blocks(codes)
        data = blocks[..., 2:] if self._layout.scale_first else blocks[..., :-2]
        code, shift, start = mx.zeros((*data.shape[:-1], self._layout.block), mx.uint32), 0, 0
        for bits, size in zip(self._layout.fields, self._sizes, strict=True):
            code = code | (_unpack_bits(data[..., start : start + size], bits) << shift)
            shift, start = shift + bits, start + size
        return [(mx.array(self._layout.levels)[code] * self._scale(blocks)).reshape(*codes.shape[:-1], self.head_dim)]

    def find_clamped(self, peak: mx.array, encoded: Encoded) -> mx.array:
        return (self._scale(self._blocks(encoded.codes)) >= FP16_MAX).any(axis=(-1, -2))

    def _blocks(self, codes: mx.array) -> mx.array:
        return codes.view(mx.uint8).reshape(*codes.shape[:-1], -1, self._block_bytes)

    def _scale(self, blocks: mx.array) -> mx.array:
        data = blocks[..., :2] if self._layout.scale_first else blocks[..., -2:]
        return data.view(mx.float16).astype(mx.float32)


class BlockRotation:
    """The same rotation of each block of a vector."""

    def __init__(self, dim: int, inner: Rotation) -> None:
        self.dim = dim
        self._inner = inner

    def forward(self, x: mx.array) -> mx.array:
        blocks = self._inner.forward(x.reshape(*x.shape[:-1], -1, self._inner.dim))
        return blocks.reshape(x.shape) * math.sqrt(self.dim / self._inner.dim)

    def inverse(self, y: mx.array) -> mx.array:
        return self._inner.inverse(y.reshape(*y.shape[:-1], -1, self._inner.dim)).reshape(y.shape)

    @cached_property
    def matrix(self) -> mx.array:
        return (self.forward(mx.eye(self.dim)) / math.sqrt(self.dim)).T


def _pack_bits(fields: mx.array, bits: int) -> mx.array:
    """Pack fields of `bits` bits as a stream, lowest first: uint8 [..., n] -> uint8 [..., n bits / 8]."""
    if bits == 8:
        return fields
    eights = fields.astype(mx.uint32).reshape(*fields.shape[:-1], -1, 8)
    stream = (eights << mx.arange(0, 8 * bits, bits, dtype=mx.uint32)).sum(axis=-1)
    return stream[..., None].view(mx.uint8)[..., :bits].reshape(*fields.shape[:-1], -1)


def _unpack_bits(data: mx.array, bits: int) -> mx.array:
    """Invert `_pack_bits`: uint32 [..., n]."""
    if bits == 8:
        return data.astype(mx.uint32)
    runs = data.reshape(*data.shape[:-1], -1, bits).astype(mx.uint32)
    stream = (runs << mx.arange(0, 8 * bits, 8, dtype=mx.uint32)).sum(axis=-1)[..., None]
    fields: mx.array = (stream >> mx.arange(0, 8 * bits, bits, dtype=mx.uint32)) & (2**bits - 1)
    return fields.reshape(*data.shape[:-1], -1)


def _scale_bytes(scale: mx.array) -> mx.array:
    return mx.minimum(scale, FP16_MAX).astype(mx.float16).view(mx.uint8)


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
    rotation.signs = mx.array(parse_signs(_TQ3_0_SIGNS))
    return rotation


def _quantize_tq3_0(x: mx.array) -> tuple[mx.array, mx.array]:
    y = _tq3_0_rotation().forward(x) * (1 / math.sqrt(len(_TQ3_0_SIGNS)))
    scale = mx.abs(y).max(axis=-1, keepdims=True) / _TQ3_0_LEVELS[-1]
    t = y * _inverse(scale)
    code = mx.zeros(t.shape, mx.uint8)
    for boundary in _TQ3_0_BOUNDARIES:
        code = code + (t >= boundary)
    return code, scale


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
    code = mx.zeros(t.shape, mx.uint8)
    for boundary in midpoints(_tbq_levels(bits)).astype(np.float32).tolist():
        code = code + (t > boundary)
    return code, norm


def _tbq_layout(bits: int) -> BlockLayout:
    levels = (_tbq_levels(bits) / math.sqrt(_TBQ_BLOCK)).astype(np.float32)
    return BlockLayout(_TBQ_BLOCK, (bits,), levels, partial(_quantize_tbq, bits=bits), _tbq_rotation)


class FP8Codec(Codec):
    """Stores one byte per value; values above 448 are clamped, and counted."""

    def encode(self, x: mx.array) -> Encoded:
        return Encoded(mx.to_fp8(mx.clip(x.astype(mx.float32), -_FP8_MAX, _FP8_MAX)).view(mx.uint16), None)

    def decode_planes(self, codes: mx.array) -> list[mx.array]:
        return [mx.from_fp8(codes.view(mx.uint8), mx.float32)]

    def find_clamped(self, peak: mx.array, encoded: Encoded) -> mx.array:
        return peak > _FP8_MAX


def _block_format(name: str, error: float, layout: BlockLayout) -> Format:
    def make_codec(head_dim: int, options: CodecOptions, dtype: mx.Dtype) -> Codec:
        return BlockCodec(head_dim, layout)

    return Format(name, sum(layout.fields), error, make_codec, multiple=layout.block)


_INT8_LEVELS = np.arange(256).astype(np.uint8).view(np.int8).astype(np.float32)
FORMATS = (
    Format("fp8", 8, 7.05e-4, lambda head_dim, options, dtype: FP8Codec(head_dim, head_dim // 2)),
    _block_format("q8_0", 2.87e-5, BlockLayout(32, (8,), _INT8_LEVELS, _quantize_q8_0, scale_first=True)),
    _block_format("tbq4_0", 0.00932, _tbq_layout(4)),
    _block_format("tbq3_0", 0.0339, _tbq_layout(3)),
    _block_format(
        "tq3_0",
        0.0316,
        BlockLayout(32, (2, 1), np.array(_TQ3_0_LEVELS, np.float32), _quantize_tq3_0, _tq3_0_rotation),
    ),
)
