"""Rotations and sums: orthogonal, invertible, the same bits on every platform, and Haar where they say so."""

import hashlib

import mlx.core as mx
import numpy as np
import pytest

from codec.reference import DIMS, fixed_sum, gaussian, hadamard_matrix, rotation_matrix
from codec.reference import rotate as rotate_by_coordinates
from mlx_tq.codec import rotation as library
from mlx_tq.codec.rotation import ROTATIONS, Haar, WalshHadamard, get_rotation, rotate, rotate_back
from mlx_tq.errors import ConfigError

SEED = 42

# Digests of the little-endian fp32 bytes, see `digest`.
SIGNS = {48: "75f2422832fb274c", 64: "106a06b17ae55242", 80: "7dd81c80249e6207", 112: "3bbe4586d50a909d"}
SIGNS |= {128: "8f062ed761a1f93d", 256: "d094a5dc72d105c3", 512: "1a431af17a94d2a6"}
HADAMARD = {1: "e00e5eb9444182f3", 12: "526ba6498c1b2950", 20: "f111c754a82389d5", 28: "43928e0290bca90d"}
HAAR = {48: "4b45c067068728f3", 64: "81b89ab1ced454f0", 128: "7e76eadbc9e5aec6"}


def digest(array: mx.array) -> str:
    return hashlib.sha256(np.array(array).astype("<f4").tobytes()).hexdigest()[:16]


@pytest.mark.parametrize("dim", DIMS)
def test_pairwise_sum_adds_in_the_documented_order(dim):
    x = gaussian((64, dim)) * np.float32(10.0) ** gaussian((64, dim), seed=1)
    total = np.array(library.pairwise_sum(mx.array(x)))
    assert np.array_equal(total, fixed_sum(x.T))
    assert not np.array_equal(total, np.cumsum(x, axis=-1, dtype=np.float32)[:, -1])  # this data shows the order


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("name", ROTATIONS)
def test_all_functions_apply_one_orthogonal_matrix(name, dim):
    rotation = get_rotation(name, dim, SEED)
    assert get_rotation(name, dim, SEED) is rotation
    assert mx.array_equal(ROTATIONS[name](dim, SEED).matrix, rotation.matrix)
    assert not mx.array_equal(ROTATIONS[name](dim, SEED + 1).matrix, rotation.matrix)
    if name == "wht":
        assert np.allclose(np.array(rotation.matrix), rotation_matrix(dim, SEED), rtol=1e-6, atol=0)
        assert np.array_equal(np.array(library.hadamard(mx.eye(dim), transpose=True)), hadamard_matrix(dim))
    matrix, x = np.array(rotation.matrix, np.float64), gaussian((2, 7, dim))
    assert np.abs(matrix @ matrix.T - np.eye(dim)).max() < 2e-6
    forward = rotation.forward(mx.array(x))
    assert np.allclose(np.array(forward), x @ matrix.T * np.sqrt(dim), atol=2e-5 * np.sqrt(dim))
    inverse = rotation.inverse(forward / np.sqrt(dim).item())
    assert inverse.dtype == mx.float32
    assert np.allclose(np.array(inverse), x, atol=1e-5)
    assert np.allclose(np.array(rotate(mx.array(x), rotation)), x @ matrix.T, atol=2e-5)
    assert np.allclose(np.array(rotate_back(mx.array(x), rotation)), x @ matrix, atol=2e-5)


@pytest.mark.parametrize("dim", DIMS)
def test_rotations_add_in_the_documented_order(dim):
    """Walsh-Hadamard by butterflies and rows; Haar left to right over D, each product rounded."""
    x, total = gaussian((7, dim)), np.zeros((7, dim), np.float32)
    expected = rotate_by_coordinates(x.T, SEED).T
    assert np.array_equal(np.array(get_rotation("wht", dim, SEED).forward(mx.array(x))), expected)
    haar = get_rotation("haar", dim, SEED)
    scaled = np.array(haar.matrix) * np.float32(np.sqrt(dim))
    for j in range(dim):
        total = total + x[:, j : j + 1] * scaled[:, j]
    assert np.array_equal(np.array(haar.forward(mx.array(x))), total)


def test_haar_statistics():
    """Uniform over the orthogonal group; QR alone is biased, its diagonal is negative."""
    dim, count = 16, 400
    matrices = [np.array(Haar(dim, seed).matrix, np.float64) for seed in range(count)]
    positive = sum(np.linalg.det(matrix) > 0 for matrix in matrices)
    assert abs(positive - count / 2) < 5 * np.sqrt(count) / 2
    traces = np.array([np.trace(matrix) for matrix in matrices])
    assert abs(traces.mean()) < 5 / np.sqrt(count)  # E tr = 0 and E tr^2 = 1 for Haar
    assert abs((traces**2).mean() - 1) < 5 * np.sqrt(2 / count)
    entries = np.stack(matrices) * np.sqrt(dim)
    assert np.abs(entries.mean(axis=0)).max() < 5 / np.sqrt(count)
    assert abs((entries**4).mean() - 3 * dim / (dim + 2)) < 0.05


def test_a_seed_gives_these_rotations():
    """A change would make every saved cache unreadable."""
    assert {dim: digest(WalshHadamard(dim, SEED).signs) for dim in SIGNS} == SIGNS
    assert {dim: digest(Haar(dim, SEED).matrix) for dim in HAAR} == HAAR
    assert {order: digest(library.hadamard_matrix(order)) for order in library.ORDERS} == HADAMARD


def test_refusals():
    with pytest.raises(ConfigError, match=r"rotation 'dct' is unknown; valid are wht, haar\."):
        get_rotation("dct", 64, SEED)
    for dim in (-16, 0, 3, 72, 144, 176, 208, 288):
        with pytest.raises(ConfigError, match=rf"head_dim {dim} has no Walsh-Hadamard .* Use rotation='haar'"):
            get_rotation("wht", dim, SEED)
    assert get_rotation("haar", 176, SEED).matrix.shape == (176, 176)
