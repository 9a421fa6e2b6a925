"""`tcq4`, `tcq3`, `tcq2`: TurboQuant whose codes are paths through a trellis. The bytes of tq, a third less error.

Encoding searches 256 states for every value, which takes 26 to 33 times tq's lane operations; decoding is a look into a
table. Rotation and scale are tq's. Source of the codes: see `mlx_tq.codec.trellis`.
"""

import mlx.core as mx

from mlx_tq.codec import trellis
from mlx_tq.codec.formats.turbo import Turbo, TurboCodec


class TrellisCodec(TurboCodec):
    """Rings of 2, 3 or 4 bits a value against the levels of `mlx_tq.codec.trellis`."""

    def _nearest(self, t: mx.array) -> tuple[mx.array, mx.array]:
        states = trellis.encode(t, self.bits)
        return trellis.pack(states, self.bits), trellis.levels(self.bits)[states]

    def _levels(self, words: list[mx.array], axis: int = -1) -> list[mx.array]:
        return [trellis.levels(self.bits)[states] for states in trellis.unpack(words, self.bits, axis)]


class Trellis(Turbo):
    """Rings of `bits` bits a value and an fp16 scale."""

    codec_class = TrellisCodec


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
