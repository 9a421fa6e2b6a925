"""What the tests of the kernels share: settings, layouts, inputs, and a measure of error."""

import mlx.core as mx
import numpy as np
from covering import Case

from mlx_tq.codec import Codec, CodecOptions, Encoded, RowLayout, get_format
from mlx_tq.codec.codebook import POLYNOMIALS
from mlx_tq.codec.packing import split_words, unpack

DIMS = (48, 64, 80, 96, 112, 128, 192, 256, 512)
FORMATS = ("fp16", "q8", "tq4", "tq3", "tq2")
DTYPES = ("float16", "bfloat16", "float32")
RULES = ("raw", "matched", "ls", "unbiased")
TOKENS = (1, 31, 32, 33, 97)
ALL_TOKENS = (1, 2, 31, 32, 33, 97, 255, 256, 257, 1025, 4096)


def dtype_of(name: str) -> mx.Dtype:
    return getattr(mx, name)


def make_layout(case: Case) -> RowLayout:
    """The layout of a case with key_dim, value_dim, key, value, dtype, and perhaps rule and wide."""
    codecs = (
        get_format(case[part]).codec(
            case[f"{part}_dim"],
            CodecOptions(seed=seed, scale=case.get("rule", "raw"), wide_scale=case.get("wide", False)),
            dtype_of(case["dtype"]),
        )
        for part, seed in (("key", 1), ("value", 2))
    )
    return RowLayout(*codecs)


def random(shape: tuple[int, ...], dtype: str, seed: int = 0) -> mx.array:
    return mx.array(np.random.default_rng(seed).standard_normal(shape).astype(np.float32)).astype(dtype_of(dtype))


def same_bits(a: mx.array, b: mx.array) -> bool:
    """Equal, NaN to NaN and zero of either sign to its like."""
    kind = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32}[a.dtype.size]
    return a.shape == b.shape and a.dtype == b.dtype and mx.array_equal(a.view(kind), b.view(kind)).item()


def exact(codec: Codec, encoded: Encoded) -> np.ndarray:
    """The decoded vectors in rotated space, in float64."""
    if encoded.scale is None:
        return np.array(codec.decode_rotated(encoded), np.float64)
    scale = np.array(encoded.scale.astype(mx.float32), np.float64)[..., None]
    if not hasattr(codec, "bits"):
        return np.array(encoded.codes.view(mx.int8), np.float64) * scale / 127
    planes = unpack(split_words(encoded.codes, codec.bits), codec.bits)
    u = np.concatenate([np.array(plane) for plane in planes], axis=-1) - (2**codec.bits - 1) / 2
    level = sum(c * u ** (2 * i + 1) for i, c in enumerate(POLYNOMIALS[codec.bits]))
    return level * scale / np.sqrt(codec.head_dim)


def largest_error(found: mx.array, exact: np.ndarray) -> float:
    return float(np.abs(np.array(found.astype(mx.float32), np.float64) - exact).max())
