"""Normalized keys: means and scale against NumPy, with every kind of key format, and vectors meant to break them."""

import mlx.core as mx
import numpy as np
import pytest

from benchmarks.studies import adversarial
from codec.reference import gaussian, make_codec
from mlx_tq.codec import RowLayout, get_format
from mlx_tq.codec.formats.base import FP16_MAX
from mlx_tq.codec.normalization import (
    MEAN_TOKENS,
    KeyNormalization,
    compute_block_means,
    compute_key_scale,
    decode_keys,
    denormalize,
    normalize,
)
from mlx_tq.kernels.attend import attend
from mlx_tq.kernels.encode import encode
from mlx_tq.kernels.prefill import prefill
from mlx_tq.kernels.regions import Regions

FORMATS = ("fp16", "q8", "tq4", "tq3", "tq2", "q8_0", "tq3_0", "tbq4_0", "fp8", "tq35", "tq25")
FORMATS += ("spectral16", "spectral16_int8", "spectral16_int16")
DIM, TOKENS = 128, 3 * MEAN_TOKENS // 2
SHAPE = (2, 2, TOKENS, DIM)
CHANNELS = np.exp(gaussian((*SHAPE[:2], DIM), 1))  # the size of each channel, [B, H, D]


def make_keys(seed: int = 0) -> np.ndarray:
    """Return keys with channels of different size, around a mean of twice that."""
    keys = gaussian(SHAPE, seed) + 2 * gaussian((*SHAPE[:2], 1, DIM), seed + 7)
    return (keys * CHANNELS[:, :, None]).astype("f4")


def make_case(name: str):
    """Return a fitted codec, keys, and their normalization."""
    keys, scale = make_keys(), (1 / np.sqrt(CHANNELS)).astype("f4")
    codec = make_codec(name, DIM).fit(mx.array((keys - keys.mean(axis=2, keepdims=True)) * scale[:, :, None]))
    blocks = [mx.array(keys[:, :, None, i : i + MEAN_TOKENS]) for i in range(0, TOKENS, MEAN_TOKENS)]
    means = [compute_block_means(block, mx.array(scale), codec.rotation).means for block in blocks]
    return codec, keys, KeyNormalization(mx.array(scale), mx.concatenate(means, axis=2))


@pytest.mark.parametrize("name", FORMATS)
def test_encoded_keys_are_scaled_and_centered(name):
    codec, keys, normalization = make_case(name)
    x = normalize(mx.array(keys), normalization, codec.rotation)
    blocks = np.split(keys.astype(np.float64), [MEAN_TOKENS], axis=2)
    mean = np.concatenate([np.broadcast_to(b.mean(axis=2, keepdims=True), b.shape) for b in blocks], axis=2)
    scale = 1 / np.sqrt(CHANNELS.astype(np.float64))[:, :, None]
    rounding = 2.0**-11 * np.linalg.norm(scale * mean, axis=-1).max()  # of a mean in fp16
    assert np.linalg.norm(np.array(x) - scale * (keys - mean), axis=-1).max() <= rounding
    slack = 1e-4 * np.linalg.norm(scale * keys, axis=-1)
    restored = np.array(denormalize(x, normalization, codec.rotation), np.float64)
    assert np.all(np.linalg.norm(scale * (restored - keys), axis=-1) <= slack)
    decoded = np.array(decode_keys(codec, codec.encode(x), normalization), np.float64)
    error = np.linalg.norm(scale * (decoded - keys), axis=-1)
    allowed = np.linalg.norm(np.array(codec.decode(codec.encode(x)) - x), axis=-1)
    assert np.all(error <= 1.001 * allowed + slack)


@pytest.mark.parametrize("name", FORMATS)
def test_attention_and_prefill(name):
    """They equal mlx's own attention over the decoded cache, in every format and with the rotation of each head."""
    codec, keys, normalization = make_case(name)
    layout, values = RowLayout(codec, make_codec("tq4", DIM)), mx.array(gaussian(SHAPE, 3))
    rows = encode(mx.array(keys), values, layout, normalization).rows
    full = mx.array(make_keys(9)[:, :, :20]), values[:, :, :20]
    regions = Regions(rows, TOKENS, layout, *full, 7, 20, normalization)
    for run, length in ((attend, 2), (prefill, 13)):
        queries = mx.array(gaussian((2, 4, length, DIM), 11))
        options = {"scale": 0.02, "mask": "causal"}
        expected = mx.fast.scaled_dot_product_attention(queries, *regions.decode(), **options)
        assert mx.allclose(run(queries, regions, **options), expected, rtol=1e-3, atol=1e-3)


def test_blocks_are_encoded_one_by_one_as_together():
    codec, keys, normalization = make_case("tq4")
    layout, values = RowLayout(codec, make_codec("tq4", DIM)), mx.array(gaussian(SHAPE, 3))
    whole = encode(mx.array(keys), values, layout, normalization)
    indexed = KeyNormalization(normalization.scale, normalization.means, normalization.mean_index(TOKENS))
    for start in range(0, TOKENS, 32):
        part = mx.array(keys[:, :, start : start + 32]), values[:, :, start : start + 32]
        for source in (normalization, indexed):
            rows = encode(*part, layout, source.after(start)).rows
            assert mx.array_equal(rows, whole.rows[:, :, start : start + 32])


@pytest.mark.parametrize("pairs", [None, [(2 * f, 2 * f + 1) for f in range(16)], []])
def test_key_scale(pairs):
    rng = np.random.default_rng(2)
    keys, queries = rng.gamma(0.3, size=(2, 3, 64)) ** 2 + 1e-9, rng.gamma(0.3, size=(2, 6, 64))
    scale = compute_key_scale(mx.array(keys, mx.float32), mx.array(queries, mx.float32), pairs)
    pairs = [(f, f + 32) for f in range(32)] if pairs is None else pairs
    for b, h in np.ndindex(2, 3):
        statistics = []
        for rms in (np.sqrt((queries[b, 2 * h : 2 * h + 2] ** 2).mean(axis=0)), keys[b, h]):
            averaged = rms.copy()
            for pair in pairs:
                averaged[list(pair)] = np.sqrt((rms[list(pair)] ** 2).mean())
            statistics.append(np.maximum(averaged, 0.01 * np.sqrt((averaged**2).mean())))
        assert np.allclose(np.array(scale[b, h]), np.sqrt(statistics[0] / statistics[1]), rtol=1e-4)
        for first, second in pairs:
            assert scale[b, h, first] == scale[b, h, second], "so it commutes with RoPE"


@pytest.mark.parametrize("broken", [0.0, np.nan, np.inf])
def test_heads_without_statistics_have_a_scale_of_1(broken):
    keys, queries = np.ones((1, 3, 64), "f4"), np.full((1, 3, 64), 2, "f4")
    keys[0, 0], queries[0, 1], keys[0, 2, :32] = broken, broken, 0.5
    scale = np.array(compute_key_scale(mx.array(keys), mx.array(queries), []))
    assert np.array_equal(scale[0, :2], np.ones((2, 64)))
    assert np.allclose(scale[0, 2], np.repeat([2, np.sqrt(2)], 32))


def test_means_beyond_fp16_are_clamped():
    keys = mx.zeros((1, 1, 3, 32, 64)) + mx.array([1.0, 1e6, mx.nan])[:, None, None]
    means, clamped = compute_block_means(keys, mx.ones((1, 1, 64)), None)
    assert [means[0, 0, i, 0].item() for i in range(3)] == [1.0, FP16_MAX, 0.0]
    assert clamped.item() == 1
    layout = RowLayout(make_codec("tq4", 64), make_codec("tq4", 64))
    x = mx.zeros((1, 1, 32, 64))
    x[..., 5, 3], x[..., 6, 3] = mx.nan, 2e5
    rows = layout.encode(x, x * 0, KeyNormalization(mx.ones((1, 1, 64)), means, mx.zeros(32, mx.int32)))
    assert rows.health.tolist() == [1, 1 + 1], "one key is clamped; one is not finite, nor is its value"


@pytest.mark.parametrize("asked", ["some", *(pytest.param(x, marks=pytest.mark.full) for x in ("all", "one"))])
@pytest.mark.parametrize("name", adversarial.FORMATS)
@pytest.mark.parametrize("kind", adversarial.KEYS)
def test_adversarial_keys_are_no_worse_than_plain(kind, name, asked):
    """Or no worse than Gaussian ones: levels that happen to be the spikes of plain keys store those exactly."""
    plain, normalized = adversarial.errors(kind, name, asked)
    assert normalized <= max(1.05 * plain, np.sqrt(get_format(name).error) if "+-1000" in kind else 1e-5)
