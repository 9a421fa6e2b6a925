"""When a round of eviction begins and how much it evicts; positions that are held survive it."""

import mlx.core as mx
import pytest
from zoo import build

from mlx_tq.config import EvictConfig, KVConfig
from mlx_tq.policies.selection import PositionRange
from mlx_tq.prompt_cache.build import build_caches
from mlx_tq.prompt_cache.compressed import compressed_attention, plan_caches
from mlx_tq.prompt_cache.layer_group import begin_pass, layer_group_of

SINKS, WINDOW, LENGTH = 4, 24, 260
BUDGET, GRANULARITY = 128, 8
HELD = PositionRange(45, 190)  # more than the budget, and not whole blocks


def make_caches(model, policy, budget):
    evict = EvictConfig(policy, budget)
    return build_caches(plan_caches(model, KVConfig(key="q8", value="q8", sinks=SINKS, window=WINDOW, evict=evict)))


@pytest.mark.parametrize(("chunk", "trigger"), [(1, 33), (40, 1)])
@pytest.mark.parametrize("budget", [80, SINKS + WINDOW + 1, "50%", "80%"])
def test_a_round_begins_above_budget_and_trigger_and_evicts_the_excess(budget, trigger, chunk):
    caches = make_caches(build("llama"), f"random:trigger={trigger}:granularity=1", budget)
    live = rounds = 0
    for start in range(0, LENGTH - chunk + 1, chunk):
        allowed = max(int(float(budget.rstrip("%")) / 100 * start) if isinstance(budget, str) else budget, WINDOW + 1)
        if live > allowed + trigger:
            packed = caches[0].packed_positions
            evicted = min(live - allowed, int((packed < start - WINDOW).sum()))
            live -= evicted
            rounds += evicted > 0
        begin_pass(caches, chunk)
        for cache in caches:
            cache.append(*(mx.random.normal((1, 2, chunk, 64)) for _ in range(2)))
        live += chunk
        for cache in caches:
            assert (cache.offset, cache.size()) == (start + chunk, live)
        assert layer_group_of(caches).stats.rounds == rounds
    assert rounds > 0


def read(model, caches, count):
    for _ in range(count):
        mx.eval(model(mx.array([[7, 8, 9, 10]]), cache=caches))


def live_positions(caches):
    (positions,) = {tuple(map(int, cache.positions)) for cache in caches}  # the same in every layer
    return set(positions)


def test_held_positions_survive_until_they_are_released():
    """They also do in copies, which is how mlx-lm's batches take caches; positions that were not read hold nothing."""
    model = build("llama")
    held = set(range(*HELD))
    with compressed_attention(model):
        caches, plain, beyond = (
            make_caches(model, f"recency:trigger=8:granularity={GRANULARITY}", BUDGET) for _ in range(3)
        )
        layer_group_of(beyond).pinned = PositionRange(1000, 1100)
        for each in (plain, beyond):
            read(model, each, 60)
        assert live_positions(plain) == live_positions(beyond)
        layer_group_of(caches).pinned = HELD
        originals, caches = caches, [cache.fork() for cache in caches]
        for _ in range(24):
            read(model, caches, 5)
            seen = caches[0].offset
            assert held & set(range(seen)) <= live_positions(caches)
        assert layer_group_of(caches).stats.rounds > 3
        others = live_positions(caches) - held
        assert BUDGET - GRANULARITY <= len(others) <= BUDGET + 8 + 4 + 2 * GRANULARITY
        assert max(others - set(range(seen - WINDOW, seen))) > HELD.stop  # the newest of them, as without
        layer_group_of(caches).pinned = None
        read(model, caches, 60)
        assert not held & live_positions(caches)
        assert layer_group_of(originals).pinned == HELD
