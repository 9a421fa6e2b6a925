"""Prompts that share a prefix and run at once: it is prefilled once and held once, and answers stay the same."""

from dataclasses import replace

import mlx.core as mx
import pytest
from cli.tools import zoo_model

from mlx_tq.config import EvictConfig
from mlx_tq.models import load
from mlx_tq.prefix_cache.folder import Folder
from mlx_tq.prompt_cache.compressed import plan_caches
from mlx_tq.server.job import Piece, Progress

from .engines import (
    CONFIG,
    distinct_nbytes,
    job_of,
    make_engine,
    metric,
    outcome,
    random_ids,
    record_gauge,
    serve,
    text_of,
    watch_passes,
)

SYSTEM, MORE = random_ids(384), random_ids(128, seed=7)


def unique(seed, count=20):
    return random_ids(count + 1, seed=seed)[1:]  # the first is the same for all seeds


def make_jobs(first_tokens=6):
    """Return five jobs with one prefix, of which the second and third share a longer one; and one with another."""
    two = [job_of(SYSTEM, [*MORE, *unique(seed)], max_tokens=6) for seed in (3, 4)]
    others = [job_of(SYSTEM, unique(seed), max_tokens=6) for seed in (5, 6)]
    first = job_of(SYSTEM, unique(2), max_tokens=first_tokens)
    return [first, *two, *others, job_of(unique(8, 360), max_tokens=6)]


def texts_and_cached(results):
    return [text_of(events) for events in results], [events[0].cached_tokens for events in results]


def alone_texts(loaded, config=CONFIG, jobs=make_jobs):
    """Return the answers of jobs that each run in an engine of their own."""
    return [text_of(*serve(make_engine(loaded, config), [job])) for job in jobs()]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    return load(zoo_model(tmp_path_factory.mktemp("models") / "llama", "llama"))


@pytest.fixture(scope="module")
def alone(loaded):
    return alone_texts(loaded)


OTHERS = [("llama", False), ("gemma3_text", True), ("qwen3_next", True), ("embedded", True)]


@pytest.mark.parametrize(
    ("name", "stored"), [("llama", True), *(pytest.param(*case, marks=pytest.mark.full) for case in OTHERS)]
)
def test_a_shared_prefix_is_prefilled_and_held_once(name, stored, tmp_path, monkeypatch):
    loaded = load(None if name == "embedded" else zoo_model(tmp_path / name, name))
    if name == "embedded":
        loaded[0].set_dtype(mx.float32)
    alone = alone_texts(loaded)
    folder = Folder(tmp_path / "store") if stored else None
    engine = make_engine(loaded, folder=folder, prompt_cache_size=0)
    running, saved = record_gauge(monkeypatch, engine.metrics.running), []

    def note(layers):
        saved.append(sum(row.nbytes for rows in layers for row in rows) - distinct_nbytes(layers))

    with monkeypatch.context() as patch:
        watch_passes(patch, loaded[0], note)
        # Of the two with the longer prefix the second follows the first, up to where a step of both ends.
        assert texts_and_cached(serve(engine, make_jobs())) == (alone, [0, 384, 512, 384, 384, 0])
    plan = plan_caches(loaded[0], CONFIG)
    assert max(saved) >= 4 * plan.shared_nbytes(384, 410)
    assert max(running) == 6
    if stored:
        again = serve(make_engine(loaded, folder=folder, prompt_cache_size=0), make_jobs())
        assert texts_and_cached(again) == (alone, [384, 512, 512, 384, 384, 359])


def test_shared_rows_count_once_against_the_memory(loaded, alone, monkeypatch):
    """All six run at once, which they could not if each counted in full."""
    plan = plan_caches(loaded[0], CONFIG)
    full = sum(plan.nbytes(job.max_total_tokens) for job in make_jobs())
    limit = full - 3 * plan.shared_nbytes(384, 600)
    engine = make_engine(loaded, memory=limit, prompt_cache_size=0)
    running, held = record_gauge(monkeypatch, engine.metrics.running), []
    watch_passes(monkeypatch, loaded[0], lambda layers: held.append(distinct_nbytes(layers)))
    assert texts_and_cached(serve(engine, make_jobs()))[0] == alone
    assert max(running) == 6
    assert max(held) <= limit


def test_later_jobs_share_stored_prompts(loaded, alone, monkeypatch):
    """The first is decoding when the others come; they fit into the memory only because they share its prefix."""
    plan = plan_caches(loaded[0], CONFIG)
    first, *others = make_jobs(first_tokens=200)[:5]
    total = sum(plan.nbytes(job.max_total_tokens) for job in (first, *others))
    limit = total - 3 * plan.shared_nbytes(384, 600)
    engine = make_engine(loaded, memory=limit)
    running, held = record_gauge(monkeypatch, engine.metrics.running), []
    watch_passes(monkeypatch, loaded[0], lambda layers: held.append(distinct_nbytes(layers)))

    async def then():
        engine.submit(first)
        while not isinstance(await first.events.get(), Piece):
            pass
        engine.submit(*others)
        results = [await outcome(job) for job in others]
        engine.cancel(first)
        return results

    _, results = serve(engine, [], then)
    assert texts_and_cached(results) == (alone[1:5], [384, 512, 384, 384])
    assert max(running) == 5
    assert max(held) <= limit


def test_followers_continue_when_the_leader_is_cancelled(loaded, alone):
    engine = make_engine(loaded, prompt_cache_size=0)

    async def then():
        jobs = make_jobs()[:5]
        engine.submit(*jobs)
        while not isinstance(await jobs[0].events.get(), Progress):
            pass
        engine.cancel(jobs[0])
        engine.cancel(jobs[3])
        return [await outcome(jobs[index]) for index in (1, 2, 4)], jobs[3]

    _, (results, cancelled) = serve(engine, [], then)
    assert texts_and_cached(results) == ([alone[1], alone[2], alone[4]], [0, 512, 384])
    assert cancelled.events.qsize() <= 1, "it started at most"
    assert metric(engine, "running") == 0


def test_followers_continue_when_the_batch_of_the_leader_fails(loaded, alone, monkeypatch):
    failures = [RuntimeError("the first step fails")]

    def fail_once(_):
        if failures:
            raise failures.pop()

    watch_passes(monkeypatch, loaded[0], fail_once)
    first, *others = serve(make_engine(loaded, prompt_cache_size=0), make_jobs()[:5])
    assert "the first step fails" in str(first[-1].error)
    assert texts_and_cached(others)[0] == alone[1:5]


def test_eviction_in_one_job_leaves_shared_rows_alone(loaded):
    """Two share the prefix; a third, which will evict tokens, prefills alone and evicts its own."""
    config = replace(CONFIG, evict=EvictConfig("knorm:trigger=32:granularity=1", budget=480, recall="off"))

    def jobs():
        return [
            *(job_of(SYSTEM, unique(seed), max_tokens=6) for seed in (2, 3)),
            job_of(SYSTEM, unique(4, 240), max_tokens=6),
        ]

    results = serve(make_engine(loaded, config), jobs())
    assert texts_and_cached(results) == (alone_texts(loaded, config, jobs), [0, 384, 0])
