"""`memory_report` against the bytes of caches that were really filled."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

import mlx_tq
from mlx_tq.cache import CompressedKVCache
from mlx_tq.cache.spec import CacheSpec
from mlx_tq.config import PROFILES, EvictConfig, KVConfig
from mlx_tq.errors import ConfigError
from mlx_tq.memory import memory_report

LENGTHS = (1, 31, 127, 128, 129, 256, 287, 288, 289, 319, 320, 321, 600, 1000)
CONFIGS = {
    "balanced": PROFILES["balanced"],
    "small": PROFILES["small"],
    "no prefix": KVConfig(key="tq3", value="tq2", prefix=0, window=64),
    "odd prefix": KVConfig(key="tq4", value="q8", prefix=5, window=40),
    "nothing kept": KVConfig(key="q8", value="tq4", prefix=0, window=0),
    "half": KVConfig(key="fp16", value="tq4"),
    "wide scale": KVConfig(key="tq4", value="tq4", wide_scale=True),
    "blocks": KVConfig(key="q8_0", value="tq3_0", prefix=32),
    "odd rows": KVConfig(key="tq3", value="q8", prefix=32),
}


def filled(config: KVConfig, tokens: int, heads: int, dim: int, chunk: int = 100) -> CompressedKVCache:
    cache = CompressedKVCache(CacheSpec.for_layer(config, 0, config.key, config.value))
    rng = np.random.default_rng(0)
    for start in range(0, tokens, chunk):
        shape = (1, heads, min(chunk, tokens - start), dim)
        cache.append(*(mx.array(rng.standard_normal(shape)).astype(mx.float16) for _ in range(2)))
    return cache


def regions(cache: CompressedKVCache, prefix: int) -> tuple[int, int, int]:
    """Bytes of body, prefix and the rest, from the arrays of stored tokens."""
    keys, values, rows, *_ = cache.state
    return (
        0 if rows is None else rows.nbytes,
        keys[:, :, :prefix].nbytes + values[:, :, :prefix].nbytes,
        keys[:, :, prefix:].nbytes + values[:, :, prefix:].nbytes,
    )


@pytest.mark.parametrize("tokens", LENGTHS)
@pytest.mark.parametrize("name", CONFIGS)
def test_report_equals_the_arrays(name, tokens):
    config = CONFIGS[name]
    heads, dim, layers = 2, 48 if name == "odd rows" else 64, 3
    report = memory_report(tokens, layers, heads, dim, config)
    body, prefix, window = regions(filled(config, tokens, heads, dim), config.prefix)
    assert (report.body, report.prefix, report.window) == (layers * body, layers * prefix, layers * window)
    assert report.total == layers * (body + prefix + window)
    assert report.fp16 == layers * tokens * heads * 2 * dim * 2
    assert report.ratio == pytest.approx(report.fp16 / report.total)


def test_cache_holds_little_more_than_the_report():
    """Spare capacity: at most a step of rows, the slack of the full buffers, and the two counters."""
    config = PROFILES["balanced"]
    cache, report = filled(config, 1000, 2, 64), memory_report(1000, 1, 2, 64, config)
    spare = 2 * (256 * (66 + 34) + 96 * 2 * 2 * 64) + 8
    assert report.total <= cache.nbytes <= report.total + spare


@pytest.mark.parametrize(
    ("config", "per_token"), [(PROFILES["small"], 132), (PROFILES["balanced"], 196), (PROFILES["safe"], 260)]
)
def test_bytes_per_token_at_128(config, per_token):
    """Between two long contexts the growth is that of the body alone, far below fp16's 512."""
    reports = [memory_report(tokens, 1, 1, 128, config) for tokens in (4096, 16384)]
    assert (reports[1].total - reports[0].total) / (16384 - 4096) == per_token
    assert (reports[1].fp16 - reports[0].fp16) / (16384 - 4096) == 512
    assert memory_report(2**24, 1, 1, 128, config).ratio == pytest.approx(512 / per_token, rel=1e-3)


@pytest.mark.parametrize("budget", [1000, "25%", "1MB"])
def test_eviction_bounds_the_report(budget):
    """A full cache of as many tokens as stay; of a budget in bytes, no more bytes at any length."""
    evict = EvictConfig(policy="knorm", budget=budget, trigger=64)
    config = replace(PROFILES["balanced"], evict=evict)
    for tokens in (300, 5000, 100_000):
        report = memory_report(tokens, 3, 2, 64, config)
        kept = {1000: 1000, "25%": max(tokens // 4, 129)}.get(budget)
        if kept is None:
            assert report.total <= 1_000_000
        else:
            full = memory_report(min(tokens, kept + 64), 3, 2, 64, PROFILES["balanced"])
            assert (report.body, report.prefix, report.window) == (full.body, full.prefix, full.window)
        assert report.fp16 == tokens * 3 * 2 * 2 * 64 * 2
    if budget == "1MB":
        assert report.total > 600_000  # and the budget is used
        with pytest.raises(ConfigError, match="a budget of 1,000 bytes is below"):
            memory_report(5000, 3, 2, 64, replace(config, evict=EvictConfig(budget="1KB")))


def test_off_is_fp16():
    report = memory_report(1000, 4, 2, 64, PROFILES["off"])
    assert report.total == report.window == report.fp16 == 1000 * 4 * 2 * 2 * 64 * 2
    assert (report.body, report.prefix, report.ratio) == (0, 0, 1.0)


def test_ratio_of_short_contexts_is_one():
    """What is still in the model's type costs what it costs."""
    assert memory_report(256, 1, 1, 128).ratio == 1


def test_default_is_the_default_profile():
    assert memory_report(5000, 2, 2, 64) == memory_report(5000, 2, 2, 64, KVConfig())
    assert mlx_tq.memory_report is memory_report


@pytest.mark.parametrize("name", ["seq_len", "num_layers", "num_kv_heads"])
@pytest.mark.parametrize("size", [0, -1])
def test_sizes_below_one(name, size):
    sizes = {"seq_len": 1, "num_layers": 1, "num_kv_heads": 1, "head_dim": 64, name: size}
    with pytest.raises(ConfigError, match=rf"{name} is {size}; it must be 1 or more\."):
        memory_report(**sizes)


@pytest.mark.parametrize("dim", [0, 72, 100])
def test_head_dim_that_cannot_be_stored(dim):
    with pytest.raises(ConfigError, match=f"head_dim {dim} "):
        memory_report(100, 1, 1, dim)


@pytest.mark.parametrize("head_dim", [0, -64, 40])
@pytest.mark.parametrize("name", ["off", "balanced"])
def test_head_dims_that_no_cache_has(name, head_dim):
    with pytest.raises(ConfigError, match=f"head_dim {head_dim} cannot be stored"):
        memory_report(1000, 2, 2, head_dim, PROFILES[name])
