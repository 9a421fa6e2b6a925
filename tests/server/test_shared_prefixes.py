"""Prefixes that prompts share are prefilled once and held once: in a batch, in memory, and in the cache on disk."""

import resource
from dataclasses import replace
from functools import partial

import mlx.core as mx
import pytest
from cli.tools import zoo_model

from mlx_tq.config import EvictConfig, KVConfig
from mlx_tq.kernels.shared_prefixes import find_shared_prefixes
from mlx_tq.models import load
from mlx_tq.prefix_cache.folder import Folder
from mlx_tq.prompt_cache.compressed import plan_caches
from mlx_tq.server.job import Piece, PrefillProgress
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
    record_gauge,
    record_memory,
    run_job,
    serve,
    text_of,
    watch_passes,
)

STEP = LIMITS["prefill_step_size"]
SYSTEM, MORE = random_ids(384), random_ids(128, seed=7)


def unique(seed, count=20):
    return random_ids(count + 1, seed=seed)[1:]  # the first is the same for all seeds


def make_jobs(first_tokens=16, seed=2):
    """Return five jobs with one prefix, of which the second and third share a longer one; and one with another."""
    two = [job_of(SYSTEM, [*MORE, *unique(seed + n)], max_tokens=16) for n in (1, 2)]
    others = [job_of(SYSTEM, unique(seed + n), max_tokens=16) for n in (3, 4)]
    first = job_of(SYSTEM, unique(seed), max_tokens=first_tokens)
    return [first, *two, *others, job_of(unique(seed + 6, 360), max_tokens=16)]


def texts_and_cached(results):
    """Return the texts of answers, and their cached tokens."""
    return [text_of(events) for events in results], [events[0].cached_tokens for events in results]


def answers(engine, jobs):
    return texts_and_cached(serve(engine, jobs))


def alone_texts(loaded, config=CONFIG, jobs=make_jobs):
    """Return the answers of jobs that each run in an engine of their own."""
    return [text_of(*serve(make_engine(loaded, config), [job])) for job in jobs()]


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return load(zoo_model(tmp_path_factory.mktemp("models") / "llama", "llama"))


@pytest.fixture(scope="module")
def alone(llama):
    return alone_texts(llama)


OTHERS = [("llama", True), ("gemma3_text", True), ("qwen3_next", True), ("embedded", True)]


@pytest.mark.parametrize(
    ("name", "stored"), [("llama", False), *(pytest.param(*case, marks=pytest.mark.full) for case in OTHERS)]
)
def test_a_shared_prefix_is_prefilled_and_held_once(name, stored, tmp_path, monkeypatch):
    loaded = load(None if name == "embedded" else zoo_model(tmp_path / name, name))
    if name == "embedded":
        loaded[0].set_dtype(mx.float32)
    alone = alone_texts(loaded)
    folder = Folder(tmp_path / "store") if stored else None
    engine = make_engine(loaded, folder=folder, prompt_cache_bytes=0)
    running, saved = record_gauge(monkeypatch, engine.metrics.running), []  # saved: bytes

    def record_saved(layers):
        saved.append(sum(row.nbytes for rows in layers for row in rows) - distinct_nbytes(layers))

    watch_passes(monkeypatch, loaded[0], record_saved)
    # Of the two with the longer prefix the second follows the first, up to where a step of both ends.
    assert answers(engine, make_jobs()) == (alone, [0, 384, 512, 384, 384, 0])
    least = 4 * plan_caches(loaded[0], CONFIG).shared_nbytes(384, 410)
    assert max(saved) >= least
    assert max(running) >= 5, "the last one, with the least to prefill, may have ended before the others begin"
    if stored:
        saved.clear()
        other_jobs = partial(make_jobs, seed=20)
        again = answers(make_engine(loaded, folder=folder, prompt_cache_bytes=0), other_jobs())
        is_plain = name in ("llama", "embedded")
        assert again == (alone_texts(loaded, jobs=other_jobs), [384, 512 if is_plain else 384, 512, 384, 384, 0])
        assert max(saved) >= least


@pytest.mark.full
def test_eight_jobs_attend_to_their_shared_prefix_together(llama, monkeypatch):
    def jobs():
        return [job_of(SYSTEM, unique(seed), max_tokens=40) for seed in range(8)]  # rows of their own are packed, too

    prefixes = []

    def record_prefixes(layers):
        views = [row.keys_and_values()[0].view for row in layers[0] if not row.empty()]
        prefixes.extend(find_shared_prefixes([view.merged_regions() for view in views]))

    alone = alone_texts(llama, jobs=jobs)
    watch_passes(monkeypatch, llama[0], record_prefixes)
    texts, cached = answers(make_engine(llama, prompt_cache_bytes=0), jobs())
    assert texts == alone
    assert cached == [0] + [384] * 7
    assert (tuple(range(8)), 384 - CONFIG.window - CONFIG.sinks) in prefixes


def test_shared_rows_count_once_against_the_memory(llama, alone, monkeypatch):
    """Without sharing, the memory would not hold all six jobs."""
    plan = plan_caches(llama[0], CONFIG)
    full = sum(plan.cache_peak_nbytes(job.max_total_tokens) for job in make_jobs())
    limit = full - 3 * plan.shared_nbytes(384, 600)
    engine = make_engine(llama, memory=limit, prompt_cache_bytes=0)
    running, nbytes = record_memory(monkeypatch, engine, llama[0])
    assert answers(engine, make_jobs())[0] == alone
    assert max(running) == 6
    assert max(nbytes) <= limit


def test_later_jobs_share_stored_prompts(llama, alone, monkeypatch):
    """The first is decoding when the others come; they fit into the memory only because they share its prefix."""
    plan = plan_caches(llama[0], CONFIG)
    first, *others = make_jobs(first_tokens=1000)[:5]
    total = sum(plan.cache_peak_nbytes(job.max_total_tokens) for job in (first, *others))
    limit = total - 3 * plan.shared_nbytes(384, 600)
    engine = make_engine(llama, memory=limit, decode_share=0)
    running, nbytes = record_memory(monkeypatch, engine, llama[0])

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
    assert max(nbytes) <= limit


def test_followers_continue_when_the_leader_is_cancelled(llama, alone):
    engine = make_engine(llama, prompt_cache_bytes=0)

    async def then():
        jobs = make_jobs()[:5]
        engine.submit(*jobs)
        while not isinstance(await jobs[0].events.get(), PrefillProgress):
            pass
        engine.cancel(jobs[0])
        engine.cancel(jobs[3])
        return [await outcome(jobs[index]) for index in (1, 2, 4)], jobs[3]

    _, (results, cancelled) = serve(engine, [], then)
    assert texts_and_cached(results) == ([alone[1], alone[2], alone[4]], [0, 512, 384])
    assert cancelled.events.qsize() <= 1, "it started at most"
    assert metric(engine, "running") == 0


def test_followers_continue_when_the_batch_of_the_leader_fails(llama, alone, monkeypatch):
    failures = [RuntimeError("the first step fails")]

    def fail_once(_):
        if failures:
            raise failures.pop()

    watch_passes(monkeypatch, llama[0], fail_once)
    first, *others = serve(make_engine(llama, prompt_cache_bytes=0), make_jobs()[:5])
    assert "the first step fails" in str(first[-1])
    assert texts_and_cached(others)[0] == alone[1:5]


def test_eviction_in_one_job_leaves_shared_rows_alone(llama):
    """Two share the prefix; a third, which will evict tokens, prefills alone and evicts its own."""
    config = replace(CONFIG, evict=EvictConfig("knorm:trigger=32:granularity=1", budget=480, recall="off"))

    def jobs():
        return [
            *(job_of(SYSTEM, unique(seed), max_tokens=6) for seed in (2, 3)),
            job_of(SYSTEM, unique(4, 240), max_tokens=6),
        ]

    results = serve(make_engine(llama, config), jobs())
    assert texts_and_cached(results) == (alone_texts(llama, config, jobs), [0, 384, 0])


# The cache on disk.


@pytest.fixture
def store(tmp_path):
    return Folder(tmp_path / "store")


@pytest.mark.full
@pytest.mark.parametrize(
    "model", ["gemma3_text", *(pytest.param(name, marks=pytest.mark.full) for name in ("embedded", "qwen3_next"))]
)
def test_batches_restore_what_other_batches_prefilled(model, loaded, store, tmp_path):
    """The prompts have different lengths; the last two share prefixes with earlier ones and end in another way.

    The last one's is not stored: it ends in the middle of a segment, before its states are stored for the first time.
    """
    loaded = loaded if model == "embedded" else load(zoo_model(tmp_path / model, model))
    one, two = (random_ids(length, seed=length) for length in (300, 230))
    system = one[:190]

    def first():
        return [job_of(system, one[190:], max_tokens=8), job_of(two, max_tokens=8)]

    def later():
        others = [job_of(system, two[:90], max_tokens=8), job_of([*two[:140], *one[:60]], max_tokens=8)]
        return [*first(), *others]

    plain = answers(make_engine(loaded, prompt_cache_bytes=0), later())[0]
    engine = make_engine(loaded, folder=store)
    assert answers(engine, first()) == (plain[:2], [0, 0])
    assert (metric(engine, "restored_tokens_total"), metric(engine, "prefill_tokens_total")) == (0, 530)
    engine = make_engine(loaded, folder=store)
    assert answers(engine, later()) == (plain, [299, 229, 190, 0])
    restored = metric(engine, "restored_tokens_total")
    assert restored == metric(engine, "cached_tokens_total") == 299 + 229 + 190
    assert metric(engine, "prefill_tokens_total") == metric(engine, "prompt_tokens_total") - restored


@pytest.mark.full
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


def test_memory_is_preferred_and_its_prompts_are_stored_too(llama, store):
    engine, ids = make_engine(llama, folder=store), random_ids(300)
    other = [*ids[:20], *random_ids(280, seed=5)]

    async def then():
        jobs = [job_of(prompt) for prompt in (ids, [*ids[:290], 77], other)]
        return [(await run_job(engine, job))[0].cached_tokens for job in jobs]

    assert serve(engine, [job_of(ids)], then)[1] == [299, 290, 20]
    assert metric(engine, "restored_tokens_total") == 0
    assert answers(make_engine(llama, folder=store), [job_of(other)])[1] == [299]


def always(token):
    """Return a sampler."""
    return lambda logprobs: mx.full(logprobs.shape[:-1], token)


def test_other_answers_to_a_prompt_are_stored_too(llama, store):
    ids = random_ids(300)
    first = job_of(ids, max_tokens=40, sampler=always(60))
    serve(make_engine(llama, folder=store), [replace(first, others=(replace(first, sampler=always(61), index=1),))])
    continued = [job_of([*ids, *[token] * 39, 77]) for token in (60, 61)]
    assert answers(make_engine(llama, folder=store), continued)[1] == [339, 339]


@pytest.mark.full
def test_answers_are_stored_after_a_memory_error(loaded, store, monkeypatch):
    """The shorter prompt goes on at once, the longer one waits until it ends."""
    prompts, passes = [random_ids(200), random_ids(100, seed=5)], []
    engine = make_engine(loaded, folder=store)

    def fail_once(layers):
        passes.append(layers)
        if len(passes) == 12:
            raise RuntimeError("[metal::malloc] Unable to allocate 1000000 bytes.")

    with monkeypatch.context() as patch:
        watch_passes(patch, loaded[0], fail_once)
        serve(engine, [job_of(ids, max_tokens=50, sampler=always(60)) for ids in prompts])
    assert len(passes) > 12
    continued = [job_of([*ids, *[60] * 49, 77]) for ids in prompts]
    assert answers(make_engine(loaded, folder=store), continued)[1] == [249, 149]


def test_a_cancelled_prompt_is_stored_as_far_as_it_was_prefilled(llama, store):
    engine, job = make_engine(llama, folder=store), make_job(600)

    async def then():
        engine.submit(job)
        while not (isinstance(event := await job.events.get(), PrefillProgress) and event.done >= 2 * STEP):
            pass
        engine.cancel(job)
        return await run_job(engine, make_job(20))

    assert serve(engine, [], then)[1][-1].finish_reason
    texts, (cached,) = answers(make_engine(llama, folder=store), [make_job(600)])
    assert 2 * STEP <= cached < 599
    assert cached % STEP == 0
    assert texts == answers(make_engine(llama), [make_job(600)])[0]


def test_a_full_disk_is_one_warning_and_changes_no_answer(llama, store):
    warnings, limits = [], resource.getrlimit(resource.RLIMIT_FSIZE)
    engine = make_engine(llama, folder=store, warn=warnings.append)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        results = answers(engine, [make_job(300), make_job(200, seed=2)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert results == answers(make_engine(llama), [make_job(300), make_job(200, seed=2)])
    assert len(warnings) == 1
    assert "cannot be stored" in warnings[0]
    assert not store.records()


def test_salts_separate_api_keys_unless_shared():
    salts = {salt_of(key, shared=False) for key in (None, "one", "two")}
    assert len({"", *salts}) == 4, "the command line's prompts have no salt"
    assert {salt_of(key, shared=True) for key in ("one", None)} == {salt_of(None, shared=False)}
