"""What TurboQuant could be built otherwise: formats for the ablation, which decode to the original space."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx

from mlx_tq.codec import Codec, CodecOptions, Encoded, Format
from mlx_tq.codec.formats.turbo import TurboCodec
from mlx_tq.codec.rotation import Rotation, WalshHadamard, get_rotation

# Makes a rotation from a size and a seed.
Maker = Callable[[int, int], Rotation]


class Composed:
    def __init__(self, parts: list[Rotation], signs: mx.array | None = None) -> None:
        self.dim = parts[0].dim
        self._parts = parts
        self._signs = mx.ones(self.dim) if signs is None else signs

    def forward(self, x: mx.array) -> mx.array:
        for part in self._parts:
            x = part.forward(x) * self.dim**-0.5
        return self._signs * x * self.dim**0.5

    def inverse(self, y: mx.array) -> mx.array:
        y = self._signs * y
        for part in reversed(self._parts):
            y = part.inverse(y)
        return y

    @property
    def matrix(self) -> mx.array:
        return (self.forward(mx.eye(self.dim)) * self.dim**-0.5).T


def wht(dim: int, seed: int) -> Rotation:
    return get_rotation("wht", dim, seed)


def two_signs(dim: int, seed: int) -> Rotation:
    return Composed([wht(dim, seed)], WalshHadamard(dim, seed + 500).signs)


def three_rounds(dim: int, seed: int) -> Rotation:
    return Composed([wht(dim, seed + 500 * i) for i in range(3)])


def haar(dim: int, seed: int) -> Rotation:
    return get_rotation("haar", dim, seed)


class VariantCodec(Codec):
    """TurboQuant of blocks of a vector; a shift and a scale of each dim may be learned from the first tokens."""

    def __init__(self, head_dim: int, inner: TurboCodec, shifts: bool, scales: bool, about: mx.array | None) -> None:
        super().__init__(head_dim, head_dim // inner.head_dim * (inner.words + 1))
        self.shifts, self.scales = shifts, scales
        self.learned = about  # fp32 [B, H, 2, D]: the shift and the scale
        self._inner = inner

    def fit(self, x: mx.array) -> "VariantCodec":
        if not (self.shifts or self.scales):
            return self
        x = x.astype(mx.float32)
        shift = x.mean(axis=2) if self.shifts else mx.zeros(x[:, :, 0].shape)
        scale = mx.sqrt(mx.square(x - shift[:, :, None]).mean(axis=2)) if self.scales else mx.ones(shift.shape)
        about = mx.stack([shift, mx.maximum(scale, 1e-6)], axis=2)
        return VariantCodec(self.head_dim, self._inner, self.shifts, self.scales, about)

    def encode(self, x: mx.array) -> Encoded:
        x = x.astype(mx.float32)
        if self.learned is not None:
            x = (x - self.learned[:, :, :1]) / self.learned[:, :, 1:]
        codes, scale = self._inner.encode(x.reshape(*x.shape[:-1], -1, self._inner.head_dim))
        return Encoded(mx.concatenate([codes, scale[..., None].view(mx.uint16)], axis=-1).flatten(-2), None)

    def decode_planes(self, codes: mx.array) -> list[mx.array]:
        words = codes.reshape(*codes.shape[:-1], -1, self._inner.words + 1)
        scale = mx.contiguous(words[..., -1]).view(mx.float16)
        x = self._inner.decode(Encoded(mx.contiguous(words[..., :-1]), scale)).flatten(-2)
        return [x if self.learned is None else x * self.learned[:, :, 1:] + self.learned[:, :, :1]]


def variant(
    name: str,
    bits: int,
    *,
    rule: str = "unbiased",
    rotation: Maker = wht,
    block: int = 0,
    shifts: bool = False,
    scales: bool = False,
) -> Format:
    def make_codec(head_dim: int, options: CodecOptions, dtype: mx.Dtype) -> Codec:
        size = block or head_dim
        inner = TurboCodec(size, bits, replace(options, scale=rule))
        inner.rotation = rotation(size, options.seed)
        return VariantCodec(head_dim, inner, shifts, scales, None)

    return Format(name, bits, 0.0, make_codec)


BITS = (4, 3)
CHANGES: dict[str, dict[str, Any]] = {
    "base": {},
    "raw": {"rule": "raw"},
    "matched": {"rule": "matched"},
    "ls": {"rule": "ls"},
    "two signs": {"rotation": two_signs},
    "three rounds": {"rotation": three_rounds},
    "Haar": {"rotation": haar},
    "block 32": {"block": 32},
    "mean removed": {"shifts": True},
    "dims scaled": {"scales": True},
}
FORMATS = tuple(variant(f"{name}.{bits}", bits, **changes) for bits in BITS for name, changes in CHANGES.items())
