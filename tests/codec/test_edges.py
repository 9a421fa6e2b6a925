"""Vectors that no healthy model makes: zero, huge, tiny, not finite."""

import mlx.core as mx
import numpy as np
import pytest
from codec_reference import BITS, FORMATS, RULES, gaussian, make_codec

from mlx_tq.codec import RowLayout, codebook
from mlx_tq.codec.formats.base import FP16_MAX

SCALED = (*FORMATS[1:], "tq1")


@pytest.mark.parametrize("name", BITS)
def test_codes_of_zero_are_those_of_a_zero_coordinate(name):
    """0 lies on the middle boundary and goes down; no NaN decides it."""
    codec = make_codec(name, 64)
    levels = mx.concatenate(codec.decode_planes(codec.encode(mx.zeros(64)).codes), axis=-1)
    middle = codebook.levels(BITS[name])[2 ** BITS[name] // 2 - 1]
    assert mx.allclose(levels, mx.full(64, float(middle)), rtol=1e-6)


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", SCALED)
def test_zero_and_huge_vectors(name, rule, wide):
    """Zero stays zero; a norm or values beyond fp16 are clamped to it and decode to something finite."""
    codec = make_codec(name, 64, scale=rule, fp32_scales=wide)
    x = gaussian((5, 64))
    x[1], x[2], x[3] = 0, 60000, 1e30 * x[3]
    for dtype in (mx.float32, mx.bfloat16):
        encoded = codec.encode(mx.array(x).astype(dtype))
        scale, decoded = np.array(encoded.scale), np.array(codec.decode(encoded))
        assert np.isfinite(scale).all()
        assert scale.max() <= FP16_MAX
        if name != "q8":  # its scale is the largest coordinate, not the norm
            assert scale[2] == FP16_MAX
        assert np.isfinite(decoded).all()
        assert np.array_equal(decoded[1], np.zeros(64))
        assert np.abs(decoded[[0, 4]]).max() > 0.5


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
def test_clamped_and_broken_vectors_are_counted(name, dtype):
    """Both sides count; fp16 clamps nothing, and the largest vector that fits is not clamped."""
    layout = RowLayout(make_codec(name, 64), make_codec("tq4", 64, scale="ls"))
    ones = mx.ones((2, 5, 64)).astype(dtype)
    fits, large = mx.zeros(ones.shape), mx.array(ones)
    fits[..., 0] = FP16_MAX - 224  # bfloat16 holds it
    large[0, 1] = 60000.0  # a norm beyond fp16
    scaled = name != "fp16"
    assert layout.encode(fits.astype(dtype), ones).health.tolist() == [0, 0]
    assert layout.encode(large, large).health.tolist() == [1 + scaled, 0]
    for bad in (float("nan"), float("inf"), float("-inf")):
        x = mx.array(ones)
        x[0, 1, 3] = x[1, 4, 0] = bad
        assert [layout.encode(*pair).health.tolist()[1] for pair in ((x, ones), (ones, x), (x, x))] == [2, 2, 4]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("exponent", range(-38, -2, 3))
@pytest.mark.parametrize("name", SCALED)
def test_tiny_norms_lose_no_more_than_in_fp16(name, exponent, rule):
    """The stored scale is off by at most half of fp16's smallest step, and never NaN or infinite."""
    x = gaussian((8, 64)) * np.float32(10.0**exponent)
    codec = make_codec(name, 64, scale=rule)
    encoded = codec.encode(mx.array(x))
    decoded = np.array(codec.decode(encoded), np.float64)
    assert np.isfinite(decoded).all()
    step = 2.0**-25 * (8 if name == "q8" else 2)  # of the scale, times the largest decoded norm for scale 1
    # An unbiased vector is off by sqrt(1 / cos^2 - 1) of its norm, less than all of it while cos^2 > 1/2.
    quantization = 0.01 if name == "q8" else 1.0 if rule == "unbiased" else 0.7
    bound = quantization * np.linalg.norm(x.astype(np.float64), axis=-1) + step
    assert (np.linalg.norm(decoded - x, axis=-1) <= bound).all()
