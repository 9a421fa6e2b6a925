"""Forecasts of bytes are what caches really take: of plans, of batches, of reports and of statistics."""

from dataclasses import replace
from itertools import product

import mlx.core as mx
import pytest
from cache.tools import feed, random_pair
from mlx_lm.models import cache as native
from zoo import build

from mlx_tq.cache.layer import cache_parts
from mlx_tq.cache.region_map import RegionSizes
from mlx_tq.cache.spec import CacheSpec
from mlx_tq.config import PROFILES, EvictConfig, KVConfig
from mlx_tq.errors import ConfigError
from mlx_tq.integration.probe import SlotFacts
from mlx_tq.prompt_cache.build import build_caches, make_cache
from mlx_tq.prompt_cache.compressed import compressed_attention, make_prompt_cache, plan_caches
from mlx_tq.prompt_cache.layer_bytes import layer_bytes
from mlx_tq.prompt_cache.layer_group import compressed_caches, layer_group_of
from mlx_tq.prompt_cache.memory import memory_report, other_bytes, sequence_bytes
from mlx_tq.prompt_cache.recall import blocks_of_ranges, positions_of
from mlx_tq.prompt_cache.statistics import cache_stats, predict_stats, tokens_seen
from prompt_cache.driving import MODEL, config, fresh, read

SMALL = KVConfig(key="tq4", value="tq4", sinks=4, window=24)
TINY = KVConfig(key="q8", value="tq2", sinks=0, window=8)
LENGTHS = (1, 127, 129, 140, 170, 256, 288, 289, 320, 321, 600)
CONFIGS = {
    "balanced": PROFILES["balanced"],
    "no sinks": KVConfig(key="tq3", value="tq2", sinks=0, window=64),
    "odd sinks": KVConfig(key="tq4", value="q8", sinks=5, window=40),
    "nothing kept": KVConfig(key="q8", value="tq4", sinks=0, window=0),
    "half": KVConfig(key="fp16", value="tq4"),
    "wide scale": KVConfig(key="tq4", value="tq4", fp32_scales=True),
    "blocks": KVConfig(key="q8_0", value="tq3_0", sinks=32),
    "odd rows": KVConfig(key="tq3", value="q8", sinks=32),
    "two formats": KVConfig(key="tq4~spectral8", value="tq4", sinks=4, window=24, recent=256),
}


# Plans.


@pytest.mark.parametrize("name", ["gemma3_text", "qwen3_next", "falcon_h1", "deepseek_v2", "afm7", "minimax_m3_vl"])
def test_a_plan_says_what_its_caches_take(name):
    model = build(name)
    for sizes, lengths in ((SMALL, (1, 60, 400)), (TINY, (100,))):
        plan = plan_caches(model, sizes)
        for tokens in lengths:
            caches = build_caches(plan)
            with compressed_attention(model):
                mx.eval(model(mx.array([[i % 160 for i in range(tokens)]]), cache=caches))
            ours = compressed_caches(caches)
            plain = [part for part in cache_parts(caches) if type(part) is native.KVCache]
            assert len(plain) == len(plan.uncompressed) == (2 if name == "minimax_m3_vl" else 0)
            assert plan.nbytes(tokens) == sum(cache.nbytes for cache in (*ours, *plain))
            parts = [layer_bytes(layer.slot, layer.spec, tokens) for layer in plan.layers]
            rest = plan.uncompressed_nbytes(tokens)
            assert plan.nbytes(tokens) == rest + sum(part.allocated for part in parts)
    rows = [build_caches(plan) for _ in range(2)]
    if name == "deepseek_v2":  # a batch, and what the model's own caches would take
        batch = [layer[0].merge(list(layer)) for layer in zip(*rows, strict=True)]
        with compressed_attention(model):
            mx.eval(model(mx.zeros((2, 100), mx.int32), cache=batch))
        assert 2 * plan.nbytes(100) == sum(cache.nbytes for cache in batch)
        assert plan.native_nbytes(100) == 2 * 4 * 256 * (192 + 128) * 4  # of a float32 model


@pytest.mark.parametrize("name", ["safe", "balanced", "small"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_never_more_than_mlx_lms_own_and_64_tokens(name, dtype):
    """mlx-lm's buffers grow by 256 tokens."""
    config = PROFILES[name]
    slot = SlotFacts(0, None, 2, 64, 64, dtype, 1.0, shared=False)
    spec = CacheSpec.for_layer(config, 0, config.key, config.value)
    token = 2 * 2 * 64 * (2 if dtype == "float16" else 4)
    for tokens in range(1, 1500):
        assert layer_bytes(slot, spec, tokens).allocated <= token * (-(-tokens // 256) * 256 + 64), tokens


# Reports.


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("normalize", [False, True], ids=["plain", "normalized"])
def test_a_report_says_what_the_arrays_take(name, normalize):
    config = replace(CONFIGS[name], normalize=normalize)
    heads, dim, layers = 2, 48 if name == "odd rows" else 64, 3
    keys, values = random_pair(max(LENGTHS), dims=(dim, dim))
    slot = SlotFacts(0, None, heads, dim, dim, "float16", 1.0, shared=False)
    spec = CacheSpec.for_layer(config, 0, config.key, config.value)
    for tokens in LENGTHS:
        cache = make_cache(spec)
        feed(cache, keys[:, :, :tokens], values[:, :, :tokens], [100] * (tokens // 100 + 1))
        report = memory_report(tokens, layers, heads, dim, config)
        full = cache.state["keys"], cache.state["values"]
        sinks = sum(x[:, :, : config.sinks].nbytes for x in full)
        window = sum(x[:, :, config.sinks :].nbytes for x in full)
        found = (cache.packed_nbytes, sinks, window)
        assert (report.body, report.sinks, report.window) == tuple(layers * each for each in found)
        assert report.total == layers * sum(found)
        assert report.native == layers * -(-tokens // 256) * 256 * heads * 2 * dim * 2
        assert report.ratio == pytest.approx(report.native / report.allocated)
        assert report.allocated == layers * cache.nbytes
        assert cache.nbytes == layer_bytes(slot, spec, tokens).allocated
        assert cache.nbytes >= report.total / layers


def test_a_report_counts_boundary_layers_at_8_bits():
    small, safe = ([memory_report(5000, 1, 2, 64, PROFILES[name]).total] for name in ("small", "safe"))
    assert memory_report(5000, 3, 2, 64, replace(PROFILES["small"], boundary=1)).total == sum(2 * safe + small)


@pytest.mark.parametrize(
    ("config", "per_token"), [(KVConfig("tq4", "tq4"), 132), (PROFILES["balanced"], 196), (PROFILES["safe"], 260)]
)
@pytest.mark.parametrize("normalize", [False, True], ids=["plain", "normalized"])
def test_bytes_per_token_at_128(config, per_token, normalize):
    """Between two long contexts the growth is that of the body alone: fp16's is 512, a mean's 256 each 128 tokens."""
    config, per_token = replace(config, normalize=normalize), per_token + 2 * normalize
    reports = [memory_report(tokens, 1, 1, 128, config) for tokens in (4096, 16384)]
    assert (reports[1].total - reports[0].total) / (16384 - 4096) == per_token
    assert (reports[1].native - reports[0].native) / (16384 - 4096) == 512
    assert memory_report(2**24, 1, 1, 128, config).ratio == pytest.approx(512 / per_token, rel=1e-3)
    off = memory_report(1000, 4, 2, 64, PROFILES["off"])
    assert off.total == off.window == 1000 * 4 * 2 * 2 * 64 * 2
    assert off.allocated == off.native == 1024 * 4 * 2 * 2 * 64 * 2
    assert (off.body, off.sinks, off.ratio) == (0, 0, 1.0)
    assert memory_report(256, 1, 1, 128).ratio == pytest.approx(1, abs=0.005)  # nothing is packed
    assert memory_report(5000, 2, 2, 64) == memory_report(5000, 2, 2, 64, KVConfig())


@pytest.mark.parametrize("budget", [1000, "25%", "1MB"])
def test_eviction_bounds_the_report(budget):
    """A full cache of as many tokens as stay; of a budget in bytes, no more bytes at any length."""
    config = replace(PROFILES["balanced"], evict=EvictConfig("knorm:trigger=64:granularity=1", budget))
    for tokens in (300, 5000, 100_000):
        report = memory_report(tokens, 3, 2, 64, config)
        kept = {1000: 1000, "25%": max(tokens // 4, 129)}.get(budget)
        if kept is None:
            assert report.total <= 1_000_000
        else:
            in_full_precision = 128 + 128 + (tokens - 128) % 32  # which no round evicts
            stored = min(tokens, max(kept + 64, in_full_precision))
            full = memory_report(stored, 3, 2, 64, PROFILES["balanced"])
            assert (report.sinks, report.window) == (full.sinks, full.window)
            # At most, each block of 128 tokens seen has a mean for the rows that stayed, and each row its number.
            rows, blocks = (max(0, (n - 128) // 32 * 32 - 128) for n in (stored, tokens))
            means = min(rows, -(-blocks // 128)) - -(-rows // 128)
            assert report.body == full.body + (stored < tokens) * 3 * (2 * 64 * 2 * means + 4 * rows)
        assert report.native == -(-tokens // 256) * 256 * 3 * 2 * 2 * 64 * 2
    if budget == "1MB":
        assert report.total > 600_000  # and the budget is used
        with pytest.raises(ConfigError, match="a budget of 1,000 bytes is below"):
            memory_report(5000, 3, 2, 64, replace(config, evict=EvictConfig(budget="1KB")))


@pytest.mark.parametrize("name", ["seq_len", "num_layers", "num_kv_heads", "head_dim"])
def test_sizes_that_cannot_be(name):
    for size in (0, -1):
        sizes = {"seq_len": 1, "num_layers": 1, "num_kv_heads": 1, "head_dim": 64, name: size}
        with pytest.raises(ConfigError, match=rf"{name} (is )?{size}(; it must be 1 or more\.| cannot be stored)"):
            memory_report(**sizes)
    for profile in ("off", "balanced"):
        with pytest.raises(ConfigError, match="head_dim 72 cannot be stored"):
            memory_report(1000, 2, 2, 72, PROFILES[profile])


# Statistics.


def test_statistics_of_a_sequence():
    plan = plan_caches(MODEL, config())
    caches = build_caches(plan)
    with compressed_attention(MODEL):
        read(caches, 0, 130)
    stats, sequence = cache_stats(caches, plan), layer_group_of(caches)
    assert (stats.tokens, stats.evicted, stats.rounds) == (130, sequence.stats.tokens, sequence.stats.rounds)
    assert stats.evict_seconds == sequence.stats.seconds > 0
    assert stats.retention == len(caches[0].positions) / 130
    assert stats.nbytes == sum(cache.nbytes for cache in caches)
    assert stats.native_nbytes == 2 * 256 * 2 * 2 * 64 * 4  # of a float32 model, evicted tokens included
    assert (stats.native_dtype, stats.ratio) == ("float32", stats.native_nbytes / stats.nbytes)
    assert (stats.live, stats.archived, stats.dropped) == (130 - stats.evicted, 0, stats.evicted)
    assert tokens_seen(caches) == 130
    keeps = fresh(policy=None)
    assert cache_stats(keeps, None).ratio == cache_stats(keeps, None).retention == 1
    with compressed_attention(MODEL):
        read(keeps, 0, 60)
    stats = cache_stats(keeps, plan_caches(MODEL, config(None)))
    assert (stats.evicted, stats.rounds, stats.evict_seconds, stats.retention) == (0, 0, 0.0, 1)


@pytest.mark.parametrize("limit", [None, 20_000])
def test_tiers_of_a_plan_are_those_of_what_was_read(limit):
    """What the plan says beforehand holds: rows in memory, rows in the archive up to its limit, and the rest."""
    evict = EvictConfig("knorm:trigger=8", 60, recall="auto", archive_limit=limit)
    plan = plan_caches(MODEL, config(evict=evict))
    caches = build_caches(plan)
    with compressed_attention(MODEL):
        read(caches, 0, 390)
    planned, held = predict_stats(plan, 390), cache_stats(caches, plan)
    for stats in (planned, held):
        assert stats.live + stats.archived + stats.dropped == 390
        assert (stats.dropped > 0) == (limit is not None)
        assert stats.archived_nbytes <= (limit or 10**9)
    assert abs(planned.live - held.live) <= 40, "a step of 20 tokens came behind the last round"
    assert held.nbytes <= 1.1 * planned.nbytes
    assert planned.archived_nbytes / planned.archived == pytest.approx(held.archived_nbytes / held.archived, rel=0.1)


@pytest.mark.parametrize("way", ["dropped", "archived", "deleted", "recalled", "recalled and deleted", "trimmed"])
def test_each_token_is_in_one_place(way):
    """Live, archived or dropped, whatever was evicted, recalled, deleted for want of space, and trimmed."""
    recall, limit = ("off" if way == "dropped" else "auto"), (20_000 if "deleted" in way else None)
    plan = plan_caches(MODEL, config(evict=EvictConfig("knorm:trigger=8", 60, recall=recall, archive_limit=limit)))
    caches = build_caches(plan)
    with compressed_attention(MODEL):
        read(caches, 0, 300)
        group = layer_group_of(caches)
        if "recalled" in way:
            assert len(group.replace_recalled(caches, list(group.archived[:2]))) >= 32
        if way == "trimmed":
            native.trim_prompt_cache(caches, 90)
        read(caches, caches[0].offset, 380)
    stats, live = cache_stats(caches, plan), len(caches[0].positions)
    assert (stats.tokens, stats.live, stats.recalled) == (380, live, len(group.recalled))
    assert stats.live + stats.evicted == stats.tokens
    assert stats.archived + stats.dropped == stats.evicted > 0
    assert (stats.dropped > 0) == ("deleted" in way or way == "dropped")
    assert (stats.archived > 0) == (stats.archived_nbytes > 0) == (way != "dropped")
    assert (stats.recalled > 0) == ("recalled" in way)
    assert stats.to_dict()["dropped"] == stats.dropped


@pytest.mark.parametrize("recall", ["auto", 200, "off"])
def test_a_peak_has_what_may_be_back(recall):
    """Where memory is limited, rows that came back have their place."""
    plan = plan_caches(MODEL, config(evict=EvictConfig("knorm:trigger=8", 60, recall=recall)))
    caches = build_caches(plan)
    with compressed_attention(MODEL):
        read(caches, 0, 390)
    sequence, most = layer_group_of(caches), {"auto": 128, "off": 0}.get(recall, recall)
    back = blocks_of_ranges(sequence.archived, [(0, 390)], caches[0].positions, 400)
    while len(positions_of(back)) > most:
        back = back[1:]
    assert len(sequence.replace_recalled(caches, back)) > most - 32 if most else not back
    held, most_held = cache_stats(caches, plan).nbytes, plan.cache_peak_nbytes(390)
    assert (held > plan.nbytes(390)) == (most > 0) == (most_held > plan.nbytes(390))
    assert held <= most_held
    assert plan.cache_peak_nbytes(100) <= 1.01 * plan_caches(MODEL, config(None)).nbytes(100)


def test_statistics_of_mlx_lms_own_caches():
    """They are compared with nothing, and quantized ones with what they would be otherwise."""
    assert not cache_stats([native.KVCache()], None).is_comparable
    for dtype in (mx.float32, mx.float16):
        model = build("llama", dtype)
        caches = native.make_prompt_cache(model)
        mx.eval(model(mx.zeros((1, 250), mx.int32), cache=caches))
        plain = cache_stats(caches, None)
        assert (plain.native_nbytes, plain.is_comparable) == (plain.nbytes, False)
        assert plain.nbytes == 2 * 2 * 2 * 256 * 64 * dtype.size
        quantized = [cache.to_quantized(group_size=64, bits=8) for cache in caches]
        stats = cache_stats([*quantized, native.KVCache()], None)
        assert (stats.native_nbytes, stats.native_dtype) == (plain.nbytes, plain.native_dtype)
        assert stats.is_comparable
        assert stats.nbytes < 0.6 * stats.native_nbytes
    assert make_prompt_cache(model, PROFILES["off"])[0].empty()


NATIVE_LENGTHS = (1, 255, 256, 257, 600)


@pytest.mark.parametrize("evict", [None, EvictConfig("knorm:trigger=8", 60)], ids=["all tokens", "evicting"])
@pytest.mark.parametrize(
    "dtype", [mx.float32, pytest.param(mx.bfloat16, marks=pytest.mark.full)], ids=["float32", "bfloat16"]
)
@pytest.mark.parametrize(
    "name",
    ["llama", *(pytest.param(name, marks=pytest.mark.full) for name in ("gemma3_text", "minimax_m3_vl"))],
)
def test_the_cache_to_compare_with_is_mlx_lms_own(name, dtype, evict):
    """In the model's type, with the room that it allocates, for all tokens that were read."""
    if name == "minimax_m3_vl" and (evict is not None or dtype != mx.float32):
        pytest.skip("it cannot evict, and its experts need a GPU in other types")
    model = build(name, dtype)
    plan, others = plan_caches(model, replace(SMALL, evict=evict)), other_bytes(model)
    held = sequence_bytes(model, PROFILES["off"], others)
    for tokens in NATIVE_LENGTHS:
        own, ours = native.make_prompt_cache(model), build_caches(plan)
        with compressed_attention(model):
            for caches in (own, ours):
                mx.eval(model(mx.zeros((1, tokens), mx.int32), cache=caches))
                mx.eval(model(mx.zeros((1, 1), mx.int32), cache=caches))  # after a round of eviction
        stats, native_nbytes = cache_stats(ours, plan), sum(cache.nbytes for cache in own)
        assert stats.native_nbytes == native_nbytes == held(tokens + 1)
        assert stats.native_dtype == str(dtype).removeprefix("mlx.core.")
        is_packed = any(cache.packed_tokens for cache in compressed_caches(ours))
        assert stats.is_comparable == (is_packed or stats.evicted > 0)
        assert (stats.evicted > 0) == (evict is not None and tokens > 200)
        forecast = predict_stats(plan, tokens + 1)
        assert forecast.native_nbytes == native_nbytes - others(tokens + 1)
        assert forecast.is_comparable == stats.is_comparable


def test_compression_starts_where_the_first_block_is_packed():
    for sinks, window, normalize in product((0, 5, 32, 128), (1, 24, 128), (False, True)):
        sizes = RegionSizes(sinks=sinks, window=window, normalize=normalize)
        packed = [length for length in range(600) if sizes.packed_until(length) > sinks]
        assert sizes.first_packed == packed[0]
