"""What the formats of other programs have in common: blocks of a vector that carry their own fp16 scale."""

from abc import abstractmethod
from typing import ClassVar

import mlx.core as mx

from mlx_tq.codec.formats.base import FP16_MAX, Codec, CodecOptions, Encoded, Format
from mlx_tq.codec.rotation import BlockRotation, Rotation
from mlx_tq.errors import ConfigError

# Below this the inverse of a block's scale would overflow; such a block is stored as zero.
TINY = 2.0**-110


class BlockCodec(Codec):
    """Vectors as runs of blocks, byte for byte in the published order. All of a vector's bytes are its codes.

    Attributes:
        block: values in a block.
        block_bytes: its bytes.
        scale_at: where its fp16 scale starts among them.
    """

    block: ClassVar[int]
    block_bytes: ClassVar[int]
    scale_at: ClassVar[int]

    def __init__(self, head_dim: int, rotation: Rotation | None = None) -> None:
        super().__init__(head_dim, None if rotation is None else BlockRotation(head_dim, rotation))

    @property
    def words(self) -> int:
        """16-bit words per vector."""
        return self.head_dim // self.block * self.block_bytes // 2

    @abstractmethod
    def encode_blocks(self, x: mx.array) -> mx.array:
        """fp32 [..., block] -> uint8 [..., block_bytes]."""

    @abstractmethod
    def decode_blocks(self, data: mx.array) -> mx.array:
        """uint8 [..., block_bytes] -> fp32 [..., block], in rotated space."""

    def encode(self, x: mx.array) -> Encoded:
        """Encode vectors [..., D]. A zero vector decodes to zero."""
        lead = x.shape[:-1]
        data = self.encode_blocks(x.astype(mx.float32).reshape(*lead, -1, self.block))
        return Encoded(data.reshape(*lead, 2 * self.words).view(mx.uint16), None)

    def planes(self, codes: mx.array) -> list[mx.array]:
        """The decoded blocks: one fp32 [..., D]."""
        return [self.decode_blocks(self._blocks(codes)).reshape(*codes.shape[:-1], self.head_dim)]

    def clamped(self, peak: mx.array, encoded: Encoded) -> mx.array:
        """A block's scale reached fp16's largest number."""
        return (self.scale_of(self._blocks(encoded.codes)) >= FP16_MAX).any(axis=(-1, -2))

    def scale_of(self, data: mx.array) -> mx.array:
        """The stored scales of blocks: uint8 [..., block_bytes] -> fp32 [..., 1]."""
        return data[..., self.scale_at : self.scale_at + 2].view(mx.float16).astype(mx.float32)

    def _blocks(self, codes: mx.array) -> mx.array:
        return codes.view(mx.uint8).reshape(*codes.shape[:-1], -1, self.block_bytes)


def scale_bytes(scale: mx.array) -> mx.array:
    """fp32 [..., 1], clamped to fp16's range, as its two bytes: uint8 [..., 2]."""
    return mx.minimum(scale, FP16_MAX).astype(mx.float16).view(mx.uint8)


def inverse(scale: mx.array) -> mx.array:
    """1 / scale, and 0 where that would overflow."""
    return mx.where(scale > TINY, 1.0 / scale, 0.0)


class BlockFormat(Format):
    """A format that stores a vector as blocks with a scale each.

    Attributes:
        codec_class: made from a head size alone.
    """

    codec_class: ClassVar[type[BlockCodec]]

    def bytes_per_vector(self, head_dim: int) -> int:
        """The bytes of all blocks of a vector, scales included."""
        return head_dim // self.codec_class.block * self.codec_class.block_bytes

    def check(self, head_dim: int) -> None:
        """Raise ConfigError where a vector is no whole number of blocks."""
        block = self.codec_class.block
        if head_dim % block or head_dim <= 0:
            raise ConfigError(
                f"head_dim {head_dim} cannot be stored as {self.name}, whose blocks have {block} values; valid are "
                f"multiples of {block}. Use q8 or tq4 for this model."
            )

    def codec(self, head_dim: int, options: CodecOptions, dtype: mx.Dtype = mx.float16) -> Codec:
        """The codec; the published layout leaves nothing for `options` to choose."""
        self.check(head_dim)
        return self.codec_class(head_dim)
