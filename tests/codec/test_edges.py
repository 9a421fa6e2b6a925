"""Vectors that a healthy model does not make: zero, huge, tiny, not finite."""

import mlx.core as mx
import numpy as np
import pytest
from codec_reference import BITS, FORMATS, gaussian, make_codec

from mlx_tq.codec import RowLayout, codebook
from mlx_tq.codec.formats.base import FP16_MAX

SCALED = (*FORMATS[1:], "tq1")
RULES = ("raw", "matched", "ls", "unbiased")


def round_trip(codec, x: mx.array) -> np.ndarray:
    return np.array(codec.decode(codec.encode(x)))


def health(key: str, keys: mx.array, values: mx.array | None = None) -> list[int]:
    layout = RowLayout(make_codec(key, 64), make_codec("tq4", 64, scale="ls"))
    return layout.encode(keys, mx.ones(keys.shape) if values is None else values).health.tolist()


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", [*SCALED, "fp16"])
def test_zero_decodes_to_zero(name, rule, wide):
    x = gaussian((3, 64))
    x[1] = 0
    decoded = round_trip(make_codec(name, 64, scale=rule, wide_scale=wide), mx.array(x))
    assert np.array_equal(decoded[1], np.zeros(64))
    assert np.abs(decoded[[0, 2]]).max() > 0.5


@pytest.mark.parametrize("name", BITS)
def test_codes_of_zero_are_those_of_a_zero_coordinate(name):
    """0 lies on the middle boundary and goes down; no NaN decides it."""
    codec = make_codec(name, 64)
    levels = mx.concatenate(codec.planes(codec.encode(mx.zeros(64)).codes), axis=-1)
    middle = codebook.levels(BITS[name])[2 ** BITS[name] // 2 - 1]
    assert mx.allclose(levels, mx.full(64, float(middle)), rtol=1e-6)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", SCALED)
def test_huge_norm_is_clamped(name, rule):
    """Finite fp16 components, but a norm beyond fp16."""
    x = mx.full((2, 64), 60000.0).astype(mx.float16) * mx.array([[1.0], [0.001]], mx.float16)
    codec = make_codec(name, 64, scale=rule)
    encoded = codec.encode(x)
    scale = np.array(encoded.scale)
    assert np.isfinite(scale).all()
    assert np.isfinite(np.array(codec.decode(encoded))).all()
    if name != "q8":  # its scale is the largest coordinate, not the norm
        assert scale[0] == FP16_MAX


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float32])
def test_huge_components_are_clamped(name, dtype):
    x = mx.array(gaussian((4, 64))).astype(dtype) * 1e30
    for rule in RULES:
        for wide in (False, True):
            codec = make_codec(name, 64, scale=rule, wide_scale=wide)
            encoded = codec.encode(x)
            assert np.array(encoded.scale).max() <= FP16_MAX
            assert np.isfinite(np.array(codec.decode(encoded))).all()


def test_clamped_vectors_are_counted():
    ones, large = mx.ones((5, 64)), mx.ones((5, 64))
    large[1] = 60000.0  # norm beyond fp16
    large[3, 7] = 1e6  # a component beyond fp16
    assert health("tq4", ones) == [0, 0]
    assert health("tq4", large) == [2, 0]
    assert health("tq4", large, large) == [4, 0]
    assert health("q8", large) == [2, 0]
    assert health("fp16", large.astype(mx.float32)) == [0, 0]  # nothing is clamped there


def test_largest_values_that_fit_are_not_counted():
    x = mx.zeros((1, 64))
    x[0, 0] = FP16_MAX - 32
    assert health("tq4", x) == [0, 0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
def test_what_is_not_finite_is_counted(name, bad, dtype):
    x = mx.ones((2, 5, 64)).astype(dtype)
    x[0, 1, 3] = bad
    x[1, 4, 0] = bad
    ones = mx.ones((2, 5, 64))
    assert health(name, x)[1] == 2
    assert health(name, ones, x)[1] == 2
    assert health(name, x, x)[1] == 4
    assert health(name, ones)[1] == 0


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("exponent", range(-38, -2, 3))
@pytest.mark.parametrize("name", SCALED)
def test_tiny_norms_lose_no_more_than_fp16_does(name, exponent, rule):
    """The stored scale is off by at most half of fp16's smallest step, and never NaN or infinite."""
    x = gaussian((8, 64)) * np.float32(10.0**exponent)
    codec = make_codec(name, 64, scale=rule)
    encoded = codec.encode(mx.array(x))
    decoded = np.array(codec.decode(encoded), np.float64)
    assert np.isfinite(decoded).all()
    step = 2.0**-25 * (8 if name == "q8" else 2)  # of the scale, times the largest decoded norm for scale 1
    # An unbiased vector is off by sqrt(1 / cos^2 - 1) of its norm, less than all of it while cos^2 > 1/2.
    quantisation = 0.01 if name == "q8" else 1.0 if rule == "unbiased" else 0.7
    bound = quantisation * np.linalg.norm(x.astype(np.float64), axis=-1) + step
    assert (np.linalg.norm(decoded - x, axis=-1) <= bound).all()
