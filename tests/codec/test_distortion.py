"""Errors of decoded vectors: within 1 % of theory, and what each scale rule preserves.

Sample sizes make 1 % at least five standard errors; seeds are fixed.
"""

import mlx.core as mx
import numpy as np
import pytest

from codec.reference import BITS, DIMS, RULES, gaussian, make_codec, relative_errors, rotation_matrix, roundtrip
from mlx_tq.codec.codebook import theoretical_mse

COORDINATES = 2**21
each_dim = pytest.mark.parametrize("dim", DIMS)
each_name = pytest.mark.parametrize("name", BITS)
ROTATIONS = [("wht", 48), ("wht", 128), ("haar", 128)]
OTHERS = [("wht", dim) for dim in DIMS if dim not in (48, 128)] + [("haar", dim) for dim in (48, 80, 512)]
ROTATIONS += [pytest.param(*each, marks=pytest.mark.full) for each in OTHERS]


@pytest.mark.parametrize(("rotation", "dim"), ROTATIONS)
@each_name
def test_mse_is_within_1_percent_of_theory(name, rotation, dim):
    count = COORDINATES // dim // (4 if rotation == "haar" else 1)
    errors = relative_errors(make_codec(name, dim, rotation=rotation), gaussian((count, dim), seed=dim))
    assert errors.mean() == pytest.approx(theoretical_mse(BITS[name], dim), rel=0.01)


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name == "tq3" else pytest.mark.full) for name in BITS])
def test_distortion_does_not_depend_on_direction(name):
    """Over the seeds of a Haar rotation every direction becomes uniform, also that of a single huge coordinate.

    Heavy tails cost nothing either: rotated coordinates are at most as spread as Gaussians.
    """
    x = gaussian((16, 64), seed=3)
    x[:, 5] = 1000
    errors = [relative_errors(make_codec(name, 64, rotation="haar", seed=seed), x) for seed in range(200)]
    assert np.mean(errors) == pytest.approx(theoretical_mse(BITS[name], 64), rel=0.05)
    heavy = gaussian((64, 128), seed=3) ** 3
    errors = [relative_errors(make_codec(name, 128, seed=seed), heavy) for seed in range(50)]
    assert np.mean(errors) < theoretical_mse(BITS[name], 128)


@each_dim
def test_q8_is_within_1_percent_of_theory_and_off_by_at_most_half_a_step(dim):
    """Rounding errors are uniform, of variance step^2 / 12, in all coordinates but the largest, which is exact."""
    x = gaussian((2**19 // dim, dim), seed=dim)
    y = x.astype(np.float64) @ rotation_matrix(dim, 42).T
    step = np.abs(y).max(axis=-1) / 127
    theory = (dim - 1) * step**2 / 12 / (y * y).sum(axis=-1)
    assert relative_errors(make_codec("q8", dim), x).mean() == pytest.approx(theory.mean(), rel=0.01)
    codec = make_codec("q8", dim, fp32_scales=True)
    error = np.abs(np.array(codec.decode_rotated(codec.encode(mx.array(x)))) - y)
    assert (error.max(axis=-1) <= step / 2 * (1 + 1e-4)).all()


def decode(name: str, dim: int, rule: str, x: np.ndarray, *, wide: bool = True) -> np.ndarray:
    return roundtrip(make_codec(name, dim, scale=rule, fp32_scales=wide), x)


@each_dim
@each_name
def test_ls_is_the_best_scale(name, dim):
    """Any other factor of the same codeword is further away, and the residual is orthogonal to the codeword."""
    x = gaussian((64, dim)) * 5
    best = decode(name, dim, "ls", x, wide=False)
    error = np.linalg.norm(x - best, axis=-1)
    for factor in (0.99, 0.999, 1.001, 1.01):
        assert (np.linalg.norm(x - best * factor, axis=-1) > error).all()
    exact = decode(name, dim, "ls", x)
    cosine = ((x - exact) * exact).sum(axis=-1) / (exact * exact).sum(axis=-1)
    assert np.abs(cosine).max() < 1e-5
    for rule in ("raw", "matched", "unbiased"):
        other = np.linalg.norm(x - decode(name, dim, rule, x), axis=-1)
        assert (other >= np.linalg.norm(x - exact, axis=-1) * (1 - 1e-5)).all()
        assert other.mean() > error.mean()


@each_dim
@each_name
def test_other_rules_preserve_norm_or_inner_product(name, dim):
    """Raw stores the norm; matched decodes to it; unbiased keeps the inner product, which least squares shortens."""
    x = gaussian((64, dim)) * 5
    norm, energy = np.linalg.norm(x.astype(np.float64), axis=-1), (x.astype(np.float64) ** 2).sum(axis=-1)
    raw, matched, ls, unbiased = (decode(name, dim, rule, x) for rule in RULES)
    scale = np.array(make_codec(name, dim, scale="raw", fp32_scales=True).encode(mx.array(x)).scale)
    assert np.allclose(scale, norm, rtol=1e-6)
    assert np.allclose(np.linalg.norm(matched, axis=-1), norm, rtol=1e-5)
    assert not np.allclose(np.linalg.norm(raw, axis=-1), norm, rtol=2**-11 + 1e-5)
    exact, short = ((vectors * x).sum(axis=-1) for vectors in (unbiased, ls))
    assert (short < energy * (1 - 1e-4)).all()
    capped = (exact > 1.2999 * short) & (name != "tq1")
    assert np.allclose(exact[~capped], energy[~capped], rtol=1e-5)
    assert (exact[capped] < energy[capped]).all()
    assert capped.sum() <= 1, "a vector of 48"


@pytest.mark.parametrize(("name", "error"), [("tq4", 0.55), ("tq3", 0.82), ("tq2", 0.97)])
def test_unbiased_does_not_amplify_vectors_along_a_row_of_the_rotation(name, error):
    """One coordinate has all energy: a scale that corrects its largest level would amplify the other coordinates."""
    x = (rotation_matrix(128, 42)[7][None] * gaussian((64, 1)) * 5).astype(np.float32)
    best, capped = (decode(name, 128, rule, x) for rule in ("ls", "unbiased"))
    ratio = np.linalg.norm(capped, axis=-1) / np.linalg.norm(best, axis=-1)
    assert np.allclose(ratio, 1.295 if name == "tq4" else 1.3, rtol=1e-3)
    assert (np.linalg.norm(capped - x, axis=-1) <= error * np.linalg.norm(x, axis=-1)).all()


@each_name
def test_scale_rules_share_the_codes_and_powers_of_two_change_only_the_scale(name):
    x = mx.array(gaussian((64, 128)))
    codecs = [make_codec(name, 128, scale=rule, fp32_scales=True) for rule in RULES]
    raw, *others = encoded = [codec.encode(x) for codec in codecs]
    assert all(mx.array_equal(other.codes, raw.codes) for other in others)
    assert not any(mx.array_equal(other.scale, raw.scale) for other in others)
    for codec, one in zip(codecs, encoded, strict=True):
        eight = codec.encode(8 * x)
        assert mx.array_equal(one.codes, eight.codes)
        assert mx.array_equal(8 * one.scale, eight.scale)
