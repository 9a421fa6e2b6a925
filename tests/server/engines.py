"""Engines in this process, and jobs for them."""

import asyncio

from mlx_lm.sample_utils import make_sampler

from mlx_tq.config import profile
from mlx_tq.prefix_cache.prefix_cache import PrefixCache
from mlx_tq.prompt_cache.compressed import plan_caches
from mlx_tq.server.conversation import Prompt
from mlx_tq.server.engine import Engine
from mlx_tq.server.jobs import Failed, Job
from mlx_tq.server.limits import EngineLimits
from mlx_tq.server.metrics import Metrics
from mlx_tq.server.prefixes import salt_of

CONFIG = profile("small", sinks=16, window=32)
LIMITS = {
    "concurrency": 8, "prompt_concurrency": 8, "queue": 8, "prefill_step_size": 64, "prompt_cache_size": 4,
    "prompt_cache_bytes": 2**40, "memory": None,
}  # fmt: skip
GREEDY = make_sampler(0.0)


def make_engine(loaded, config=CONFIG, folder=None, warn=print, key=None, **limits):
    """With a store of prefixes where there is a folder."""
    model, tokenizer = loaded
    plan = None if config.is_off else plan_caches(model, config)
    store = PrefixCache(model, plan, folder, warn, salt_of(key, shared=False)) if folder else None
    limits = EngineLimits(**{**LIMITS, **limits})
    return Engine(model, tokenizer, config, plan, limits, Metrics(), store=store)


def make_job(length, max_tokens=4, seed=1, sampler=GREEDY):
    ids = [(7 * i * i + seed * i) % 4000 + 50 for i in range(length)]
    return Job(Prompt(ids, [ids], ["assistant"]), max_tokens, sampler, [])


async def outcome(job):
    """All events up to the last, of all of its answers."""
    events, left = [], 1 + len(job.others)
    while left and not (events and isinstance(events[-1], Failed)):
        events.append(await asyncio.wait_for(job.events.get(), 300))
        left -= bool(getattr(events[-1], "finish", None))
    return events


def serve(engine, jobs, then=None):
    """The events of jobs that were all there before the engine began, and of what `then` does."""

    async def main():
        with engine._changed:  # the thread waits until all are in the queue
            engine.start(asyncio.get_running_loop())
            for job in jobs:
                engine.submit(job)
        events = await asyncio.gather(*map(outcome, jobs))
        return events if then is None else (events, await then())

    try:
        return asyncio.run(main())
    finally:
        engine.join(30)
