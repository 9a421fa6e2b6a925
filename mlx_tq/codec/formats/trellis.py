"""`tcq4`, `tcq3`, `tcq2`: TurboQuant whose codes are paths through a trellis. The bytes of tq, a third less error.

Encoding searches 256 states for every value, which takes 10 to 25 times as long as tq's; decoding is a look into a
table. Rotation and scale are tq's. Source of the codes: see `mlx_tq.codec.trellis`.
"""

from typing import ClassVar

import mlx.core as mx

from mlx_tq.codec import trellis
from mlx_tq.codec.formats.base import Codec, CodecOptions, Format
from mlx_tq.codec.formats.turbo import TurboCodec
from mlx_tq.codec.packing import words_per_vector


class TrellisCodec(TurboCodec):
    """Rings of 2, 3 or 4 bits a value against the levels of `mlx_tq.codec.trellis`."""

    def _nearest(self, t: mx.array) -> tuple[mx.array, mx.array]:
        states = trellis.encode(t, self.bits)
        return trellis.pack(states, self.bits), trellis.levels(self.bits)[states]

    def _levels(self, words: list[mx.array], axis: int = -1) -> list[mx.array]:
        return [trellis.levels(self.bits)[states] for states in trellis.unpack(words, self.bits, axis)]


class Trellis(Format):
    """Rings of `bits` bits a value and an fp16 scale."""

    bits: ClassVar[int]

    def bytes_per_vector(self, head_dim: int) -> int:
        """Packed codes and two bytes of scale."""
        return 2 * words_per_vector(head_dim, self.bits) + 2

    def codec(self, head_dim: int, options: CodecOptions, dtype: mx.Dtype = mx.float16) -> Codec:
        """The codec; the model's type does not matter."""
        self.check(head_dim)
        return TrellisCodec(head_dim, self.bits, options)


class TCQ4(Trellis):
    """4 bits: 66 bytes at head_dim 128."""

    name = "tcq4"
    bits = 4
    error = 0.00580


class TCQ3(Trellis):
    """3 bits: 50 bytes at head_dim 128."""

    name = "tcq3"
    bits = 3
    error = 0.0210


class TCQ2(Trellis):
    """2 bits: 34 bytes at head_dim 128."""

    name = "tcq2"
    bits = 2
    error = 0.0775
