"""Positions that are held stay through every round, and their tokens do not take the place of others."""

import mlx.core as mx
from zoo import build

from mlx_tq.config import KVConfig
from mlx_tq.policies import EvictConfig
from mlx_tq.policies.selection import PositionRange
from mlx_tq.prompt_cache.build import build_caches
from mlx_tq.prompt_cache.compressed import compressed, plan_caches
from mlx_tq.prompt_cache.passes import sequence_in

BUDGET, WINDOW, GRANULARITY = 128, 24, 8
HELD = PositionRange(45, 190)  # more than the budget, and no whole blocks


def caches_of(model):
    evict = EvictConfig(f"recency:trigger=8:granularity={GRANULARITY}", budget=BUDGET)
    return build_caches(plan_caches(model, KVConfig(key="q8", value="q8", sinks=4, window=WINDOW, evict=evict)))


def read(model, caches, count):
    for _ in range(count):
        mx.eval(model(mx.array([[7, 8, 9, 10]]), cache=caches))


def live(caches):
    (positions,) = {tuple(map(int, cache.positions)) for cache in caches}  # the same in every layer
    return set(positions)


def test_held_positions_stay_until_they_are_let_go():
    """Also in copies, which is how mlx-lm's batches take a cache in; what was not read holds nothing."""
    model = build("llama")
    held = set(range(*HELD))
    with compressed(model):
        caches = caches_of(model)
        plain, beyond = caches_of(model), caches_of(model)
        sequence_in(beyond).held = PositionRange(1000, 1100)
        for each in (plain, beyond):
            read(model, each, 60)
        assert live(plain) == live(beyond)
        sequence_in(caches).held = HELD
        originals, caches = caches, [cache.fork() for cache in caches]
        for _ in range(24):
            read(model, caches, 5)
            seen = caches[0].offset
            assert held & set(range(seen)) <= live(caches)
        assert sequence_in(caches).stats.rounds > 3
        others = live(caches) - held
        assert BUDGET - GRANULARITY <= len(others) <= BUDGET + 8 + 4 + 2 * GRANULARITY
        assert max(others - set(range(seen - WINDOW, seen))) > HELD.stop  # the newest of them, as without
        sequence_in(caches).held = None
        read(model, caches, 60)
        assert not held & live(caches)
        assert sequence_in(originals).held == HELD
