"""All pairs of formats at their stored bits: this package's, those of mlx-lm's quantised cache, and llama.cpp's q4_0.

python benchmarks/quality/frontier.py {ours,trellis,layers,plain,field}+... [flags of `mlx_tq.evaluate formats`]

mlx-lm's codes are asymmetric integers with an fp16 scale and bias for each group of 32 or 64 values; here they take the
place of a format of the package, behind the same sinks and window, so that codes are compared and nothing else.
"""

import sys

import mlx.core as mx
from mlx_tq.codec.formats.block import BlockCodec, BlockFormat, inverse, scale_bytes

from mlx_tq.codec import Codec, CodecOptions, Encoded, Format, formats
from mlx_tq.evaluate.command import build_parser, run

_FIELD = ("affine8_64", "affine4_64", "affine4_32", "affine3_64", "affine3_32", "affine2_64", "affine2_32", "q4_0")
_OTHERS = ("fp8", "q8_0", "tbq4_0", "tbq3_0", "tq3_0")
PAIRS = {
    "ours": [
        *("q8/q8", "q8/tq4", "q8/tq3", "tq4/tq4", "tq4/tq3", "tq4/tq2"),
        *("tq3/tq4", "tq3/tq3", "tq3/tq2", "tq2/tq3", "tq2/tq2"),
    ],
    "trellis": ["q8/tcq3", "tcq4/tcq4", "tcq4/tcq3", "tcq3/tcq3", "tcq3/tcq2", "tcq2/tcq2"],
    "layers": [f"{bits:g}bits" for bits in (2.6, 3, 3.4, 3.8, 4.3, 5.3, 6.3)],
    "plain": [f"{name}:plain/{name}" for name in ("q8", "tq4", "tq3", "tq2")],
    "field": [f"{name}:plain/{name}" for name in (*_FIELD, *_OTHERS)],
}


class AffineCodec(Codec):
    """mlx's own `quantize`: whole numbers, and a scale and a bias for each group."""

    def __init__(self, head_dim: int, bits: int, group: int) -> None:
        super().__init__(head_dim, rotation=None)
        self._how = {"bits": bits, "group_size": group}
        self._sizes = [head_dim * bits // 16, head_dim // group, head_dim // group]

    @property
    def words(self) -> int:
        """16-bit words of codes per vector."""
        return sum(self._sizes)

    def encode(self, x: mx.array) -> Encoded:
        """Encode vectors of any float type and leading dims: [..., D]."""
        parts = mx.quantize(x.astype(mx.float16), **self._how)
        return Encoded(mx.concatenate([part.view(mx.uint16) for part in parts], axis=-1), None)

    def planes(self, codes: mx.array) -> list[mx.array]:
        """The decoded vectors: one fp32 [..., D]."""
        at = self._sizes[0]
        whole = mx.contiguous(codes[..., :at]).view(mx.uint32)
        scale, bias = (x.view(mx.float16).astype(mx.float32) for x in mx.split(codes[..., at:], 2, axis=-1))
        return [mx.dequantize(whole, scale, bias, **self._how)]


class Affine(Format):
    """mlx-lm's `--kv-bits`."""

    name = "affine"
    error = 0.0

    def __init__(self, bits: int, group: int) -> None:
        self.bits, self.group = bits, group  # type: ignore[misc]
        self.name = f"affine{bits}_{group}"  # type: ignore[misc]

    @classmethod
    def variants(cls) -> list[Format]:
        """Every number of bits with both sizes of groups."""
        return [cls(bits, group) for bits in (8, 4, 3, 2) for group in (32, 64)]

    def bytes_per_vector(self, head_dim: int) -> int:
        """Codes, scales and biases."""
        return head_dim * int(self.bits) // 8 + 4 * head_dim // self.group

    def codec(self, head_dim: int, options: CodecOptions, dtype: mx.Dtype = mx.float16) -> Codec:
        """The codec; mlx leaves nothing for `options` to choose."""
        self.check(head_dim)
        return AffineCodec(head_dim, int(self.bits), self.group)


class Q4ZeroCodec(BlockCodec):
    """`block_q4_0` of ggml: { fp16 d; uint8 qs[16]; }, d = (the largest by size) / -8, q = x / d + 8."""

    block = 32
    block_bytes = 18
    scale_at = 0

    def encode_blocks(self, x: mx.array) -> mx.array:
        """fp32 [..., 32] -> uint8 [..., 18]."""
        at = mx.abs(x).argmax(axis=-1, keepdims=True)
        step = mx.take_along_axis(x, at, axis=-1) / -8
        ratio = x * mx.sign(step) * inverse(mx.abs(step))
        whole = mx.clip(mx.floor(ratio + 8.5), 0, 15).astype(mx.uint8)
        return mx.concatenate([scale_bytes(step), whole[..., :16] | (whole[..., 16:] << 4)], axis=-1)

    def decode_blocks(self, data: mx.array) -> mx.array:
        """uint8 [..., 18] -> fp32 [..., 32]."""
        halves = mx.concatenate([data[..., 2:] & 15, data[..., 2:] >> 4], axis=-1)
        return (halves.astype(mx.float32) - 8) * self.scale_of(data)


class Q4Zero(BlockFormat):
    """4-bit integers in blocks of 32: 72 bytes at head_dim 128."""

    name = "q4_0"
    bits = 4
    error = 0.0
    codec_class = Q4ZeroCodec


def main() -> int:
    """`mlx_tq.evaluate formats` with the pairs of a group."""
    groups, *words = sys.argv[1:]
    pairs = [pair for group in groups.split("+") for pair in PAIRS[group]]
    formats._registry.cache_clear()  # the configuration was imported before these formats
    return run(build_parser().parse_args(["formats", "--pairs", ",".join(pairs), *words]))


if __name__ == "__main__":
    sys.exit(main())
