"""Engines in this process, jobs for them, and ways to watch them from outside."""

import asyncio
from dataclasses import replace

from mlx_lm.sample_utils import make_sampler

from mlx_tq.cache.batch import BatchCompressedKVCache
from mlx_tq.config import KVConfig
from mlx_tq.prefix_cache.prefix_cache import PrefixCache
from mlx_tq.prompt_cache.compressed import plan_caches
from mlx_tq.server.admission import EngineLimits
from mlx_tq.server.api_errors import ApiError
from mlx_tq.server.engine import Engine
from mlx_tq.server.job import Job, Piece
from mlx_tq.server.metrics import Metrics
from mlx_tq.server.prefill_grid import PrefillGrid
from mlx_tq.server.prompt_builder import Prompt
from mlx_tq.server.stored_prompts import salt_of

CONFIG = KVConfig.from_profile("small", sinks=16, window=32)
LIMITS = {
    "concurrency": 8, "prompt_concurrency": 8, "queue": 8, "prefill_step_size": 64, "prompt_cache_bytes": 2**40,
    "memory": None, "metrics_interval_s": 0,
}  # fmt: skip
GREEDY = make_sampler(0.0)


def make_engine(loaded, config=CONFIG, folder=None, warn=print, key=None, **limits):
    """Return an engine, with a prefix cache if there is a folder."""
    model, tokenizer = loaded
    plan = None if config.is_off else plan_caches(model, config)
    cache = PrefixCache(model, plan, folder, warn, salt_of(key, shared=False)) if folder else None
    return Engine(model, tokenizer, config, plan, limits_of(**limits), Metrics(), prefix_cache=cache)


def limits_of(**limits):
    """Return the limits of an engine: those given, and `LIMITS`."""
    fields = LIMITS | limits
    return EngineLimits(prefill_grid=PrefillGrid(fields.pop("prefill_step_size")), **fields)


def random_ids(length, seed=1):
    return [(7 * i * i + seed * i) % 4000 + 50 for i in range(length)]


def job_of(*segments, max_tokens=4, sampler=GREEDY, processors=(), **fields):
    """Return a job whose prompt has these segments."""
    prompt = Prompt([token for segment in segments for token in segment], list(segments))
    return Job(prompt, max_tokens, sampler, list(processors), **fields)


def make_job(length, seed=1, **fields):
    return job_of(random_ids(length, seed), **fields)


def with_others(job, count):
    """Return the job with `count` more answers, as the service makes them."""
    return replace(job, others=tuple(replace(job, index=1 + n) for n in range(count)))


async def outcome(job):
    """Return all events of a job and of the other answers to its prompt."""
    events, unfinished = [], len(job.answers)
    while unfinished and not (events and isinstance(events[-1], ApiError)):
        events.append(await asyncio.wait_for(job.events.get(), 300))
        unfinished -= bool(getattr(events[-1], "finish_reason", None))
    return events


async def run_job(engine, job):
    engine.submit(job)
    return await outcome(job)


def text_of(events, index=0):
    return "".join(event.text for event in events if isinstance(event, Piece) and event.index == index)


def tokens_of(events):
    """Return the tokens of an answer whose job reports log-probabilities."""
    return [event.logprob.token for event in events if isinstance(event, Piece)]


def serve(engine, jobs, then=None):
    """Return the events of jobs that are all in the queue before the first step, and the result of `then`."""

    async def main():
        engine.start(asyncio.get_running_loop())
        if jobs:
            engine.submit(*jobs)
        events = await asyncio.gather(*map(outcome, jobs))
        return events if then is None else (events, await then())

    try:
        return asyncio.run(main())
    finally:
        engine.join(30)


def metric(engine, name):
    return engine.metrics.registry.get_sample_value(f"mlx_tq_{name}")


def record_gauge(monkeypatch, gauge):
    """Return a list to which all values of a gauge are appended."""
    values, set_value = [], gauge.set
    monkeypatch.setattr(gauge, "set", lambda value: (values.append(value), set_value(value)))
    return values


def watch_passes(monkeypatch, model, on_pass):
    """Call `on_pass` with the rows of each layer's batch cache before every forward pass of the model."""
    kind = type(model)
    forward = kind.__call__

    def watched(model, tokens, cache=None, **options):
        layers = [layer.rows for layer in cache or () if isinstance(layer, BatchCompressedKVCache)]
        if layers:
            on_pass(layers)
        return forward(model, tokens, cache=cache, **options)

    monkeypatch.setattr(kind, "__call__", watched)


def record_memory(monkeypatch, engine, model):
    """Return lists to which the number of running jobs and the bytes of their rows are appended."""
    nbytes = []
    watch_passes(monkeypatch, model, lambda layers: nbytes.append(distinct_nbytes(layers)))
    return record_gauge(monkeypatch, engine.metrics.running), nbytes


def distinct_nbytes(layers):
    """Return the bytes of the rows' arrays; shared ones count once."""
    return sum({id(array): array.nbytes for rows in layers for row in rows for array in row.arrays()}.values())
