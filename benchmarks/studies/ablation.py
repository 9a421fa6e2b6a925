"""Study what each part of TurboQuant contributes: one change at a time, for keys with fp16 values, then for values.

    python -m benchmarks.studies.ablation

It measures the embedded model and resumes benchmarks/results/quality_ablation.json.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx

from benchmarks.reports import RESULTS
from mlx_tq.cli.inputs import load_text
from mlx_tq.codec import Codec, CodecOptions, Encoded, Format, register_format
from mlx_tq.codec.formats.turbo import TurboCodec
from mlx_tq.codec.rotation import Rotation, WalshHadamard, get_rotation
from mlx_tq.evaluate.arms import parse_arm
from mlx_tq.evaluate.formats import measure_formats
from mlx_tq.evaluate.results import Results
from mlx_tq.evaluate.teacher_forced import cut_chunks
from mlx_tq.models import load

SETTINGS = {"model": "needle", "text": "embedded"}
SIZES = {"chunks": 2, "length": 512, "step": 256, "sinks": 32, "window": 64}


class Composed:
    """Rotations one after the other, and a last vector of signs."""

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


def _two_signs(dim: int, seed: int) -> Rotation:
    return Composed([get_rotation("wht", dim, seed)], WalshHadamard(dim, seed + 500).signs)


def _three_rounds(dim: int, seed: int) -> Rotation:
    return Composed([get_rotation("wht", dim, seed + 500 * i) for i in range(3)])


class VariantCodec(Codec):
    """TurboQuant of blocks of a vector; a shift and a scale of each dim may be learned from the first tokens."""

    def __init__(self, head_dim: int, inner: TurboCodec, shifts: bool, scales: bool, learned: mx.array | None) -> None:
        super().__init__(head_dim, head_dim // inner.head_dim * (inner.words + 1))
        self.shifts, self.scales = shifts, scales
        self.learned = learned  # fp32 [B, H, 2, D]: the shift and the scale
        self._inner = inner

    def fit(self, x: mx.array) -> "VariantCodec":
        if not (self.shifts or self.scales):
            return self
        x = x.astype(mx.float32)
        shift = x.mean(axis=2) if self.shifts else mx.zeros(x[:, :, 0].shape)
        scale = mx.sqrt(mx.square(x - shift[:, :, None]).mean(axis=2)) if self.scales else mx.ones(shift.shape)
        learned = mx.stack([shift, mx.maximum(scale, 1e-6)], axis=2)
        return VariantCodec(self.head_dim, self._inner, self.shifts, self.scales, learned)

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
    rotation: Callable[[int, int], Rotation] | None = None,
    block: int = 0,
    shifts: bool = False,
    scales: bool = False,
) -> Format:
    def make_codec(head_dim: int, options: CodecOptions, dtype: mx.Dtype) -> Codec:
        size = block or head_dim
        inner = TurboCodec(size, bits, replace(options, scale=rule))
        inner.rotation = rotation(size, options.seed) if rotation else get_rotation("wht", size, options.seed)
        return VariantCodec(head_dim, inner, shifts, scales, None)

    return Format(name, bits, 0.0, make_codec)


CHANGES: dict[str, dict[str, Any]] = {
    "base": {},
    "raw": {"rule": "raw"},
    "matched": {"rule": "matched"},
    "ls": {"rule": "ls"},
    "two signs": {"rotation": _two_signs},
    "three rounds": {"rotation": _three_rounds},
    "Haar": {"rotation": lambda dim, seed: get_rotation("haar", dim, seed)},
    "block 32": {"block": 32},
    "mean removed": {"shifts": True},
    "dims scaled": {"scales": True},
}
KEYS_ONLY = ("mean removed", "dims scaled")  # for keys, whose dims differ


def main() -> None:
    pairs: dict[str, list[str]] = {"{}/fp16": [], "fp16/{}": []}
    for bits in (4, 3):
        for name, changes in CHANGES.items():
            register_format(variant(f"{name}.{bits}", bits, **changes))
            for side in pairs:
                pairs[side] += [side.format(f"{name}.{bits}")] if side[0] == "{" or name not in KEYS_ONLY else []
    results = Results(str(RESULTS / "quality_ablation.json"), "ablation", SETTINGS | SIZES, resume=True)
    model, tokenizer = load()
    chunks = cut_chunks(tokenizer, load_text(), SIZES["chunks"], SIZES["length"])
    regions = {"sinks": SIZES["sinks"], "window": SIZES["window"]}
    missing = [parse_arm(name, **regions) for names in pairs.values() for name in names if name not in results.rows]
    for row in measure_formats(model, chunks, missing, SIZES["step"]):
        results.add(row["name"], row)
    columns = {
        "K/V": lambda row: row["name"],
        "error": lambda row: f"{row['key_error'] + row['value_error']:.5f}",
        "cosine": lambda row: f"{row['cosine']:.5f}",
        "KLD": lambda row: f"{row['kld']:.6f}",
        "± KLD": lambda row: f"{row['kld_error']:.6f}",
        "top-1 %": lambda row: f"{row['top1']:.2f}",
    }
    results.show("One change at a time", columns, list(results.rows.values()))


if __name__ == "__main__":
    main()
