"""Offer the quantizer on its own, for vectors of any leading dims, with a check against its theory."""

from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlx_tq.codec.codebook import POLYNOMIALS, theoretical_mse
from mlx_tq.codec.formats.base import CodecOptions, Encoded
from mlx_tq.codec.formats.turbo import TurboCodec
from mlx_tq.errors import ConfigError


@dataclass(frozen=True)
class Validation:
    """Compare the measured distortion of unit vectors with theory."""

    mse: float  # measured E ||u - u_hat||^2
    theory: float  # integral over the density of rotated coordinates
    bound: float  # rate-distortion bound 4^-bits (TurboQuant, theorem 3)

    @property
    def deviation(self) -> float:
        return self.mse / self.theory - 1


class TurboQuant:
    """Quantize vectors to 1 to 4 bits per coordinate and one fp16 scale.

    Source: TurboQuant (Zandieh et al., arXiv 2504.19874) section 3.

    Args:
        head_dim: size of the vectors, a multiple of 16 that the rotation supports.
        bits: 1 to 4.
        seed: seed of the rotation.
        scale: scale rule: "raw", "matched", "ls" or "unbiased" (see `CodecOptions`).
        rotation: "wht" or "haar".
        fp32_scales: store fp32 scales instead of fp16.

    Raises:
        ConfigError: head_dim, bits, scale or rotation is not supported.
    """

    def __init__(
        self,
        head_dim: int,
        bits: int,
        *,
        seed: int = 42,
        scale: str = "raw",
        rotation: str = "wht",
        fp32_scales: bool = False,
    ) -> None:
        if bits not in POLYNOMIALS:
            raise ConfigError(f"bits {bits!r} is not available; valid are {', '.join(map(str, POLYNOMIALS))}.")
        if head_dim <= 0 or head_dim % 16:
            raise ConfigError(f"head_dim {head_dim} cannot be packed; valid are multiples of 16, such as 64 or 128.")
        self.head_dim = head_dim
        self.bits = bits
        self.codec = TurboCodec(head_dim, bits, CodecOptions(seed, rotation, scale, fp32_scales))

    def encode(self, x: mx.array) -> Encoded:
        """Encode vectors [..., D] into packed codes uint16 [..., D bits / 16] and scales fp16 [...]."""
        if x.ndim == 0 or x.shape[-1] != self.head_dim:
            raise ConfigError(f"vectors have shape {x.shape}; the last axis must be head_dim {self.head_dim}.")
        return self.codec.encode(x)

    def decode(self, encoded: Encoded) -> mx.array:
        """Decode to fp32 [..., D]."""
        return self.codec.decode(encoded)

    def validate(self, samples: int = 4096, seed: int = 0) -> Validation:
        """Measure the distortion of `samples` random unit vectors."""
        gaussian = np.random.default_rng(seed).standard_normal((samples, self.head_dim)).astype(np.float32)
        unit = mx.array(gaussian / np.linalg.norm(gaussian, axis=-1, keepdims=True))
        error = unit - self.decode(self.encode(unit))
        return Validation(
            mse=float(np.array((error * error).sum(axis=-1).mean())),
            theory=theoretical_mse(self.bits, self.head_dim),
            bound=4.0**-self.bits,
        )
