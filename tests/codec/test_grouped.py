"""tq35 and tq25: layout, distortion, unbiased inner products, and dims in the order of their energy."""

import math

import mlx.core as mx
import numpy as np
import pytest
from codec_reference import gaussian, make_codec, pack, quantize, relative_errors, rotation_matrix

from mlx_tq.codec import get_format
from mlx_tq.codec.codebook import levels
from mlx_tq.codec.rotation import get_rotation

GROUPS = {"tq35": ((64, 3), (64, 2)), "tq25": ((32, 2), (96, 1))}
SEED = 1042
NAMES = [*GROUPS]


def uneven(shape: tuple[int, ...]) -> np.ndarray:
    """Return vectors [B, H, n, D] whose dims have different energies in each head."""
    return gaussian(shape) * np.exp(0.8 * gaussian((*shape[:2], 1, shape[3]), 1))


def half(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float16).astype(np.float64)


def sketch(dim: int) -> np.ndarray:
    return np.array(get_rotation("haar", dim, SEED + 500).matrix, np.float64) * math.sqrt(dim)


def expected(name: str, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return words [n, W] without the norms, and the decoded vectors, in float64 except for the codes."""
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
def test_equals_another_implementation(name):
    x = gaussian((32, 128), seed=3) * np.float32(2.5)
    codec = make_codec(name, 128, seed=SEED)
    encoded = codec.encode(mx.array(x))
    words, decoded = expected(name, x)
    assert np.array_equal(np.array(encoded.codes)[:, :-4], words)
    np.testing.assert_allclose(np.array(codec.decode(encoded)), decoded, atol=2e-3 * np.abs(x).max())


@pytest.mark.parametrize("name", NAMES)
def test_inner_products_are_unbiased(name):
    """|bias| < 0.01 standard deviations over 65,536 pairs whose inner product is not 0; without QJL it is above 1."""
    x = gaussian((2**16, 128), seed=9)
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    queries = x + 0.5 / math.sqrt(128) * gaussian(x.shape, seed=10)
    codec = make_codec(name, 128, seed=SEED)
    decoded = np.array(codec.decode(codec.encode(mx.array(x))), np.float64)
    error = ((decoded - x) * queries).sum(axis=1)
    assert abs(error.mean()) < 0.01 * error.std()
    plain = make_codec("tq2", 128)
    biased = ((np.array(plain.decode(plain.encode(mx.array(x)))) - x) * queries).sum(axis=1)
    assert abs(biased.mean()) > biased.std()


@pytest.mark.parametrize("name", NAMES)
def test_dims_of_high_energy_come_first(name):
    x = uneven((2, 3, 160, 128))
    x[:, :, 0] *= 1000  # a sink token does not decide alone
    codec = make_codec(name, 128, seed=SEED)
    fitted = codec.fit(mx.array(x))
    unit = x / np.linalg.norm(x, axis=-1, keepdims=True)
    energy = np.take_along_axis((unit**2).sum(axis=2), np.array(fitted.learned).astype(int), axis=-1)
    assert (np.diff(energy, axis=-1) <= 1e-6 * energy[..., :1]).all()
    later = mx.array(uneven((2, 3, 400, 128))[:, :, 160:])
    error, fitted_error, restored_error = (
        float(mx.square(each.decode(each.encode(later)) - later).sum())
        for each in (codec, fitted, codec.restore(fitted.learned))
    )
    assert fitted_error < 0.8 * error
    assert restored_error == fitted_error
    assert fitted.learned[0, 0].nbytes == codec.learned_bytes


@pytest.mark.parametrize("name", NAMES)
def test_rotation_of_each_head(name):
    """<R k, R q> = <k, q> for the query heads of each KV head, by the transform and by the matrix."""
    x = mx.array(uneven((2, 3, 40, 128)))
    rotation = make_codec(name, 128, seed=SEED).fit(x).rotation
    queries = mx.array(gaussian((2, 12, 5, 128)))
    keys = rotation.forward(x) / math.sqrt(128)
    np.testing.assert_allclose(np.array(rotation.inverse(keys)), np.array(x), atol=1e-4)
    rotated = (rotation.forward(queries) / math.sqrt(128)).reshape(2, 3, 20, 128)
    queries = queries.reshape(2, 3, 20, 128)
    by_matrix = queries @ rotation.matrix.swapaxes(-1, -2)
    np.testing.assert_allclose(np.array(rotated), np.array(by_matrix), atol=1e-5)
    exact = queries @ x.swapaxes(-1, -2)
    np.testing.assert_allclose(np.array(rotated @ keys.swapaxes(-1, -2)), np.array(exact), atol=1e-3)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dim", [64, 256, 512])
def test_other_sizes(name, dim):
    codec = make_codec(name, dim, seed=SEED)
    x = mx.array(gaussian((64, dim)))
    assert codec.encode(x).codes.nbytes == 64 * get_format(name).bytes_per_vector(dim)
    assert relative_errors(codec, x).mean() == pytest.approx(get_format(name).error, rel=0.1)
