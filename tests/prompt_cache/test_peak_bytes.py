"""`Plan.cache_peak_nbytes` bounds what caches take at every length: while they grow, evict, recall and share."""

import copy
from itertools import accumulate

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlx_tq.cache.spec import CacheSpec
from mlx_tq.config import PROFILES, EvictConfig, KVConfig
from mlx_tq.integration.probe import SlotFacts
from mlx_tq.prompt_cache.build import build_caches
from mlx_tq.prompt_cache.compressed import compressed_attention, plan_caches
from mlx_tq.prompt_cache.layer_group import EvictionPlan, begin_pass, layer_group_of
from mlx_tq.prompt_cache.plan import LayerPlan, Plan, budget_in_tokens
from mlx_tq.prompt_cache.recall import positions_of
from prompt_cache.driving import MODEL, config, read

DIM = 64
PAIRS = tuple((i, i + DIM // 2) for i in range(DIM // 2))
TOKENS = mx.random.normal((1, 1, 1000, DIM), mx.float16, key=mx.random.key(1))


def plan_of(kv_config):
    """The plan of a single layer with one head."""
    slot = SlotFacts(0, None, 1, DIM, DIM, "float16", 1.0, shared=False)
    layer = LayerPlan(slot, CacheSpec.for_layer(kv_config, 0, kv_config.key, kv_config.value, pairs=PAIRS), "")
    plan = Plan("", kv_config, [""], [layer], lambda: [None])
    if kv_config.evict is None:
        return plan
    budget = budget_in_tokens(plan, kv_config.evict)
    return Plan("", kv_config, [""], [layer], lambda: [None], EvictionPlan(kv_config.evict, budget, 1))


def run_pass(caches, start, count):
    tokens = TOKENS[:, :, start : start + count]
    begin_pass(caches, count)
    view = caches[0].append(tokens, tokens)
    view.notify(tokens, 1.0, None)
    mx.eval(caches[0].state)


@st.composite
def configs(draw):
    sizes = {"sinks": draw(st.sampled_from([0, 1, 5, 40])), "window": draw(st.sampled_from([0, 1, 24, 50]))}
    key, value = draw(st.sampled_from(["tq4", "q8", "fp16", "q8~tq2"])), draw(st.sampled_from(["tq4", "q8"]))
    plain = KVConfig(key=key, value=value, **sizes, recent=64, normalize=draw(st.booleans()))
    if not draw(st.booleans()):
        return plain
    policy = f"{draw(st.sampled_from(['random', 'knorm', 'recency']))}:trigger={draw(st.integers(1, 40))}"
    policy += f":granularity={draw(st.sampled_from([1, 8, 32, 64]))}"
    recall = draw(st.sampled_from(["off", "auto", 50]))
    least = sizes["sinks"] + sizes["window"] + 1 + (96 if "~" in key else 0)
    budget = draw(st.one_of(st.integers(least, 300), st.sampled_from(["5%", "50%"])))
    return KVConfig(**{**vars(plain), "evict": EvictConfig(policy, budget, recall)})


STEPS = st.lists(st.one_of(st.integers(1, 12), st.integers(60, 250)), min_size=6, max_size=14)


@pytest.mark.full
@pytest.mark.parametrize("count", [50, pytest.param(150, marks=pytest.mark.full)])
def test_no_length_takes_more(count):
    cases = given(kv_config=configs(), steps=STEPS, seed=st.integers(0, 99), forked=st.integers(0, 9))
    slow = [HealthCheck.too_slow]
    settings(max_examples=count, deadline=None, derandomize=True, suppress_health_check=slow)(cases(check_peak))()


def check_peak(kv_config, steps, seed, forked):
    plan = plan_of(kv_config)
    caches, rng = build_caches(plan), np.random.default_rng(seed)
    original, reserved = [], 0
    for number, (count, stop) in enumerate(zip(steps, accumulate(steps), strict=True)):
        if stop > TOKENS.shape[2]:
            break
        if number == forked:  # a copy takes as much again, less the rows that it shares while nothing is evicted
            saved = sum(nbytes for _, nbytes in caches[0].shareable_buffers()) if kv_config.evict is None else 0
            original, reserved = caches, plan.cache_peak_nbytes(stop - count, max(steps)) - saved
            caches = copy.deepcopy(caches)
        run_pass(caches, stop - count, count)
        group = layer_group_of(caches)
        if group is not None and plan.recalls:
            room, blocks = plan.eviction.max_recalled(stop), []
            for block in rng.permutation(np.array(group.archived, object)):
                if len(positions_of([*blocks, block])) <= room:
                    blocks.append(block)
            group.replace_recalled(caches, blocks)
        arrays = {id(array): array.nbytes for cache in (*caches, *original) for array in cache.arrays()}
        assert sum(arrays.values()) <= reserved + plan.cache_peak_nbytes(stop, max(steps)), (stop, plan.live(stop))
    if kv_config.evict is None:
        assert max(plan.nbytes(n) for n in range(1, sum(steps) + 1)) == plan.cache_peak_nbytes(sum(steps))


@pytest.mark.parametrize("name", ["small", "balanced"])
def test_the_peak_of_a_growing_cache_is_that_of_one_of_its_lengths(name):
    """Where the scale of keys is learned, a short cache has the queries of its tokens and is above longer ones."""
    plan = plan_of(PROFILES[name])
    peaks = list(accumulate((plan.nbytes(tokens) for tokens in range(1, 1200)), max))
    assert peaks[254] > plan.nbytes(255)
    assert [plan.cache_peak_nbytes(tokens) for tokens in range(1, 1200)] == peaks


def test_layers_of_a_plan_add_up_and_a_cache_without_window_keeps_its_last_token():
    evict = EvictConfig("knorm:trigger=128:granularity=1", "1%")
    plan = plan_caches(MODEL, KVConfig(sinks=0, window=0, normalize=False, evict=evict))
    assert [plan.live(tokens) for tokens in (129, 130, 131)] == [129, 130, 130]
    assert sum(layer.allocated for layer in plan.layers_at(20_000)) == plan.nbytes(20_000)


def test_a_policy_that_calibrates_on_the_prompt_evicts_nothing_before():
    plan = plan_caches(MODEL, config("triattention:trigger=8:granularity=1:warmup=100"))
    caches = build_caches(plan)
    with compressed_attention(MODEL):
        for start in range(0, 140, 20):
            read(caches, start, start + 20)
            assert sum(cache.nbytes for cache in caches) <= plan.cache_peak_nbytes(start + 20, 20)
    assert plan.live(103) == 103 > plan.live(104)
