"""Evicted tokens are as if masked: logits on evicting caches against full attention in which they are invisible."""

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import cache as native
from zoo import build

from contract import spies
from contract.spies import rounds_of
from contract.test_architectures import difference
from mlx_tq.cache.layer import CompressedKVCache
from mlx_tq.config import EvictConfig, KVConfig
from mlx_tq.errors import ConfigError
from mlx_tq.prompt_cache.build import build_caches
from mlx_tq.prompt_cache.compressed import compressed_attention, plan_caches
from mlx_tq.prompt_cache.layer_group import compressed_caches, layer_group_of

# A bias on queries, a hybrid of linear attention with partial RoPE, sinks and YaRN, sliding layers, interleaved pairs,
# caches in a list, Llama-3's RoPE, layers without RoPE.
NAMED = ["qwen2", "qwen3_next", "gpt_oss", "gemma3_text", "glm4", "falcon_h1", "llama3_rope", "smollm3"]
SIMILAR = ("glm4", "llama3_rope", "smollm3", "falcon_h1")  # to qwen2 or qwen3_next
CHUNKS = [70, 33, 40, 1, 1, 5, 1, 8, 64, 1, 40, 1, 1]
TOKENS = np.random.default_rng(5).integers(0, 160, sum(CHUNKS)).tolist()
EVICT = EvictConfig("triattention:warmup=64:trigger=8:granularity=1", budget=80)


def config(key="fp16", value="fp16", evict=EVICT, **changes):
    return KVConfig(**{"key": key, "value": value, "sinks": 4, "window": 24, "evict": evict, **changes})


def run(model, caches, chunks=CHUNKS, **options):
    return spies.run(model, caches, TOKENS, chunks, **options)


class Masked:
    """Hides positions from the masks of a cache."""

    hidden = frozenset()

    def make_mask(self, N, return_array=False, window_size=None):
        assert window_size is None
        columns = np.arange(self.offset + N)
        mask = columns[None] <= np.arange(self.offset, self.offset + N)[:, None]
        return mx.array(mask & ~np.isin(columns, list(type(self).hidden)))


def hide_as_evicted(model, caches, kind, make):
    """Run on evicting caches, then on full ones that hide what was evicted when it was; returns both logits."""
    with rounds_of(model) as rounds, compressed_attention(model):
        logits = run(model, caches)
    hidden = type("MaskedCache", (Masked, kind), {})

    def before(start):
        hidden.hidden = frozenset(p for at, positions in rounds if at <= start for p in positions)

    with compressed_attention(model):
        return logits, run(model, make(hidden), before=before), rounds


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.full] * (name in SIMILAR)) for name in NAMED])
def test_evicted_is_masked(name):
    """Over the model's own caches; fp16 bodies lose nothing, so only the order of float32 sums differs."""
    model = build(name)

    def make(hidden):
        def swap(cache):
            return hidden() if type(cache) is native.KVCache else cache

        return [
            native.CacheList(*map(swap, cache.caches)) if isinstance(cache, native.CacheList) else swap(cache)
            for cache in native.make_prompt_cache(model)
        ]

    caches = build_caches(plan_caches(model, config()))
    logits, reference, rounds = hide_as_evicted(model, caches, native.KVCache, make)
    plain = run(model, native.make_prompt_cache(model))
    assert difference(logits, reference) < 1e-3
    assert difference(plain, reference) > 0.02  # eviction is felt, or nothing was tested
    assert len(rounds) > 4
    check_positions(caches, rounds)


@pytest.mark.parametrize("name", ["qwen2", "qwen3_next"])
@pytest.mark.parametrize(("key", "value"), [("q8", "tq4"), ("tq3", "q8")])
def test_evicted_is_masked_when_packed(name, key, value):
    """Over compressed caches that keep everything."""
    model = build(name)

    def make(hidden):
        plan = plan_caches(model, config(key, value, evict=None))
        made = build_caches(plan)
        return [hidden(cache.spec) if isinstance(cache, CompressedKVCache) else cache for cache in made]

    caches = build_caches(plan_caches(model, config(key, value)))
    logits, reference, rounds = hide_as_evicted(model, caches, CompressedKVCache, make)
    assert difference(logits, reference) < 2e-3
    check_positions(caches, rounds)


def check_positions(caches, rounds):
    """Live positions are the set difference, the same in every layer, and sinks and window never left."""
    gone = [p for _, positions in rounds for p in positions]
    assert len(set(gone)) == len(gone)
    for at, positions in rounds:
        assert positions == sorted(positions)
        assert positions[0] >= 4
        assert positions[-1] < at - 24
    stats = layer_group_of(caches).stats
    assert (stats.tokens, stats.rounds) == (len(gone), len(rounds))
    for cache in compressed_caches(caches):
        live = sorted(set(range(len(TOKENS))) - set(gone))
        assert cache.positions.tolist() == live
        assert (cache.offset, cache.size()) == (len(TOKENS), len(live))
        assert cache.keys_and_values()[0].materialize().shape[2] == len(live)


@pytest.mark.parametrize("name", ["llama", "qwen3_next", "gemma3_text"])
def test_a_budget_above_the_length_changes_nothing(name):
    model = build(name)
    with compressed_attention(model):
        kept = run(model, build_caches(plan_caches(model, config("q8", "tq4", evict=None))))
        evict = EvictConfig("triattention:warmup=64", budget=len(TOKENS))
        evicting = build_caches(plan_caches(model, config("q8", "tq4", evict)))
        assert mx.array_equal(run(model, evicting), kept)
    assert layer_group_of(evicting).stats.rounds == 0


POLICIES = ["random", "recency", "streaming", "knorm", "expected_attention:warmup=64"]


@pytest.mark.parametrize("policy", [*POLICIES, "published:aggregation=v3:warmup=64"])
def test_every_policy_runs(policy):
    model = build("qwen3_next")
    with compressed_attention(model):
        caches = build_caches(
            plan_caches(model, config(evict=EvictConfig(f"{policy}:trigger=8:granularity=1", budget=80)))
        )
        run(model, caches)
    (cache,) = compressed_caches(caches)
    assert cache.size() < 80 + 8 + 70
    if policy in ("recency", "streaming"):
        live = cache.positions.tolist()
        assert live == [*range(4), *range(live[4], len(TOKENS))]


def test_nothing_leaves_before_the_calibration_ended():
    model = build("llama")
    evict = EvictConfig("triattention:warmup=150:trigger=8:granularity=1", budget=80)
    with rounds_of(model) as rounds, compressed_attention(model):
        caches = build_caches(plan_caches(model, config(evict=evict)))
        run(model, caches)
    assert 150 + 4 <= rounds[0][0] < 150 + 4 + 70


def test_the_last_position():
    model = build("llama")
    model.args.max_position_embeddings = 150
    with compressed_attention(model):
        caches = build_caches(plan_caches(model, config()))
        run(model, caches, [70, 33, 40])
        mx.eval(model(mx.array([TOKENS[:7]]), cache=caches))
        with pytest.raises(ConfigError, match=r"has 150 tokens and 1 more would exceed the model's 150 positions"):
            model(mx.array([[1]]), cache=caches)
