"""When a round comes and how much leaves, of budgets in tokens and in shares; tests/property has what stays."""

import mlx.core as mx
import pytest
from zoo import build

from mlx_tq.config import KVConfig
from mlx_tq.policies import EvictConfig
from mlx_tq.prompt_cache.build import build_caches
from mlx_tq.prompt_cache.compressed import plan_caches
from mlx_tq.prompt_cache.passes import before_pass, sequence_in

PREFIX, WINDOW, LENGTH = 4, 24, 260


def step(caches, count):
    """What a forward pass does: it is announced, then each layer takes its part."""
    before_pass(caches, count)
    for cache in caches:
        cache.append(*(mx.random.normal((1, 2, count, 64)) for _ in range(2)))


@pytest.mark.parametrize(("chunk", "trigger"), [(1, 33), (40, 1)])
@pytest.mark.parametrize("budget", [80, PREFIX + WINDOW + 1, "50%", "80%"])
def test_a_round_comes_above_budget_and_trigger_and_takes_the_excess(budget, trigger, chunk):
    evict = EvictConfig(f"random:trigger={trigger}:granularity=1", budget=budget)
    plan = plan_caches(build("llama"), KVConfig(key="q8", value="q8", sinks=PREFIX, window=WINDOW, evict=evict))
    caches = build_caches(plan)
    live = rounds = 0
    for start in range(0, LENGTH - chunk + 1, chunk):
        allowed = max(int(float(budget.rstrip("%")) / 100 * start) if isinstance(budget, str) else budget, WINDOW + 1)
        if live > allowed + trigger:
            packed = caches[0].body_positions
            gone = min(live - allowed, int((packed < start - WINDOW).sum()))
            live -= gone
            rounds += gone > 0
        step(caches, chunk)
        live += chunk
        for cache in caches:
            assert (cache.offset, cache.size()) == (start + chunk, live)
        assert sequence_in(caches).stats.rounds == rounds
    assert rounds > 0
