"""Evicted tokens are as if masked: logits on evicting caches against full attention in which they are invisible."""

import copy

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import cache as native
from zoo import build

from contract.test_logits import difference
from mlx_tq.cache import CompressedKVCache
from mlx_tq.cache.factory import build_caches, compressed_caches
from mlx_tq.config import BLOCK, EvictConfig, KVConfig
from mlx_tq.dispatch import attention, plan_caches

# A bias on queries, a hybrid of linear attention with partial RoPE, sinks and YaRN, sliding layers, interleaved pairs,
# caches in a list, Llama-3's RoPE, layers without RoPE.
NAMED = ["qwen2", "qwen3_next", "gpt_oss", "gemma3_text", "glm4", "falcon_h1", "llama3_rope", "smollm3"]
CHUNKS = [70, 33, 40, 1, 1, 5, 1, 8, 64, 1, 40, 1, 1]
TOKENS = np.random.default_rng(5).integers(0, 160, sum(CHUNKS)).tolist()
EVICT = EvictConfig(budget=80, warmup=64, trigger=8)


def config(key="fp16", value="fp16", evict=EVICT, **changes):
    return KVConfig(**{"key": key, "value": value, "prefix": 4, "window": 24, "evict": evict, **changes})


def run(model, caches, chunks=CHUNKS, before=lambda: None):
    start, logits = 0, []
    for chunk in chunks:
        before()
        logits.append(model(mx.array([TOKENS[start : start + chunk]]), cache=caches))
        mx.eval(logits)
        start += chunk
    return mx.concatenate(logits, axis=1).astype(mx.float32)


class Masked:
    """Hides positions from the masks of a cache."""

    hidden = frozenset()

    def make_mask(self, N, return_array=False, window_size=None):
        assert window_size is None
        columns = np.arange(self.offset + N)
        mask = columns[None] <= np.arange(self.offset, self.offset + N)[:, None]
        return mx.array(mask & ~np.isin(columns, list(type(self).hidden)))


def masked(kind):
    return type("MaskedCache", (Masked, kind), {})


def hide_as_evicted(model, caches, kind, make):
    """Run on evicting caches, then on full ones that hide what was evicted when it was; returns both logits."""
    first, offset = compressed_caches(caches)[0], []
    rounds = []
    first.subscribe(lambda positions: rounds.append((first.offset, positions.tolist())))
    logits = run(model, caches)
    hidden = masked(kind)
    full = make(hidden)
    length = [0]

    def before():
        gone = [p for at, positions in rounds if at <= length[0] for p in positions]
        hidden.hidden = frozenset(gone)
        length[0] += CHUNKS[len(offset)]
        offset.append(0)

    return logits, run(model, full, before=before), rounds


@pytest.mark.parametrize("name", NAMED)
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

    with attention(model):
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

    with attention(model):
        caches = build_caches(plan_caches(model, config(key, value)))
        logits, reference, rounds = hide_as_evicted(model, caches, CompressedKVCache, make)
    assert difference(logits, reference) < 2e-3
    check_positions(caches, rounds)


def check_positions(caches, rounds):
    """Live positions are the set difference, the same in every layer, and prefix and window never left."""
    gone = [p for _, positions in rounds for p in positions]
    assert len(set(gone)) == len(gone)
    for at, positions in rounds:
        assert positions == sorted(positions)
        assert positions[0] >= 4
        assert positions[-1] < at - 24
    for cache in compressed_caches(caches):
        live = sorted(set(range(len(TOKENS))) - set(gone))
        assert cache.positions.tolist() == live
        assert (cache.offset, cache.size()) == (len(TOKENS), len(live))
        assert cache.eviction.tokens == len(gone)
        assert cache.eviction.rounds == len(rounds)
        assert cache.keys_and_values()[0].materialize().shape[2] == len(live)


@pytest.mark.parametrize("name", ["llama", "qwen3_next", "gemma3_text"])
def test_a_budget_above_the_length_changes_nothing(name):
    model = build(name)
    with attention(model):
        kept = run(model, build_caches(plan_caches(model, config("q8", "tq4", evict=None))))
        evicting = build_caches(plan_caches(model, config("q8", "tq4", EvictConfig(budget=len(TOKENS), warmup=64))))
        assert mx.array_equal(run(model, evicting), kept)
    assert all(cache.eviction.rounds == 0 for cache in compressed_caches(evicting))


@pytest.mark.parametrize("policy", ["random", "recency", "streaming", "knorm"])
def test_policies_without_queries(policy):
    model = build("qwen3_next")
    with attention(model):
        caches = build_caches(plan_caches(model, config(evict=EvictConfig(policy=policy, budget=80, trigger=8))))
        run(model, caches)
    (cache,) = compressed_caches(caches)
    assert cache.size() < 80 + 8 + 70
    if policy in ("recency", "streaming"):
        live = cache.positions.tolist()
        assert live == [*range(4), *range(live[4], len(TOKENS))]


def test_nothing_leaves_before_the_calibration_ended():
    model = build("llama")
    evict = EvictConfig(budget=80, warmup=150, trigger=8)
    with attention(model):
        caches = build_caches(plan_caches(model, config(evict=evict)))
        rounds = []
        caches[0].subscribe(lambda positions: rounds.append(caches[0].offset))
        run(model, caches)
    assert 150 + 4 <= rounds[0] < 150 + 4 + 70


def test_copies_go_their_own_ways():
    """A deep copy, copies layer by layer, and one through the state: each evicts on, the original does not notice."""
    model = build("llama")
    with attention(model):
        caches = build_caches(plan_caches(model, config("q8", "tq4")))
        run(model, caches, CHUNKS[:5])
        before = [cache.positions.tolist() for cache in caches]
        twins = [
            copy.deepcopy(caches),
            [copy.deepcopy(cache) for cache in caches],
            [type(cache).from_state(cache.state) for cache in caches],
        ]
        rest = sum(CHUNKS[:5])

        def go_on(these):
            logits = [model(mx.array([TOKENS[s : s + 20]]), cache=these) for s in range(rest, len(TOKENS) - 20, 20)]
            mx.eval(logits)
            return mx.concatenate(logits, axis=1)

        results = [go_on(twin) for twin in twins]
        assert [cache.positions.tolist() for cache in caches] == before
        wanted = go_on(caches)
    for result, twin in zip(results, twins, strict=True):
        assert mx.array_equal(result, wanted)
        for ours, theirs in zip(compressed_caches(twin), compressed_caches(caches), strict=True):
            assert ours.eviction.rounds == theirs.eviction.rounds > 1
            assert np.array_equal(ours.positions, theirs.positions)


def test_rows_of_a_batch_evict_as_if_alone():
    model = build("qwen2")
    prompts = [TOKENS[:150], TOKENS[30:120], TOKENS[100:230]]
    plan_config = config("q8", "tq4")
    with attention(model):
        plan = plan_caches(model, plan_config)
        alone = []
        for prompt in prompts:
            caches = build_caches(plan)
            mx.eval(model(mx.array([prompt]), cache=caches))
            alone.append(caches)
        batch = [type(layers[0]).merge(list(layers)) for layers in zip(*alone, strict=True)]
        for token in range(60):
            step = mx.array([[TOKENS[token]], [TOKENS[token + 1]], [TOKENS[token + 2]]])
            together = model(step, cache=batch)
            single = [model(step[i : i + 1], cache=alone[i]) for i in range(3)]
            mx.eval(together, single)
            assert difference(together, mx.concatenate(single)) < 1e-3
    for i in range(3):
        for layer, cache in zip(batch, alone[i], strict=True):
            assert np.array_equal(layer.rows[i].positions, cache.positions)
            assert layer.rows[i].eviction.rounds == cache.eviction.rounds
        assert alone[i][0].eviction.rounds > 1
    extracted = [layer.extract(1) for layer in batch]
    with attention(model):
        for token in range(40):
            mx.eval(model(mx.array([[TOKENS[token]]]), cache=extracted))
    assert extracted[0].eviction.rounds > alone[1][0].eviction.rounds
    assert np.array_equal(extracted[0].positions, extracted[1].positions)


def test_a_padded_batch_calibrates_each_row_on_its_own_tokens():
    model = build("qwen2")
    prompts, evict = [TOKENS[:150], TOKENS[30:120]], EvictConfig(budget=60, warmup=64, trigger=8)
    with attention(model):
        plan = plan_caches(model, config(evict=evict))
        batch = [
            type(layers[0]).merge(list(layers)) for layers in zip(build_caches(plan), build_caches(plan), strict=True)
        ]
        for layer in batch:
            layer.prepare(lengths=[150, 90], right_padding=[0, 60])
        padded = mx.array([prompts[0], prompts[1] + [0] * 60])
        for start in range(0, 150, 50):
            mx.eval(model(padded[:, start : start + 50], cache=batch))
        for layer in batch:
            layer.finalize()
        single = []
        for prompt in prompts:
            caches = build_caches(plan)
            for start in range(0, len(prompt), 50):
                mx.eval(model(mx.array([prompt[start : start + 50]]), cache=caches))
            single.append(caches)
        for token in range(12):
            mx.eval(model(mx.array([[TOKENS[token]], [TOKENS[token]]]), cache=batch))
            for caches in single:
                mx.eval(model(mx.array([[TOKENS[token]]]), cache=caches))
    for i, caches in enumerate(single):
        assert np.array_equal(batch[0].rows[i].positions, caches[0].positions)
        assert caches[0].eviction.rounds > 0


@pytest.mark.parametrize("warmup", [64, 512], ids=["calibrated", "calibrating"])
def test_tokens_between_rounds_wait_for_nothing(warmup):
    """Also where a block is packed, a step only builds a graph; its token needs 8 MB, which would show."""
    heavy = 8 << 20
    model = build("llama")
    evict = EvictConfig(budget=80, warmup=warmup, trigger=64)

    def lazily():
        return (mx.random.uniform(shape=(heavy // 4,)).max() > 2).astype(mx.int32).reshape(1, 1)

    with attention(model):
        caches = build_caches(plan_caches(model, config("q8", "tq4", evict=evict)))
        run(model, caches, [70, 80, 1])
        rounds, packed = caches[0].eviction.rounds, caches[0].body_tokens
        assert rounds == (warmup == 64)
        mx.clear_cache()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        logits = [model(lazily(), cache=caches) for _ in range(BLOCK)]
        assert caches[0].body_tokens == packed + BLOCK
        assert caches[0].eviction.rounds == rounds
        assert mx.get_peak_memory() - before < heavy
        mx.eval(logits)
        assert mx.get_peak_memory() - before >= heavy, "so one evaluation would have been seen"
