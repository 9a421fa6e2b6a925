"""Keys of two formats where tokens leave: what is scored is what attention reads, and bytes stay in their bounds."""

import mlx.core as mx
import numpy as np
import pytest
from zoo import build

from mlx_tq.cache.spec import CacheSpec
from mlx_tq.config import EvictConfig, KVConfig
from mlx_tq.policies.policy import PackedLayer
from mlx_tq.prompt_cache.build import build_caches
from mlx_tq.prompt_cache.compressed import compressed_attention, plan_caches
from mlx_tq.prompt_cache.layer_bytes import Evicted, layer_bytes
from mlx_tq.prompt_cache.layer_group import compressed_caches, layer_group_of

from .tools import contents, feed, filled, make_cache, make_spec, random_pair

KEYS, VALUES = random_pair(500)
MODEL = build("llama", mx.float32)


def scored_and_read(cache):
    """Keys and values of the body as policies decode them, and as attention does."""
    layer = PackedLayer(*cache.packed_rows())
    layer = layer.slice_rows(0, cache.packed_tokens)
    keys = layer.keys(), layer.layout.value.decode(layer.layout.values(layer.rows))
    start = cache.spec.sinks
    read = (handle.materialize()[:, :, start : start + cache.packed_tokens] for handle in cache.keys_and_values())
    return [(np.array(a, np.float32), np.array(b, np.float32)) for a, b in zip(keys, read, strict=True)]


@pytest.mark.parametrize("key", ["tq4~tq2", "q8~spectral8", "fp16~q8_0", "tq35~tq3"])
@pytest.mark.parametrize("normalize", [False, True], ids=["plain", "normalized"])
def test_policies_score_the_keys_that_attention_reads(key, normalize):
    """Before anything left, after, and when more went cold since."""
    cache = make_cache(key, "tq4", recent=64, normalize=normalize)
    rng = np.random.default_rng(1)
    for count in (190, 110, 90, 47):
        feed(cache, KEYS, VALUES, [count])
        for scored, read in scored_and_read(cache):
            assert np.abs(scored - read).max() <= 2e-3 * np.abs(read).max()  # fp16 beside fp32
        kept = np.sort(rng.choice(cache.packed_tokens, cache.packed_tokens // 2, replace=False))
        positions = cache.packed_positions[kept]
        before = [read[:, :, kept] for _, read in scored_and_read(cache)]
        mx.eval(cache.compact(kept, positions))
        assert cache.packed_positions.tolist() == positions.tolist()
        after = [read for _, read in scored_and_read(cache)]
        for a, b in zip(after, before, strict=True):  # a BLAS may sum otherwise for another number of rows: an ulp
            assert np.abs(a - b).max() <= 2**-10 * np.abs(b).max()


@pytest.mark.parametrize("normalize", [False, True], ids=["plain", "normalized"])
@pytest.mark.parametrize("length", [230, 260, 291])
def test_a_trim_of_a_block_leads_back_to_recent_keys(length, normalize):
    """To the bits of a cache that never was longer, and so does what is read then."""
    spec = make_spec("q8~tq2", "tq4", recent=64, normalize=normalize)
    longer, never = (filled(spec, KEYS, VALUES, [200, count - 200]) for count in (length + 32, length))
    assert longer.num_evictable == never.num_evictable + 32
    assert longer.trim(32) == 32
    for _ in range(2):
        assert longer.num_evictable == never.num_evictable
        for a, b in zip(contents(longer), contents(never), strict=True):
            assert mx.array_equal(a, b)
        for cache in (longer, never):
            feed(cache, KEYS, VALUES, [40])


@pytest.mark.full
@pytest.mark.parametrize(
    "policy", ["knorm:trigger=16:granularity=1", "triattention:warmup=64:trigger=16:calibration=text:granularity=1"]
)
@pytest.mark.parametrize("recall", ["off", "auto"])
def test_a_model_evicts_within_its_forecast_from_both_tiers_or_what_comes_back_from_the_second(policy, recall):
    config = KVConfig("q8~tq2", "tq4", sinks=4, window=24, recent=32, evict=EvictConfig(policy, 120, recall))
    plan = plan_caches(MODEL, config)
    caches = build_caches(plan)
    with compressed_attention(MODEL):
        for start in range(0, 480, 24):
            ids = [(7 * i * i + 3) % 160 for i in range(start, start + 24)]
            mx.eval(MODEL(mx.array([ids]), cache=caches))
            layers = compressed_caches(caches)
            left = Evicted(start + 24, 1)
            slot, spec = plan.layers[0].slot, layers[0].spec
            most = layer_bytes(slot, spec, layers[0].size(), left if layers[0].regions.evicted else None)
            assert layers[0].nbytes <= most.allocated
    assert layer_group_of(caches).stats.rounds > 3
    assert layers[0].size() <= 120 + 16 + 24
    gone = np.setdiff1d(np.arange(480), layers[0].positions)
    assert gone.min() < 100
    assert (gone.max() > 400) == (recall == "off")
    assert 360 < gone.max() < 456 - 24  # the last round came before the last pass


def test_the_smaller_format_fills_a_budget_in_bytes():
    """A token of two formats takes no more than one of the larger, so that no fewer stay."""
    tokens = []
    for key in ("q8", "q8~tq2"):
        evict = EvictConfig("knorm:trigger=16:granularity=1", "2MB")
        tokens.append(plan_caches(MODEL, KVConfig(key, "tq4", sinks=4, window=24, recent=32, evict=evict)))
    one, two = (plan.eviction.budget.tokens for plan in tokens)
    assert one < two
    assert CacheSpec.for_layer(tokens[1].config, 0, "q8~tq2", "tq4").cold == "tq2"
