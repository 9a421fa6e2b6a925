"""Measure pairs of formats at their stored bits: ours, those of mlx-lm's quantized cache, and llama.cpp's q4_0.

    python -m benchmarks.quality.frontier GROUPS [flags of `mlx_tq.evaluate formats`]

GROUPS are joined by +: ours, trellis, sorted, layers, plain, field.

mlx-lm's codes are integers with an fp16 scale and bias for each group of 32 or 64 values. Here they replace a format of
the package, behind the same sinks and window, so that only codes are compared.
"""

import sys

import mlx.core as mx

from mlx_tq.codec import Codec, Encoded, Format, register_format
from mlx_tq.codec.formats.base import FP16_MAX, TINY
from mlx_tq.evaluate import build_parser, run

_FIELD = ("affine8_64", "affine4_64", "affine4_32", "affine3_64", "affine3_32", "affine2_64", "affine2_32", "q4_0")
_OTHERS = ("fp8", "q8_0", "tbq4_0", "tbq3_0", "tq3_0")
PAIRS = {
    "ours": [
        *("q8/q8", "q8/tq4", "q8/tq3", "tq4/tq4", "tq4/tq3", "tq4/tq2"),
        *("tq3/tq4", "tq3/tq3", "tq3/tq2", "tq2/tq3", "tq2/tq2"),
    ],
    "trellis": ["q8/tcq3", "tcq4/tcq4", "tcq4/tcq3", "tcq3/tcq3", "tcq3/tcq2", "tcq2/tcq2"],
    "sorted": ["stcq4/tcq4", "stcq4/tq4", "stcq4/tcq3", "stcq3/tcq3", "stcq2/tcq2"],
    "layers": [f"{bits:g}bits" for bits in (2.6, 3, 3.4, 3.8, 4.3, 5.3, 6.3)],
    "plain": [f"{name}:plain/{name}" for name in ("q8", "tq4", "tq3", "tq2")],
    "field": [f"{name}:plain/{name}" for name in (*_FIELD, *_OTHERS)],
}


class AffineCodec(Codec):
    """mlx's own `quantize`, the format of mlx-lm's --kv-bits: integers, with a scale and a bias for each group."""

    def __init__(self, head_dim: int, bits: int, group: int) -> None:
        self._how = {"bits": bits, "group_size": group}
        self._codes = head_dim * bits // 16
        super().__init__(head_dim, self._codes + 2 * (head_dim // group))

    def encode(self, x: mx.array) -> Encoded:
        parts = mx.quantize(x.astype(mx.float16), **self._how)
        return Encoded(mx.concatenate([part.view(mx.uint16) for part in parts], axis=-1), None)

    def decode_planes(self, codes: mx.array) -> list[mx.array]:
        whole = mx.contiguous(codes[..., : self._codes]).view(mx.uint32)
        scale, bias = (x.view(mx.float16).astype(mx.float32) for x in mx.split(codes[..., self._codes :], 2, axis=-1))
        return [mx.dequantize(whole, scale, bias, **self._how)]


class Q4ZeroCodec(Codec):
    """`block_q4_0` of ggml: { fp16 d; uint8 qs[16]; }, d = (the largest by size) / -8, q = x / d + 8."""

    def __init__(self, head_dim: int) -> None:
        super().__init__(head_dim, head_dim // 32 * 9)

    def encode(self, x: mx.array) -> Encoded:
        lead = x.shape[:-1]
        x = x.astype(mx.float32).reshape(*lead, -1, 32)
        at = mx.abs(x).argmax(axis=-1, keepdims=True)
        step = mx.take_along_axis(x, at, axis=-1) / -8
        size = mx.abs(step)
        ratio = x * mx.sign(step) * mx.where(size > TINY, 1.0 / size, 0.0)
        whole = mx.clip(mx.floor(ratio + 8.5), 0, 15).astype(mx.uint8)
        scale = mx.minimum(step, FP16_MAX).astype(mx.float16).view(mx.uint8)
        data = mx.concatenate([scale, whole[..., :16] | (whole[..., 16:] << 4)], axis=-1)
        return Encoded(data.reshape(*lead, 2 * self.words).view(mx.uint16), None)

    def decode_planes(self, codes: mx.array) -> list[mx.array]:
        data = codes.view(mx.uint8).reshape(*codes.shape[:-1], -1, 18)
        halves = mx.concatenate([data[..., 2:] & 15, data[..., 2:] >> 4], axis=-1)
        scale = data[..., :2].view(mx.float16).astype(mx.float32)
        return [((halves.astype(mx.float32) - 8) * scale).reshape(*codes.shape[:-1], self.head_dim)]


def affine(bits: int, group: int) -> Format:
    return Format(
        f"affine{bits}_{group}", bits, 0.0, lambda head_dim, options, dtype: AffineCodec(head_dim, bits, group)
    )


FORMATS = [
    *(affine(bits, group) for bits in (8, 4, 3, 2) for group in (32, 64)),
    Format("q4_0", 4, 0.0, lambda head_dim, options, dtype: Q4ZeroCodec(head_dim), multiple=32),
]


def main() -> int:
    groups, *words = sys.argv[1:]
    pairs = [pair for group in groups.split("+") for pair in PAIRS[group]]
    for each in FORMATS:
        register_format(each)
    return run(build_parser().parse_args(["formats", "--pairs", ",".join(pairs), *words]))


if __name__ == "__main__":
    sys.exit(main())
