"""Codes bit for bit: equal to a scalar NumPy encoder, and the same however the vectors arrive."""

import math

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from codec.published import BLOCKS
from codec.reference import BITS, DIMS, FORMATS, SEED, gaussian, make_codec, pack, quantize, rotate
from mlx_tq.codec import Encoded, packing

pytestmark = pytest.mark.usefixtures("compiled")  # as codecs run
seeds = st.integers(0, 2**32 - 1)
each_dim = pytest.mark.parametrize("dim", DIMS)
each_turbo = pytest.mark.parametrize("name", BITS)


@given(st.sampled_from([*BITS.values()]), st.integers(1, 40), st.lists(st.integers(1, 4), max_size=3), seeds)
@settings(max_examples=150, deadline=None)
def test_words_have_the_documented_layout(bits, units, lead, seed):
    codes = np.random.default_rng(seed).integers(0, 2**bits, (*lead, 16 * units)).astype(np.uint16)
    words = packing.pack(mx.array(codes), bits)
    assert (words.dtype, words.shape) == (mx.uint16, (*lead, units * bits))
    assert np.array(words).reshape(-1, units * bits)[-1].tolist() == pack(
        codes.reshape(-1, 16 * units)[-1].tolist(), bits
    )
    planes = packing.unpack(packing.split_words(words, bits), bits)
    assert np.array_equal(np.array(mx.concatenate(planes, axis=-1)), codes)


def assert_turbo_codes(name: str, x: np.ndarray) -> np.ndarray:
    """Compare vectors [n, D] with the scalar encoder, and return its codes [D, n]."""
    codes, norm = quantize(x.T, BITS[name], SEED)
    encoded = make_codec(name, x.shape[1], seed=SEED).encode(mx.array(x))
    assert np.array(encoded.codes).tolist() == [pack(vector.tolist(), BITS[name]) for vector in codes.T]
    assert np.array_equal(np.array(encoded.scale), norm.astype(np.float16))
    wide = make_codec(name, x.shape[1], seed=SEED, fp32_scales=True).encode(mx.array(x))
    assert np.array_equal(np.array(wide.scale), norm)
    return codes


@each_dim
@each_turbo
def test_turbo_equals_scalar_encoder(name, dim):
    assert_turbo_codes(name, gaussian((24, dim), seed=dim) * np.float32(3.7))
    ones = np.rint(gaussian((24, dim)) * 0.4).astype(np.float32)
    ones[:, 0] = 1
    assert (rotate(ones.T, SEED) == 0).sum() > 20, "0 is a boundary; a value on it goes down"
    assert_turbo_codes(name, ones)


def near_a_boundary(dim: int, bits: int) -> np.ndarray:
    """Return vectors [n, D] one of whose coordinates is within a few ulp of where its code changes, on both sides.

    Their first value is bisected between two where the code differs; then come its neighbors among the floats.
    """
    x = gaussian((40, dim)).T
    low, high = np.full(40, -1000, np.float32), np.full(40, 1000, np.float32)

    def code(first: np.ndarray) -> np.ndarray:
        x[0] = first
        return quantize(x, bits, SEED)[0][0]

    at_low = code(low)
    assert (code(high) != at_low).all()
    for _ in range(50):
        middle = ((low.astype(np.float64) + high) / 2).astype(np.float32)
        same_side = code(middle) == at_low
        low, high = np.where(same_side, middle, low), np.where(same_side, high, middle)
    vectors = []
    for step in range(-8, 9):
        x[0] = low + step * np.spacing(low)
        vectors.append(x.T.copy())
    return np.concatenate(vectors)


@pytest.mark.parametrize("dim", [64, 80, 128])
@each_turbo
def test_arithmetic_is_the_documented_one(name, dim):
    """Any other order of sums, or a division instead of the product by 1 / norm, would give another code here."""
    codes = assert_turbo_codes(name, near_a_boundary(dim, BITS[name]))
    assert len(np.unique(codes[0])) > 1


@each_dim
def test_q8_equals_scalar_encoder(dim):
    x = gaussian((24, dim), seed=dim) * np.float32(3.7)
    encoded = make_codec("q8", dim, seed=SEED).encode(mx.array(x))
    y = rotate(x.T, SEED)
    peak = np.abs(y).max(axis=0)
    codes = np.rint(y * (np.float32(127) / peak)).astype(np.int8)
    assert np.array_equal(np.array(encoded.codes.view(mx.int8)), codes.T)
    assert np.array_equal(np.array(encoded.scale), (peak / np.float32(math.sqrt(dim))).astype(np.float16))


def join(parts: list[Encoded]) -> Encoded:
    scale = None if parts[0].scale is None else mx.stack([part.scale for part in parts])
    return Encoded(mx.stack([part.codes for part in parts]), scale)


ARRIVALS = [(name, dim) for name in (*FORMATS, "tq1") for dim in DIMS] + [(name, 128) for name in BLOCKS]


@pytest.mark.parametrize(("name", "dim"), [*ARRIVALS, ("tcq4", 80), ("tcq3", 128), ("tcq2", 64)])
def test_codes_do_not_depend_on_shape_layout_or_type(name, dim):
    codec = make_codec(name, dim)
    x = mx.array(np.rint(gaussian((24, dim)) * 16) / 16).astype(mx.float16)  # all types hold multiples of 1/16 exactly
    whole = codec.encode(x)
    arrivals = {
        "alone": join([codec.encode(row) for row in x]),
        "batch": codec.encode(x.reshape(2, 3, 4, dim)),
        "bfloat16": codec.encode(x.astype(mx.bfloat16)),
        "float32": codec.encode(x.astype(mx.float32)),
        "strided": codec.encode(mx.repeat(x, 50, axis=0)[::50]),
        "column slice": codec.encode(mx.concatenate([x, x], axis=-1)[:, dim:]),
        "transposed": codec.encode(mx.contiguous(x.T).T),
        "swapped axes": codec.encode(mx.contiguous(x.reshape(4, 6, dim).swapaxes(0, 1)).swapaxes(0, 1)),
        "broadcast": codec.encode(mx.broadcast_to(x, (3, 24, dim))),
    }
    if name == "fp16":  # it keeps the type that it was made for, so the values are compared
        for other in ("bfloat16", "float32"):
            assert mx.array_equal(codec.decode(arrivals.pop(other)), x.astype(mx.float32))
    broadcast = arrivals.pop("broadcast")
    assert mx.array_equal(broadcast.codes, mx.broadcast_to(whole.codes, broadcast.codes.shape))
    for arrival, encoded in arrivals.items():
        assert mx.array_equal(encoded.codes.reshape(24, -1), whole.codes), arrival
        if whole.scale is not None:
            assert mx.array_equal(encoded.scale.reshape(24), whole.scale), arrival


@pytest.mark.parametrize("name", [*FORMATS[1:], "tq1"])
def test_seed_and_rotation_decide_the_codes(name):
    x = mx.array(gaussian((4, 64)))
    codes = [make_codec(name, 64, **o).encode(x).codes for o in ({"seed": 1}, {"seed": 2}, {"rotation": "haar"})]
    assert not any(mx.array_equal(a, b) for a, b in zip(codes, [*codes[1:], codes[0]], strict=True))
