"""An independent codec in NumPy: slow, scalar in the dims, and written from the design's text alone.

Vectors are columns, so `x[i]` is coordinate i of all of them and each arithmetic step stands by itself. fp32 sums run
in the order that `codec.rotation` documents.
"""

import math
from itertools import pairwise

import mlx.core as mx
import numpy as np

from mlx_tq.codec import Codec, CodecOptions, get_format
from mlx_tq.codec.codebook import POLYNOMIALS
from mlx_tq.codec.formats.turbo import TurboCodec

SEED = 1042
DIMS = (48, 64, 80, 96, 112, 128, 192, 256, 512)
FORMATS = ("fp16", "q8", "tq4", "tq3", "tq2")
RULES = ("raw", "matched", "ls", "unbiased")
ORDERS = {32: 1, 48: 12, 64: 1, 80: 20, 96: 12, 112: 28, 128: 1, 192: 12, 256: 1, 512: 1}
BITS = {"tq1": 1, "tq2": 2, "tq3": 3, "tq4": 4}


def make_codec(name: str, dim: int, dtype: mx.Dtype = mx.float16, **options) -> Codec:
    """Return a format's codec; "tq1" is the codec that only `TurboQuant` offers."""
    if name == "tq1":
        return TurboCodec(dim, 1, CodecOptions(**options))
    return get_format(name).codec(dim, CodecOptions(**options), dtype)


def gaussian(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def roundtrip(codec: Codec, x: np.ndarray) -> np.ndarray:
    return np.array(codec.decode(codec.encode(mx.array(x))), np.float64)


def relative_errors(codec: Codec, x: np.ndarray) -> np.ndarray:
    """Return ||x - x_hat||^2 / ||x||^2 of each vector."""
    return ((roundtrip(codec, x) - x) ** 2).sum(axis=-1) / (x.astype(np.float64) ** 2).sum(axis=-1)


def signs(dim: int, seed: int) -> np.ndarray:
    return 1 - 2 * np.random.Generator(np.random.PCG64(seed)).integers(0, 2, dim)


def small_hadamard(order: int) -> np.ndarray:
    """Return MLX's own matrix of order 1, 12, 20 or 28, float64."""
    return np.rint(np.array(mx.hadamard_transform(mx.eye(order), scale=1.0), np.float64).T)


def hadamard_matrix(dim: int) -> np.ndarray:
    """Return H_m (x) H_2 (x) ... (x) H_2, float64 [D, D]."""
    matrix = small_hadamard(ORDERS[dim])
    while len(matrix) < dim:
        matrix = np.kron(matrix, [[1, 1], [1, -1]])
    return matrix


def rotation_matrix(dim: int, seed: int) -> np.ndarray:
    """Return R = H diag(s) / sqrt(D), float64 [D, D]."""
    return hadamard_matrix(dim) * signs(dim, seed) / math.sqrt(dim)


def rotate(x: np.ndarray, seed: int) -> np.ndarray:
    """Return H diag(s) x in fp32: [D, n]; butterflies of stride 1, 2, 4 ..., then the m rows left to right."""
    dim = len(x)
    order = ORDERS[dim]
    power = dim // order
    x = x * signs(dim, seed).astype(np.float32)[:, None]
    stride = 1
    while stride < power:
        for first in (i for i in range(dim) if i // stride % 2 == 0):
            a, b = x[first].copy(), x[first + stride].copy()
            x[first], x[first + stride] = a + b, a - b
        stride *= 2
    matrix = small_hadamard(order).astype(np.float32)
    out = np.empty_like(x)
    for row in range(order):
        for column in range(power):
            total = x[column] * matrix[row, 0]
            for j in range(1, order):
                total = total + x[j * power + column] * matrix[row, j]
            out[row * power + column] = total
    return out


def fixed_sum(x: np.ndarray) -> np.ndarray:
    """Sum coordinates in fp32: neighbors in pairs within each of m rows, then the rows left to right."""
    order = ORDERS[len(x)]
    rows = x.reshape(order, len(x) // order, -1)
    while rows.shape[1] > 1:
        rows = rows[:, ::2] + rows[:, 1::2]
    total = rows[0, 0]
    for row in rows[1:, 0]:
        total = total + row
    return total


def levels(bits: int) -> np.ndarray:
    """Compute the polynomial levels in float64, rounded to fp32."""
    u = np.arange(2**bits) - (2**bits - 1) / 2
    return sum(c * u ** (2 * i + 1) for i, c in enumerate(POLYNOMIALS[bits])).astype(np.float32)


def quantize(x: np.ndarray, bits: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return codes [D, n] and norms fp32 [n] of fp32 vectors [D, n]."""
    norm = np.sqrt(fixed_sum(x * x))
    y = rotate(x, seed) * (np.float32(1) / norm)
    code = np.zeros(x.shape, int)
    for low, high in pairwise(levels(bits).astype(np.float64)):
        code += y > np.float32((low + high) / 2)
    return code, norm


def pack(codes: list[int], bits: int) -> list[int]:
    """Pack one vector's codes into 16-bit words, a bit at a time, as `codec.packing` describes the layout."""
    count = len(codes) // (16 if bits == 3 else 16 // bits)  # of words that hold a plane each
    words = [0] * (len(codes) * bits // 16)
    for dim, code in enumerate(codes):
        plane, i = divmod(dim, count)
        for bit in range(bits):
            if bits != 3:
                word, position = i, bits * plane + bit
            elif plane < 15:
                word, position = plane // 5 * count + i, 3 * (plane % 5) + bit
            else:
                word, position = bit * count + i, 15
            words[word] |= (code >> bit & 1) << position
    return words
