"""What a storage format is: a `Format` found by name, and the `Codec` it makes for one head size and seed."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import reduce
from typing import ClassVar, NamedTuple

import mlx.core as mx

from mlx_tq.codec.rotation import Rotation, get_rotation
from mlx_tq.errors import ConfigError

SCALE_RULES = ("raw", "matched", "ls", "unbiased")

# The largest finite fp16: larger components and scales are clamped to it, and counted.
FP16_MAX = 65504.0


@dataclass(frozen=True)
class CodecOptions:
    """How a codec rotates and scales.

    Attributes:
        seed: of the rotation.
        rotation: "wht" or "haar".
        scale: the write-time scale of the tq formats. "raw" keeps ||x||, "matched" makes the decoded norm ||x||, "ls"
            is the least-squares factor <y, c> / <c, c> between the rotated vector y and its codeword c, "unbiased" is
            <y, y> / <y, c>, with which the inner product of the decoded vector and the original is ||x||^2; at most 1.3
            times "ls", which only vectors need that are much unlike Gaussian ones once they are rotated.
        fp32_scales: store scales as fp32 instead of fp16.
        pairs: the two dims of each pair that RoPE turns, for spectral keys; None is (f, f + D / 2).
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
    """Vectors as a codec stores them.

    codes: uint16 [..., words]. scale: fp16 or fp32 [...], or None where the format has none.
    """

    codes: mx.array
    scale: mx.array | None


class Codec(ABC):
    """Encodes and decodes vectors of one size. Immutable, so caches share it also when they are copied.

    Attributes:
        has_kernels: the kernels in metal/ read and write this format; else mlx's own operations do.
    """

    has_kernels: bool = False

    def __init__(self, head_dim: int, rotation: Rotation | None) -> None:
        self.head_dim = head_dim
        self.rotation = rotation

    def __deepcopy__(self, memo: object) -> "Codec":
        return self

    @property
    @abstractmethod
    def words(self) -> int:
        """16-bit words of codes per vector."""

    @property
    def scale_dtype(self) -> mx.Dtype | None:
        """Type of the stored scale, or None where the format has none."""
        return None

    @abstractmethod
    def encode(self, x: mx.array) -> Encoded:
        """Encode vectors of any float type and leading dims: [..., D]."""

    @abstractmethod
    def planes(self, codes: mx.array) -> list[mx.array]:
        """Decoded coordinates in rotated space, before `gain`: uint16 [..., words] -> list of fp32 [..., D / planes].

        Concatenated along the last axis they are the vector; attention uses them one by one.
        """

    def columns(self, codes: mx.array) -> list[tuple[slice, mx.array]]:
        """What `planes` gives, token by token along the last axis: uint16 [..., S, words] -> (dims, fp32 [..., n, S]).

        A row of queries times such an array is a sum of long rows, which BLAS vectorises; times the transpose of a
        plane it is S short dot products, which take more than twice as long.
        """
        whole = mx.concatenate(self.planes(codes), axis=-1)
        return [(slice(None), mx.contiguous(whole.swapaxes(-1, -2)))]

    def gain(self, scale: mx.array) -> mx.array:
        """What multiplies a vector's planes: stored scale [...] -> fp32 [...]."""
        return scale.astype(mx.float32)

    def scores(self, queries: mx.array, encoded: Encoded) -> mx.array:
        """Inner products of rotated queries fp32 [B, H, N, D] with vectors [B, H, S]: fp32 [B, H, N, S]."""
        found = reduce(mx.add, (queries[..., dims] @ column for dims, column in self.columns(encoded.codes)))
        return found if encoded.scale is None else found * self.gain(encoded.scale)[..., None, :]

    def norms(self, encoded: Encoded) -> mx.array:
        """The norms of vectors, fp32 [...], or what is proportional to them but for the format's error."""
        return mx.linalg.norm(self.decode_rotated(encoded), axis=-1)

    @property
    def learned(self) -> mx.array | None:
        """What `fit` found, for a cache to keep; None where there is nothing to find."""
        return None

    @property
    def learned_bytes(self) -> int:
        """Bytes of `learned` for each head."""
        return 0

    def fit(self, x: mx.array) -> "Codec":
        """The codec fitted to the first vectors of a cache, [B, H, n, D]; itself where there is nothing to fit."""
        return self

    def restore(self, learned: mx.array) -> "Codec":
        """The codec with what another one has `learned`.

        Raises:
            ConfigError: this format learns nothing.
        """
        raise ConfigError(f"{type(self).__name__} learns nothing; a cache of this format has no such data.")

    def clamped(self, peak: mx.array, encoded: Encoded) -> mx.array:
        """Which vectors exceeded what the format can hold: bool [...].

        Args:
            peak: their largest components by size, [...].
            encoded: what they became.
        """
        if encoded.scale is None:
            return mx.zeros(peak.shape, mx.bool_)
        return mx.logical_or(peak > FP16_MAX, encoded.scale >= FP16_MAX)

    def decode_rotated(self, encoded: Encoded) -> mx.array:
        """Decode without the inverse rotation: fp32 [..., D]."""
        y = mx.concatenate(self.planes(encoded.codes), axis=-1)
        return y if encoded.scale is None else y * self.gain(encoded.scale)[..., None]

    def decode(self, encoded: Encoded) -> mx.array:
        """Decode to the original space: fp32 [..., D]."""
        y = self.decode_rotated(encoded)
        return y if self.rotation is None else self.rotation.inverse(y)


class Format(ABC):
    """A storage format. Subclasses live one per file in this folder and are found by `name`."""

    name: ClassVar[str]
    bits: ClassVar[float]  # of one code, without the scale
    keys_only: ClassVar[str] = ""  # why values cannot be stored so
    error: ClassVar[float]  # expected squared error of a Gaussian vector over its squared norm, at head_dim 128

    @abstractmethod
    def bytes_per_vector(self, head_dim: int) -> int:
        """Payload of one vector in bytes, scale included, padding not; fp16 counts 16-bit models."""

    @classmethod
    def variants(cls) -> "list[Format]":
        """The formats that this class makes: one, unless it has parameters."""
        return [cls()]

    def check(self, head_dim: int) -> None:
        """Raise ConfigError where vectors of `head_dim` cannot be stored."""
        if head_dim % 16 or head_dim <= 0:
            raise ConfigError(
                f"head_dim {head_dim} cannot be stored as {self.name}; valid are multiples of 16 such as 64, 80, 96, "
                "112, 128, 192 or 256. Use fp16 for this model."
            )

    @abstractmethod
    def codec(self, head_dim: int, options: CodecOptions, dtype: mx.Dtype = mx.float16) -> Codec:
        """The codec for vectors of `head_dim` values of a model of type `dtype`.

        Raises:
            ConfigError: a size that the format or its rotation cannot take.
        """


def rotation_for(head_dim: int, options: CodecOptions) -> Rotation:
    """The rotation that `options` name, for vectors of `head_dim`."""
    return get_rotation(options.rotation, head_dim, options.seed)
