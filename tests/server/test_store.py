"""What an engine read, another one goes on from, or the same after a restart: with the tokens of reading it anew."""

import asyncio
import resource
from itertools import chain

import pytest
from cli.tools import zoo_model

from mlx_tq.cache import body
from mlx_tq.config import EvictConfig, KVConfig
from mlx_tq.models import load
from mlx_tq.prefix_cache.folder import Folder
from mlx_tq.prefix_cache.prefix_cache import PrefixCache
from mlx_tq.prompt_cache.compressed import plan_caches
from mlx_tq.server.conversation import Prompt
from mlx_tq.server.jobs import Job, Piece, Progress, Started
from mlx_tq.server.prefixes import salt_of
from mlx_tq.session.recall import question_of

from .conftest import question
from .engines import CONFIG, GREEDY, make_engine, make_job, outcome, serve

STEP = 64  # of these engines


@pytest.fixture
def store(tmp_path):
    return Folder(tmp_path / "store")


def cached(events):
    assert isinstance(events[0], Started)
    return events[0].cached


def text(events):
    return "".join(event.text for event in events if isinstance(event, Piece))


def counter(engine, name):
    return engine._metrics.registry.get_sample_value(f"mlx_tq_{name}_total")


def job_of(*segments, max_tokens=8):
    return Job(Prompt(list(chain(*segments)), list(segments), ["user"] * len(segments)), max_tokens, GREEDY, [])


def answers(engine, jobs):
    """The texts of jobs that run at once, and how much of their prompts was there."""
    events = serve(engine, jobs)
    return [text(each) for each in events], [cached(each) for each in events]


@pytest.mark.parametrize("model", ["embedded", "gemma3_text", "qwen3_next"])
def test_batches_go_on_where_other_batches_have_read(model, loaded, store, tmp_path):
    """Prompts of different lengths at once; the last two begin as an earlier one did, and end in another way."""
    loaded = loaded if model == "embedded" else load(zoo_model(tmp_path / model, model))
    one, two = (make_job(length, seed=length).prompt.ids for length in (300, 230))
    system = one[:190]

    def first():
        return [job_of(system, one[190:]), job_of(two)]

    def later():
        return [*first(), job_of(system, two[:90]), job_of([*two[:140], *one[:60]])]

    plain = answers(make_engine(loaded, prompt_cache_size=0), later())[0]
    engine = make_engine(loaded, folder=store)
    assert answers(engine, first()) == (plain[:2], [0, 0])
    assert (counter(engine, "restored_tokens"), counter(engine, "read_tokens")) == (0, 530)
    engine = make_engine(loaded, folder=store)
    assert answers(engine, later()) == (plain, [299, 229, 190, 2 * STEP])
    assert counter(engine, "restored_tokens") == counter(engine, "cached_tokens") == 299 + 229 + 190 + 128
    assert counter(engine, "read_tokens") == counter(engine, "prompt_tokens") - counter(engine, "restored_tokens")


@pytest.mark.parametrize("begins", ["memory", "store"])
def test_requests_with_one_beginning_hold_it_once(begins, loaded, store, monkeypatch):
    """As memory has it after a first request, and as a fresh engine restores it; what follows differs."""
    monkeypatch.setattr(body, "LEAST", 64)
    beginning, count, held = make_job(416).prompt.ids, 4, []

    def jobs(seeds):
        return [job_of(beginning, make_job(40, seed=seed).prompt.ids, max_tokens=6) for seed in seeds]

    def watched():
        engine = make_engine(loaded, folder=store)
        measure = engine._measure

        def look():
            for batch in engine._batch._generation_batch.prompt_cache or ():
                arrays = [row._body.arrays for row in batch.rows]
                held.append((len(arrays), len({id(array) for each in arrays for array in each}), sum(map(len, arrays))))
            measure()

        engine._measure = look
        return engine

    async def then():
        for job in (later := jobs(range(2, 2 + count))):
            engine.submit(job)
        return [text(await outcome(job)) for job in later]

    plain, _ = answers(make_engine(loaded, prompt_cache_size=0), jobs(range(2, 2 + count)))
    engine = watched()
    _, said = serve(engine, jobs([1]), then)
    if begins == "store":
        held.clear()
        said, found = answers(watched(), jobs(range(2, 2 + count)))
        assert found == [416] * count
    assert said == plain
    assert max(held) == (count, count + 1, 2 * count), "what all have, and each one's own"


def test_the_question_is_read_over_what_is_restored(loaded, store):
    """With recall the document is stored, and not the question behind it."""
    tokenizer, said = loaded[1], [{"role": "user", "content": question(20, 593_847)}]
    ids = tokenizer.apply_chat_template(said, add_generation_prompt=True)
    document, _ = question_of(tokenizer, ids)
    evict = EvictConfig("recency:granularity=16:trigger=32", 2000, recall=96)
    config = KVConfig("q8", "tq4", sinks=16, window=32, evict=evict)
    plain, _ = answers(make_engine(loaded, config), [job_of(ids)])
    assert answers(make_engine(loaded, config, store), [job_of(ids)]) == (plain, [0])
    assert answers(make_engine(loaded, config, store), [job_of(ids)]) == (plain, [len(document)])


def test_memory_serves_where_it_is_as_soon_done(loaded, store):
    """A prompt of which memory has much goes on from there; of one with much to read, the steps are those of all."""
    engine = make_engine(loaded, folder=store)
    ids = make_job(300).prompt.ids
    other = [*ids[:20], *make_job(280, seed=5).prompt.ids]

    async def then():
        found = []
        for each in (ids, [*ids[:290], 77], other):
            engine.submit(job := job_of(each))
            found.append(cached(await outcome(job)))
        return found

    assert serve(engine, [job_of(ids)], then)[1] == [299, 290, 0]
    assert counter(engine, "restored_tokens") == 0
    assert answers(make_engine(loaded, folder=store), [job_of(other)])[1] == [299]


def test_a_cancelled_prompt_is_there_as_far_as_it_was_read(loaded, store):
    engine = make_engine(loaded, folder=store)
    job = make_job(600)

    async def main():
        engine.start(asyncio.get_running_loop())
        engine.submit(job)
        while not (isinstance(event := await job.events.get(), Progress) and event.done >= 2 * STEP):
            pass
        engine.cancel(job)
        engine.submit(last := make_job(20))
        return await outcome(last)

    try:
        assert asyncio.run(main())[-1].finish
    finally:
        engine.join(30)
    again = make_job(600)
    said, (found,) = answers(make_engine(loaded, folder=store), [again])
    assert 2 * STEP <= found < 599
    assert found % STEP == 0
    assert said == answers(make_engine(loaded), [make_job(600)])[0]


def test_a_full_disk_is_one_warning_and_the_answers_come(loaded, store):
    warned, limits = [], resource.getrlimit(resource.RLIMIT_FSIZE)
    engine = make_engine(loaded, folder=store, warn=warned.append)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        said = answers(engine, [make_job(300), make_job(200, seed=2)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert said == answers(make_engine(loaded), [make_job(300), make_job(200, seed=2)])
    assert len(warned) == 1
    assert "cannot be stored" in warned[0]
    assert not store.records()


def test_keys_of_the_api_find_their_own(loaded, store):
    """And nothing that they store is there already because of another one, which would be told by the time it takes."""
    answers(make_engine(loaded, folder=store), [make_job(400)])
    before = len(store.records())
    answers(make_engine(loaded, folder=store, key="one"), [make_job(400)])
    assert len(store.records()) == 2 * before
    plan = plan_caches(loaded[0], CONFIG)

    def key(*salt):
        return PrefixCache(loaded[0], plan, store, print, *salt).prompt([[1, 2, 3]], STEP).keys[3]

    own = [key(), *(key(salt_of(name, shared=False)) for name in (None, "one", "two"))]
    assert len(set(own)) == 4, "and what is read alone is not of a batch"
    assert {key(salt_of(name, shared=True)) for name in ("one", None)} == {own[1]}
