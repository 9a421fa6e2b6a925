"""tq35 and tq25: layout, distortion, unbiased inner products, and dims in the order of their energy."""

import math

import mlx.core as mx
import numpy as np
import pytest
from codec_reference import gaussian, pack, quantize, rotation_matrix

from mlx_tq.codec import CodecOptions, get_format
from mlx_tq.codec.codebook import levels, theoretical_mse
from mlx_tq.codec.rotation import get_rotation

GROUPS = {"tq35": ((64, 3), (64, 2)), "tq25": ((32, 2), (96, 1))}
SEED = 1042
NAMES = [*GROUPS]


def codec_of(name: str, dim: int = 128, **options):
    return get_format(name).codec(dim, CodecOptions(seed=SEED, **options))


def spread(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Vectors [B, H, n, D] whose dims have energies of their own in each head."""
    scale = np.exp(0.8 * gaussian((*shape[:2], 1, shape[3]), seed + 1))
    return gaussian(shape, seed) * scale


def half(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float16).astype(np.float64)


def sketch(dim: int) -> np.ndarray:
    return np.array(get_rotation("haar", dim, SEED + 500).matrix, np.float64) * math.sqrt(dim)


def expected(name: str, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Words [n, W] without the norms, and what they decode to, in float64 but for the codes."""
    words, decoded, start = [], [], 0
    for dim, bits in GROUPS[name]:
        part = x[:, start : start + dim]
        start += dim
        codes, norm = quantize(part.T.copy(), bits, SEED)
        level = levels(bits)[codes].T.astype(np.float64) / math.sqrt(dim)
        stored = half(norm)
        residual = part.astype(np.float64) @ rotation_matrix(dim, SEED).T - level * stored[:, None]
        projected = residual @ sketch(dim).T
        signs = np.where(projected >= 0, 1, -1)
        norm = (residual**2).sum(axis=1) * dim / (math.sqrt(math.pi / 2) * np.abs(projected).sum(axis=1))
        estimate = math.sqrt(math.pi / 2) / dim * half(norm)[:, None] * (signs @ sketch(dim))
        bits_of = ((signs + 1) // 2).tolist()
        words.append([pack(c, bits) + pack(s, 1) for c, s in zip(codes.T.tolist(), bits_of, strict=True)])
        decoded.append((level * stored[:, None] + estimate) @ rotation_matrix(dim, SEED))
    return np.concatenate(words, axis=1), np.concatenate(decoded, axis=1)


@pytest.mark.parametrize("name", NAMES)
def test_words_and_values_are_those_of_another_implementation(name):
    x = gaussian((32, 128), seed=3) * np.float32(2.5)
    codec = codec_of(name)
    encoded = codec.encode(mx.array(x))
    words, decoded = expected(name, x)
    assert np.array_equal(np.array(encoded.codes)[:, :-4], words)
    np.testing.assert_allclose(np.array(codec.decode(encoded)), decoded, atol=2e-3 * np.abs(x).max())


def residual_share(dim: int) -> float:
    """What a bit a coordinate leaves of a residual: 1 / cos^2 - 1 between a Gaussian vector and its signs."""
    z = np.random.default_rng(1).standard_normal((100_000, dim))
    return float((dim * (z * z).sum(axis=1) / np.abs(z).sum(axis=1) ** 2 - 1).mean())


@pytest.mark.parametrize("name", NAMES)
def test_distortion_is_within_2_percent_of_theory(name):
    theory = sum(dim / 128 * theoretical_mse(bits, dim) * residual_share(dim) for dim, bits in GROUPS[name])
    assert get_format(name).error == pytest.approx(theory, rel=0.02)


@pytest.mark.parametrize("name", NAMES)
def test_inner_products_are_unbiased(name):
    """|bias| < 0.01 standard deviations over 65,536 pairs whose inner product is not 0; without QJL it is above 1."""
    x = gaussian((2**16, 128), seed=9)
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    queries = x + 0.5 / math.sqrt(128) * gaussian(x.shape, seed=10)
    codec = codec_of(name)
    decoded = np.array(codec.decode(codec.encode(mx.array(x))), np.float64)
    error = ((decoded - x) * queries).sum(axis=1)
    assert abs(error.mean()) < 0.01 * error.std()
    plain = get_format("tq2").codec(128, CodecOptions(scale="raw"))
    biased = ((np.array(plain.decode(plain.encode(mx.array(x)))) - x) * queries).sum(axis=1)
    assert abs(biased.mean()) > biased.std()


@pytest.mark.parametrize("name", NAMES)
def test_dims_of_high_energy_come_first(name):
    x = spread((2, 3, 160, 128))
    x[:, :, 0] *= 1000  # a sink does not decide alone
    codec = codec_of(name)
    fitted = codec.fit(mx.array(x))
    unit = x / np.linalg.norm(x, axis=-1, keepdims=True)
    energy = np.take_along_axis((unit**2).sum(axis=2), np.array(fitted.order).astype(int), axis=-1)
    assert (np.diff(energy, axis=-1) <= 1e-6 * energy[..., :1]).all()
    later = mx.array(spread((2, 3, 400, 128))[:, :, 160:])

    def error(codec) -> float:
        return float(mx.square(codec.decode(codec.encode(later)) - later).sum())

    assert error(fitted) < 0.8 * error(codec)
    assert error(codec.restore(fitted.learned)) == error(fitted)


@pytest.mark.parametrize("name", NAMES)
def test_rotation_of_each_head(name):
    """<R k, R q> = <k, q> for the query heads of each KV head, by the transform and by the matrix."""
    x = mx.array(spread((2, 3, 40, 128)))
    rotation = codec_of(name).fit(x).rotation
    queries = mx.array(gaussian((2, 12, 5, 128)))
    rotated = rotation.forward(x) / math.sqrt(128)
    np.testing.assert_allclose(np.array(rotation.inverse(rotated)), np.array(x), atol=1e-4)
    turned = (rotation.forward(queries) / math.sqrt(128)).reshape(2, 3, 20, 128)
    by_matrix = queries.reshape(2, 3, 20, 128) @ rotation.matrix.swapaxes(-1, -2)
    np.testing.assert_allclose(np.array(turned), np.array(by_matrix), atol=1e-5)
    exact = queries.reshape(2, 3, 20, 128) @ x.swapaxes(-1, -2)
    np.testing.assert_allclose(np.array(turned @ rotated.swapaxes(-1, -2)), np.array(exact), atol=1e-3)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dim", [64, 256, 512])
def test_other_sizes(name, dim):
    codec = codec_of(name, dim)
    x = mx.array(gaussian((64, dim)))
    encoded = codec.encode(x)
    assert encoded.codes.nbytes == 64 * get_format(name).bytes_per_vector(dim)
    error = mx.square(codec.decode(encoded) - x).sum() / mx.square(x).sum()
    assert float(error) == pytest.approx(get_format(name).error, rel=0.1)
