"""Properties of every codec, for shapes, types, seeds and scale rules that Hypothesis chooses."""

import mlx.core as mx
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from codec.reference import BITS, DIMS, FORMATS, RULES, make_codec
from mlx_tq.codec.formats.base import dtype_of

# Largest share of a vector's norm that may be lost. Random vectors lose sqrt(MSE); the worst ones lose more.
WORST = {"fp16": 2**-10, "q8": 0.1, "tq4": 0.5, "tq3": 0.6, "tq2": 0.8}
OPTIONS = {
    "seed": st.integers(0, 2**31),
    "rotation": st.sampled_from(["wht", "wht", "wht", "haar"]),
    "scale": st.sampled_from(RULES),
    "fp32_scales": st.booleans(),
}
options = st.fixed_dictionaries(OPTIONS)
dims = st.sampled_from([dim for dim in DIMS if dim <= 128])
leads = st.lists(st.integers(0, 3), max_size=4).map(tuple)
dtypes = st.sampled_from(["float16", "bfloat16", "float32"])
seeds = st.integers(0, 2**32 - 1)
modest = settings(max_examples=60, deadline=None)


def worst(name: str, dim: int) -> float:
    """Return the largest share of a vector's norm that may be lost.

    One bit keeps the signs of the rotated vector, whose cosine with them has the mean sqrt(2/pi) and the variance
    (1 - 3/pi)/dim; unbiased, the tangent of that angle is lost. Five standard deviations are granted.
    """
    if name != "tq1":
        return WORST[name]
    cosine = (2 / np.pi) ** 0.5 - 5 * ((1 - 3 / np.pi) / dim) ** 0.5
    return (1 / cosine**2 - 1) ** 0.5


def draw_vectors(seed: int, shape: tuple[int, ...], dtype: str) -> mx.array:
    """Draw vectors of very different size and shape, whose norms fp16 holds well.

    Their stream is not that of a rotation of the same seed: a vector along a row of it is a case for test_distortion.
    """
    rng = np.random.default_rng((seed, 1))
    x = rng.standard_normal(shape) ** rng.choice([1, 3]) * 10.0 ** rng.uniform(-2, 1)
    return mx.array(x.astype(np.float32)).astype(dtype_of(dtype))


@given(st.sampled_from([*FORMATS, "tq1"]), dims, leads, dtypes, options, seeds)
@modest
def test_decoded_vectors_are_near_and_of_the_right_shape(name, dim, lead, dtype, options, seed):
    codec = make_codec(name, dim, **options)
    x = draw_vectors(seed, (*lead, dim), dtype)
    encoded = codec.encode(x)
    assert encoded.codes.shape == (*lead, codec.words)
    assert (encoded.scale is None) == (codec.scale_dtype is None)
    decoded = codec.decode(encoded)
    assert (decoded.shape, decoded.dtype) == (x.shape, mx.float32)
    exact = np.array(x.astype(mx.float32), np.float64)
    error = np.linalg.norm(np.array(decoded) - exact, axis=-1)
    assert (error <= worst(name, dim) * np.linalg.norm(exact, axis=-1) + 1e-4).all()


@given(st.sampled_from([*BITS]), dims, options, seeds)
@modest
def test_opposite_vectors_have_opposite_levels(name, dim, options, seed):
    """The codebook is odd. A coordinate exactly on a boundary goes down for both signs: rare, so one is granted."""
    codec = make_codec(name, dim, **options)
    x = draw_vectors(seed, (4, dim), "float32")
    one, other = (mx.concatenate(codec.decode_planes(codec.encode(sign * x).codes), axis=-1) for sign in (1, -1))
    assert (one != -other).sum() <= 1
