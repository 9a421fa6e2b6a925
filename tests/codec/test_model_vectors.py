"""The codec on a model's own keys and values, against float64 mathematics without a fixed order of sums."""

import mlx.core as mx
import numpy as np
import pytest
from codec_reference import levels, rotation_matrix

from mlx_tq.cli.needles.haystack import load_text
from mlx_tq.codec import CodecOptions, get_format
from mlx_tq.codec.packing import split_words, unpack
from mlx_tq.evaluate.recording import record

SEED, BITS, DIM = 42, 4, 128


def exact_codes(x: np.ndarray) -> np.ndarray:
    """Codes of vectors [n, D]: the matrix product, the norm and the nearest level in float64."""
    t = x @ rotation_matrix(DIM, SEED).T * np.sqrt(DIM) / np.linalg.norm(x, axis=-1, keepdims=True)
    table = levels(BITS).astype(np.float64)
    return np.abs(t[..., None] - table).argmin(axis=-1)


@pytest.fixture(scope="module")
def layers(embedded):
    model, tokenizer = embedded
    return record(model, tokenizer.encode(load_text()[:1000], add_special_tokens=False)[:96], 1)


@pytest.mark.parametrize("side", ["keys", "values"])
def test_tq4_codes_are_those_of_float64(layers, side):
    codec = get_format("tq4").codec(DIM, CodecOptions(seed=SEED))
    equal = []
    for layer in layers:
        x = getattr(layer, side).astype(mx.float32)
        codes = np.array(mx.concatenate(unpack(split_words(codec.encode(x).codes, BITS), BITS), axis=-1))
        wanted = exact_codes(np.array(x, np.float64))
        assert np.abs(codes.astype(int) - wanted).max() <= 1  # a neighbour, where fp32 rounds across a boundary
        equal.append((codes == wanted).mean())
    assert len(equal) == 6
    assert min(equal) > 0.9999  # the issue asks for 0.993
