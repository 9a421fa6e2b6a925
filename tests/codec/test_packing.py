"""Packed words: against a bit-by-bit implementation of the layout, and back."""

import mlx.core as mx
import numpy as np
import pytest
from codec_reference import DIMS
from codec_reference import pack as pack_by_bits
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_tq.codec.packing import pack, split_words, unpack, words_per_vector

BITS = (1, 2, 3, 4)


def random_codes(shape: tuple[int, ...], bits: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2**bits, shape).astype(np.uint16)


def unpacked(words: mx.array, bits: int) -> np.ndarray:
    return np.array(mx.concatenate(unpack(split_words(words, bits), bits), axis=-1))


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dim", [16, 32, *DIMS])
def test_layout_is_the_documented_one(dim, bits):
    codes = random_codes((3, dim), bits)
    words = np.array(pack(mx.array(codes), bits))
    assert words.dtype == np.uint16
    assert words.shape == (3, words_per_vector(dim, bits))
    assert words.tolist() == [pack_by_bits(row.tolist(), bits) for row in codes]


@given(
    bits=st.sampled_from(BITS),
    units=st.integers(1, 40),
    lead=st.lists(st.integers(1, 4), max_size=3),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=150, deadline=None)
def test_round_trip(bits, units, lead, seed):
    codes = random_codes((*lead, 16 * units), bits, seed)
    words = pack(mx.array(codes), bits)
    assert words.shape == (*lead, units * bits)
    assert np.array_equal(unpacked(words, bits), codes)
