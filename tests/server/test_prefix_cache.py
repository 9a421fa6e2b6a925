"""Engines with a prefix cache on disk restore what other engines prefilled, and generate the same tokens."""

import resource

import pytest
from cli.tools import zoo_model

from mlx_tq.cache import packed_rows
from mlx_tq.config import EvictConfig, KVConfig
from mlx_tq.models import load
from mlx_tq.prefix_cache.folder import Folder
from mlx_tq.prompt_cache.compressed import plan_caches
from mlx_tq.server.job import Progress
from mlx_tq.server.stored_prompts import salt_of
from mlx_tq.session.restore import split_question

from .conftest import question
from .engines import (
    CONFIG,
    LIMITS,
    distinct_nbytes,
    job_of,
    make_engine,
    make_job,
    metric,
    outcome,
    random_ids,
    run_job,
    serve,
    text_of,
    watch_passes,
)

STEP = LIMITS["prefill_step_size"]


@pytest.fixture
def store(tmp_path):
    return Folder(tmp_path / "store")


def answers(engine, jobs):
    """Return the texts of jobs that run at once, and their cached tokens."""
    results = serve(engine, jobs)
    return [text_of(events) for events in results], [events[0].cached_tokens for events in results]


@pytest.mark.parametrize("model", ["embedded", "gemma3_text", "qwen3_next"])
def test_batches_restore_what_other_batches_prefilled(model, loaded, store, tmp_path):
    """The prompts have different lengths; the last two share prefixes with earlier ones and end in another way."""
    loaded = loaded if model == "embedded" else load(zoo_model(tmp_path / model, model))
    one, two = (random_ids(length, seed=length) for length in (300, 230))
    system = one[:190]

    def first():
        return [job_of(system, one[190:], max_tokens=8), job_of(two, max_tokens=8)]

    def later():
        others = [job_of(system, two[:90], max_tokens=8), job_of([*two[:140], *one[:60]], max_tokens=8)]
        return [*first(), *others]

    plain = answers(make_engine(loaded, prompt_cache_size=0), later())[0]
    engine = make_engine(loaded, folder=store)
    assert answers(engine, first()) == (plain[:2], [0, 0])
    assert (metric(engine, "restored_tokens_total"), metric(engine, "prefill_tokens_total")) == (0, 530)
    engine = make_engine(loaded, folder=store)
    assert answers(engine, later()) == (plain, [299, 229, 190, 2 * STEP])
    restored = metric(engine, "restored_tokens_total")
    assert restored == metric(engine, "cached_tokens_total") == 299 + 229 + 190 + 128
    assert metric(engine, "prefill_tokens_total") == metric(engine, "prompt_tokens_total") - restored


@pytest.mark.parametrize("source", ["memory", "disk"])
def test_requests_hold_a_cached_prefix_once(source, loaded, store, monkeypatch):
    """A prefix that is in memory after a first request, or that a fresh engine restores from the disk."""
    monkeypatch.setattr(packed_rows, "LEAST", 64)
    prefix, count, saved = random_ids(416), 4, []

    def jobs(seeds):
        return [job_of(prefix, random_ids(40, seed=seed), max_tokens=6) for seed in seeds]

    async def then():
        later = jobs(range(2, 2 + count))
        engine.submit(*later)
        return [text_of(await outcome(job)) for job in later]

    def note(layers):
        if len(layers[0]) == count:
            saved.append(sum(row.nbytes for rows in layers for row in rows) - distinct_nbytes(layers))

    plain, _ = answers(make_engine(loaded, prompt_cache_size=0), jobs(range(2, 2 + count)))
    engine = make_engine(loaded, folder=store)
    watch_passes(monkeypatch, loaded[0], note)
    _, texts = serve(engine, jobs([1]), then)
    if source == "disk":
        saved.clear()
        texts, cached = answers(make_engine(loaded, folder=store), jobs(range(2, 2 + count)))
        assert cached == [416] * count
    assert texts == plain
    assert max(saved) >= (count - 1) * plan_caches(loaded[0], CONFIG).shared_nbytes(416, 462)


def test_with_recall_the_document_is_stored_without_its_question(loaded, store):
    tokenizer = loaded[1]
    message = {"role": "user", "content": question(20, 593_847)}
    ids = tokenizer.apply_chat_template([message], add_generation_prompt=True)
    document, _ = split_question(tokenizer, ids)
    evict = EvictConfig("recency:granularity=16:trigger=32", 2000, recall=96)
    config = KVConfig("q8", "tq4", sinks=16, window=32, evict=evict)
    plain, _ = answers(make_engine(loaded, config), [job_of(ids, max_tokens=8)])
    for cached in (0, len(document)):
        assert answers(make_engine(loaded, config, store), [job_of(ids, max_tokens=8)]) == (plain, [cached])


def test_memory_is_preferred_unless_much_remains_to_prefill(loaded, store):
    """A prompt that continues from memory is not stored; one with much to prefill is prefilled in steps instead."""
    engine, ids = make_engine(loaded, folder=store), random_ids(300)
    other = [*ids[:20], *random_ids(280, seed=5)]

    async def then():
        jobs = [job_of(each) for each in (ids, [*ids[:290], 77], other)]
        return [(await run_job(engine, job))[0].cached_tokens for job in jobs]

    assert serve(engine, [job_of(ids)], then)[1] == [299, 290, 0]
    assert metric(engine, "restored_tokens_total") == 0
    assert answers(make_engine(loaded, folder=store), [job_of(other)])[1] == [299]


def test_a_cancelled_prompt_is_stored_as_far_as_it_was_prefilled(loaded, store):
    engine, job = make_engine(loaded, folder=store), make_job(600)

    async def then():
        engine.submit(job)
        while not (isinstance(event := await job.events.get(), Progress) and event.done >= 2 * STEP):
            pass
        engine.cancel(job)
        return await run_job(engine, make_job(20))

    assert serve(engine, [], then)[1][-1].finish_reason
    texts, (cached,) = answers(make_engine(loaded, folder=store), [make_job(600)])
    assert 2 * STEP <= cached < 599
    assert cached % STEP == 0
    assert texts == answers(make_engine(loaded), [make_job(600)])[0]


def test_a_full_disk_is_one_warning_and_changes_no_answer(loaded, store):
    warnings, limits = [], resource.getrlimit(resource.RLIMIT_FSIZE)
    engine = make_engine(loaded, folder=store, warn=warnings.append)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        results = answers(engine, [make_job(300), make_job(200, seed=2)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert results == answers(make_engine(loaded), [make_job(300), make_job(200, seed=2)])
    assert len(warnings) == 1
    assert "cannot be stored" in warnings[0]
    assert not store.records()


def test_another_api_key_finds_nothing_and_stores_its_own(loaded, store):
    """If records of another key were reused, the time to store would tell that they exist."""
    answers(make_engine(loaded, folder=store), [make_job(400)])
    count = len(store.records())
    answers(make_engine(loaded, folder=store, key="one"), [make_job(400)])
    assert len(store.records()) == 2 * count
    salts = {salt_of(key, shared=False) for key in (None, "one", "two")}
    assert len({"", *salts}) == 4, "the command line's prompts have no salt"
    assert {salt_of(key, shared=True) for key in ("one", None)} == {salt_of(None, shared=False)}
