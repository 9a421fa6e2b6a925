"""Define what all storage formats share: `Format`, which is found by name, and the `Codec` that it makes."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import NamedTuple

import mlx.core as mx

from mlx_tq.codec.rotation import Rotation, get_rotation
from mlx_tq.errors import ConfigError

SCALE_RULES = ("raw", "matched", "ls", "unbiased")

# The largest finite fp16: larger components and scales are clamped to it, and counted.
FP16_MAX = 65504.0
# Below this the inverse of a scale would overflow; what has such a scale is stored as zero.
TINY = 2.0**-110


def dtype_name(dtype: mx.Dtype) -> str:
    """Return the name of a type, such as "bfloat16": a mx.Dtype can neither be copied nor written to a file."""
    return str(dtype).removeprefix("mlx.core.")


def dtype_of(name: str) -> mx.Dtype:
    """Invert `dtype_name`."""
    return getattr(mx, name)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class CodecOptions:
    """Choose how a codec rotates and scales.

    Attributes:
        seed: seed of the rotation.
        rotation: "wht" (Walsh-Hadamard) or "haar" (dense).
        scale: rule for the scale of tq and tcq formats, of a rotated vector y with codeword c: "raw" is ||y||,
            "matched" makes the decoded norm ||y||, "ls" is the least-squares factor <y, c> / <c, c>, and "unbiased" is
            <y, y> / <y, c>, with which <decoded, original> is ||y||^2.
        fp32_scales: store scales as fp32 instead of fp16.
        pairs: the two dims of each pair that RoPE rotates; None is (f, f + D / 2).
    """

    seed: int = 42
    rotation: str = "wht"
    scale: str = "raw"
    fp32_scales: bool = False
    pairs: tuple[tuple[int, int], ...] | None = None

    def __post_init__(self) -> None:
        if self.pairs is not None:  # a file has lists
            object.__setattr__(self, "pairs", tuple((first, second) for first, second in self.pairs))
        if self.scale not in SCALE_RULES:
            raise ConfigError(f"scale rule {self.scale!r} is unknown; valid are {', '.join(SCALE_RULES)}.")


class Encoded(NamedTuple):
    """Vectors as a codec stores them."""

    codes: mx.array  # uint16 [..., words]
    scale: mx.array | None  # fp16 or fp32 [...]; None if the format stores no scale next to the codes


class Codec(ABC):
    """Encode and decode vectors of one size.

    Subclasses implement `encode` and `decode_planes`. Codecs are immutable, so caches share them, even copied ones. If
    a codec depends on the data, it overrides `fit`, `restore`, `learned` and `learned_bytes`: a cache fits it to its
    first keys or values once and saves `learned`.
    """

    has_kernels: bool = False  # True if the kernels in metal/ support the format; else mlx operations decode it
    learned: mx.array | None = None  # what `fit` derived from the data
    learned_bytes: int = 0  # of `learned` per head

    def __init__(
        self, head_dim: int, words: int, rotation: Rotation | None = None, scale_dtype: mx.Dtype | None = None
    ) -> None:
        self.head_dim = head_dim  # D, the size of a vector
        self.words = words  # 16-bit words of codes per vector
        self.rotation = rotation  # before encoding
        self.scale_dtype = scale_dtype  # of the scale next to the codes; None if the format stores none

    def __deepcopy__(self, memo: object) -> "Codec":
        return self

    @abstractmethod
    def encode(self, x: mx.array) -> Encoded:
        """Encode vectors of any float type and leading dims: [..., D]. A zero vector must decode to zero."""

    @abstractmethod
    def decode_planes(self, codes: mx.array) -> list[mx.array]:
        """Decode to rotated space, before `gain`, in parts: uint16 [..., words] -> list of fp32 [..., D / planes]."""

    def decode_columns(self, codes: mx.array) -> list[tuple[slice, mx.array]]:
        """Return the values of `decode_planes`, transposed: uint16 [..., S, words] -> (dims, fp32 [..., n, S]).

        BLAS multiplies queries with these in less than half the time that it takes with transposed planes.
        """
        vectors = mx.concatenate(self.decode_planes(codes), axis=-1)
        return [(slice(None), mx.contiguous(vectors.swapaxes(-1, -2)))]

    def gain(self, scale: mx.array) -> mx.array:
        """Return the factor of a vector's planes: stored scale [...] -> fp32 [...]."""
        return scale.astype(mx.float32)

    def decode_rotated(self, encoded: Encoded) -> mx.array:
        """Decode without the inverse rotation: fp32 [..., D]."""
        y = mx.concatenate(self.decode_planes(encoded.codes), axis=-1)
        return y if encoded.scale is None else y * self.gain(encoded.scale)[..., None]

    def decode(self, encoded: Encoded) -> mx.array:
        """Decode to the original space: fp32 [..., D]."""
        y = self.decode_rotated(encoded)
        return y if self.rotation is None else self.rotation.inverse(y)

    def scores(self, queries: mx.array, encoded: Encoded) -> mx.array:
        """Multiply rotated queries fp32 [B, H, N, D] with encoded vectors [B, H, S]: fp32 [B, H, N, S]."""
        products = (queries[..., dims] @ column for dims, column in self.decode_columns(encoded.codes))
        scores = reduce(mx.add, products)
        return scores if encoded.scale is None else scores * self.gain(encoded.scale)[..., None, :]

    def estimate_norms(self, encoded: Encoded) -> mx.array:
        """Return norms of encoded vectors, fp32 [...], up to a constant factor and the format's error."""
        return mx.linalg.norm(self.decode_rotated(encoded), axis=-1)

    def find_clamped(self, peak: mx.array, encoded: Encoded) -> mx.array:
        """Return which vectors exceed the format's range, from their largest absolute components [...]: bool [...]."""
        if encoded.scale is None:
            return mx.zeros(peak.shape, mx.bool_)
        return mx.logical_or(peak > FP16_MAX, encoded.scale >= FP16_MAX)

    def fit(self, x: mx.array) -> "Codec":
        """Return the codec fitted to the first vectors of a cache [B, H, n, D]; itself if there is nothing to fit."""
        return self

    def restore(self, learned: mx.array) -> "Codec":
        """Return the codec with what another one has `learned`."""
        raise ConfigError(f"{type(self).__name__} learns nothing; a cache of this format has no such data.")

    def select_heads(self, select: Callable[[mx.array], mx.array]) -> "Codec":
        """Return the codec of some heads, which `select` takes from arrays [B, H, ...]."""
        return self if self.learned is None else self.restore(select(self.learned))


class RotatedCodec(Codec):
    """A codec that rotates by `CodecOptions.rotation` and stores one scale per vector."""

    rotation: Rotation
    scale_dtype: mx.Dtype

    def __init__(self, head_dim: int, words: int, options: CodecOptions) -> None:
        rotation = get_rotation(options.rotation, head_dim, options.seed)
        super().__init__(head_dim, words, rotation, mx.float32 if options.fp32_scales else mx.float16)

    def clamp_scale(self, scale: mx.array) -> mx.array:
        return mx.minimum(scale, FP16_MAX).astype(self.scale_dtype)


@dataclass(frozen=True)
class Format:
    """Describe a storage format, by which users choose it.

    A package adds formats by an entry point of the group `mlx_tq.formats` that refers to a `Format`; a program adds
    them by `register_format`.
    """

    name: str  # in flags and configurations
    bits: float  # of one code, without the scale
    # Expected squared error of a Gaussian vector over its squared norm, at head_dim 128, with the scale rule "raw" if
    # the format has a choice.
    error: float
    make_codec: Callable[[int, CodecOptions, mx.Dtype], Codec]  # of head_dim and model type, or raises ConfigError
    multiple: int = 16  # head_dim must be a multiple of this
    keys_only: str = ""  # why values cannot be stored in this format
    needs_pairs: bool = False  # whether vectors are stored by the pairs of dims that RoPE rotates
    unsorted: str = ""  # for a format that sorts the dims of keys: the one of as many bits for keys that it cannot sort

    def codec(self, head_dim: int, options: CodecOptions, dtype: mx.Dtype = mx.float16) -> Codec:
        """Make the codec for vectors of `head_dim` values of a model of type `dtype`, or raise ConfigError."""
        if head_dim <= 0 or head_dim % self.multiple:
            valid = f"multiples of {self.multiple} such as 64, 80, 96, 112, 128, 192 or 256. Use fp16"
            if self.multiple > 16:
                valid = f"multiples of {self.multiple}. Use q8 or tq4"
            raise ConfigError(f"head_dim {head_dim} cannot be stored as {self.name}; valid are {valid} for this model.")
        return self.make_codec(head_dim, options, dtype)

    def error_with(self, rule: str) -> float:
        """Return `error` for another scale rule, of formats whose levels are centroids."""
        if rule == "matched":  # restores the norm
            return 2 - 2 * math.sqrt(1 - self.error)
        return self.error / (1 - self.error) if rule == "unbiased" else self.error

    def bytes_per_vector(self, head_dim: int) -> int:
        """Return the bytes of an encoded vector: codes and fp16 scale without padding, for a 16-bit model."""
        codec = self.codec(head_dim, CodecOptions(rotation="haar"))  # which exists for every size
        return 2 * codec.words + (0 if codec.scale_dtype is None else codec.scale_dtype.size)
