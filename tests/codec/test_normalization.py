"""Normalized keys: means and weights against NumPy, with every kind of key format, and vectors meant to break them."""

import mlx.core as mx
import numpy as np
import pytest
from codec_reference import gaussian, make_codec, rotation_matrix

from benchmarks.quality import adversarial
from mlx_tq.codec import RowLayout, get_format
from mlx_tq.codec.formats.base import FP16_MAX
from mlx_tq.codec.normalization import (
    MEAN_TOKENS,
    KeyNormalization,
    block_means,
    decode,
    decode_rotated,
    mean_scores,
    normalize,
    pair_scale,
)
from mlx_tq.codec.rotation import rotated
from mlx_tq.kernels.attend import attend
from mlx_tq.kernels.encode import encode
from mlx_tq.kernels.prefill import prefill
from mlx_tq.kernels.regions import Regions

FORMATS = ("fp16", "q8", "tq4", "tq3", "tq2", "q8_0", "tq3_0", "tbq4_0", "fp8", "tq35", "spectral16_int8")
DIM, TOKENS, SEED = 128, 3 * MEAN_TOKENS // 2, 42
SHAPE = (2, 2, TOKENS, DIM)


def channels(seed=1) -> np.ndarray:
    """How much energy each channel has: [B, H, D]."""
    return np.exp(gaussian((*SHAPE[:2], DIM), seed))


def keys_of(seed=0) -> np.ndarray:
    """Channels of high energy, around a mean of twice that."""
    return ((gaussian(SHAPE, seed) + 2 * gaussian((*SHAPE[:2], 1, DIM), seed + 7)) * channels()[:, :, None]).astype(
        "f4"
    )


def normalization_of(keys: np.ndarray, codec, scale: np.ndarray) -> KeyNormalization:
    blocks = [mx.array(keys[:, :, None, i : i + MEAN_TOKENS]) for i in range(0, TOKENS, MEAN_TOKENS)]
    means = [block_means(block, mx.array(scale), codec.rotation).means for block in blocks]
    return KeyNormalization(mx.array(scale), mx.concatenate(means, axis=2))


def known(name: str):
    """A codec that has learned what it learns, keys, and their normalization."""
    keys, scale = keys_of(), (1 / np.sqrt(channels())).astype("f4")
    codec = make_codec(name, DIM).fit(mx.array((keys - keys.mean(axis=2, keepdims=True)) * scale[:, :, None]))
    return codec, keys, normalization_of(keys, codec, scale)


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_coded_is_less_its_mean(name):
    codec, keys, normalization = known(name)
    x = normalize(mx.array(keys), normalization, codec.rotation)
    found = np.array(decode(codec, codec.encode(x), normalization), np.float64)
    blocks = np.split(keys.astype(np.float64), [MEAN_TOKENS], axis=2)
    mean = np.concatenate([np.broadcast_to(b.mean(axis=2, keepdims=True), b.shape) for b in blocks], axis=2)
    weight = 1 / np.sqrt(channels().astype(np.float64))[:, :, None]
    residual = weight * (keys - mean)
    rounding = 2.0**-11 * np.linalg.norm(weight * mean, axis=-1).max()  # of a mean in fp16
    assert np.linalg.norm(np.array(x) - residual, axis=-1).max() <= rounding
    error = np.linalg.norm(weight * (found - keys), axis=-1)
    allowed = np.linalg.norm(np.array(codec.decode(codec.encode(x)) - x), axis=-1)
    assert np.all(error <= 1.001 * allowed + 1e-4 * np.linalg.norm(weight * keys, axis=-1))


@pytest.mark.parametrize("name", ["q8", "tq3_0", "tq35", "fp8"])
def test_means_are_in_the_codes_domain(name):
    codec, keys, normalization = known(name)
    mean = keys[:, :, :MEAN_TOKENS].astype(np.float64).mean(axis=2) / np.sqrt(channels())
    if name == "q8":
        expected = mean @ rotation_matrix(DIM, SEED).T
    else:
        expected = (
            mean if codec.rotation is None else np.array(rotated(mx.array(mean[:, :, None]), codec.rotation))[:, :, 0]
        )
    assert np.allclose(np.array(normalization.means)[:, :, 0], expected, rtol=2.0**-11, atol=1e-5)


@pytest.mark.parametrize("name", FORMATS)
def test_scores_are_those_of_the_decoded_keys(name):
    codec, keys, normalization = known(name)
    encoded = codec.encode(normalize(mx.array(keys), normalization, codec.rotation))
    queries = mx.array(gaussian((2, 2, 5, DIM), 5))
    turned = rotated(queries / normalization.scale[:, :, None], codec.rotation)
    found = codec.scores(turned, encoded) + mean_scores(turned, normalization, TOKENS)
    expected = queries @ decode(codec, encoded, normalization).swapaxes(-1, -2)
    assert mx.allclose(found, expected, rtol=1e-4, atol=1e-3)
    assert mx.allclose(turned @ decode_rotated(codec, encoded, normalization).swapaxes(-1, -2), expected, 1e-4, 1e-3)


@pytest.mark.parametrize("name", FORMATS)
def test_attention_and_prefill(name):
    """Of every format what mlx's own attention makes of the decoded cache; of what lies past the body, nothing."""
    codec, keys, normalization = known(name)
    layout, values = RowLayout(codec, make_codec("tq4", DIM)), mx.array(gaussian(SHAPE, 3))
    rows = encode(mx.array(keys), values, layout, normalization).rows
    full = mx.array(keys_of(9)[:, :, :20]), values[:, :, :20]
    regions = Regions(rows, TOKENS, layout, *full, 7, 20, normalization)
    for run, length in ((attend, 2), (prefill, 13)):
        queries = mx.array(gaussian((2, 4, length, DIM), 11))
        options = {"scale": 0.02, "mask": "causal"}
        expected = mx.fast.scaled_dot_product_attention(queries, *regions.decoded(), **options)
        assert mx.allclose(run(queries, regions, **options), expected, rtol=1e-3, atol=1e-3)


def test_blocks_are_encoded_one_by_one_as_together():
    codec, keys, normalization = known("tq4")
    layout, values = RowLayout(codec, make_codec("tq4", DIM)), mx.array(gaussian(SHAPE, 3))
    whole = encode(mx.array(keys), values, layout, normalization)
    for start in range(0, TOKENS, 32):
        part = mx.array(keys[:, :, start : start + 32]), values[:, :, start : start + 32]
        found = encode(*part, layout, normalization.after(start))
        assert mx.array_equal(found.rows, whole.rows[:, :, start : start + 32])
        indexed = KeyNormalization(normalization.scale, normalization.means, normalization.which(TOKENS))
        assert mx.array_equal(encode(*part, layout, indexed.after(start)).rows, found.rows)


@pytest.mark.parametrize("pairs", [None, [(2 * f, 2 * f + 1) for f in range(16)], []])
def test_pair_scale(pairs):
    rng = np.random.default_rng(2)
    keys, queries = rng.gamma(0.3, size=(2, 3, 64)) ** 2 + 1e-9, rng.gamma(0.3, size=(2, 6, 64))
    found = np.array(pair_scale(mx.array(keys, mx.float32), mx.array(queries, mx.float32), pairs), np.float64)
    used = [(f, f + 32) for f in range(32)] if pairs is None else pairs
    for b in range(2):
        for h in range(3):
            statistics = []
            for rms in (np.sqrt((queries[b, 2 * h : 2 * h + 2] ** 2).mean(axis=0)), keys[b, h]):
                averaged = rms.copy()
                for pair in used:
                    averaged[list(pair)] = np.sqrt((rms[list(pair)] ** 2).mean())
                statistics.append(np.maximum(averaged, 0.01 * np.sqrt((averaged**2).mean())))
            weight = np.sqrt(statistics[0] / statistics[1])
            assert np.allclose(found[b, h], weight, rtol=1e-4)
            for first, second in used:
                assert found[b, h, first] == found[b, h, second], "so it commutes with RoPE"


@pytest.mark.parametrize("broken", [0.0, np.nan, np.inf])
def test_statistics_without_meaning_give_no_weights(broken):
    keys, queries = np.ones((1, 3, 64), "f4"), np.full((1, 3, 64), 2, "f4")
    keys[0, 0], queries[0, 1], keys[0, 2, :32] = broken, broken, 0.5
    found = np.array(pair_scale(mx.array(keys), mx.array(queries), []))
    assert np.array_equal(found[0, :2], np.ones((2, 64)))
    assert np.allclose(found[0, 2], np.repeat([2, np.sqrt(2)], 32))


def test_means_that_fp16_cannot_hold():
    keys = mx.zeros((1, 1, 3, 32, 64)) + mx.array([1.0, 1e6, mx.nan])[:, None, None]
    means, clamped = block_means(keys, mx.ones((1, 1, 64)), None)
    assert [means[0, 0, i, 0].item() for i in range(3)] == [1.0, FP16_MAX, 0.0]
    assert clamped.item() == 1
    layout = RowLayout(make_codec("tq4", 64), make_codec("tq4", 64))
    given = mx.zeros((1, 1, 32, 64))
    given[..., 5, 3], given[..., 6, 3] = mx.nan, 2e5
    rows = layout.encode(given, given * 0, KeyNormalization(mx.ones((1, 1, 64)), means, mx.zeros(32, mx.int32)))
    assert rows.health.tolist() == [1, 1 + 1], "the key that is clamped; the one that is none, and its value"


@pytest.mark.parametrize("asked", adversarial.ASKED)
@pytest.mark.parametrize("name", adversarial.FORMATS)
@pytest.mark.parametrize("kind", adversarial.KEYS)
def test_adversarial_keys_are_no_worse_than_plain(kind, name, asked):
    """Or no worse than Gaussian ones: levels that happen to be the spikes of plain keys store those exactly."""
    plain, normalized = adversarial.errors(kind, name, asked)
    assert normalized <= max(1.05 * plain, np.sqrt(get_format(name).error) if "+-1000" in kind else 1e-5)
