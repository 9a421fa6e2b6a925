"""Prompts that begin alike and come at once: read once, held once, answered as each alone."""

from dataclasses import replace
from itertools import chain

import mlx.core as mx
import pytest
from cli.tools import zoo_model

from mlx_tq.cache.batch import BatchCompressedKVCache
from mlx_tq.config import EvictConfig
from mlx_tq.models import load
from mlx_tq.prefix_cache.folder import Folder
from mlx_tq.prompt_cache.compressed import plan_caches
from mlx_tq.server.conversation import Prompt
from mlx_tq.server.jobs import Job, Piece, Progress, Started

from .engines import CONFIG, GREEDY, make_engine, make_job, outcome, serve

SYSTEM, MORE = make_job(384).prompt.ids, make_job(128, seed=7).prompt.ids


def job_of(*segments, max_tokens=6):
    return Job(Prompt(list(chain(*segments)), list(segments), ["user"] * len(segments)), max_tokens, GREEDY, [])


def own(seed, count=20):
    return make_job(count + 1, seed=seed).prompt.ids[1:]  # the first is the same for all seeds


def jobs():
    """Five with one beginning, the second and the third with a longer one; and one with another."""
    two = [job_of(SYSTEM, [*MORE, *own(seed)]) for seed in (3, 4)]
    return [job_of(SYSTEM, own(2)), *two, job_of(SYSTEM, own(5)), job_of(SYSTEM, own(6)), job_of(own(8, 360))]


def told(events):
    assert isinstance(events[0], Started)
    return "".join(event.text for event in events if isinstance(event, Piece)), events[0].cached


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """A tiny model of plain attention."""
    return load(zoo_model(tmp_path_factory.mktemp("models") / "llama", "llama"))


@pytest.fixture(scope="module")
def alone(loaded):
    return one_by_one(loaded)


def one_by_one(loaded, config=CONFIG, asked=jobs):
    """The answers to jobs, each read in full by an engine of nothing."""
    return [told(*serve(make_engine(loaded, config), [job]))[0] for job in asked()]


def watched(engine):
    """What is seen at each step: answers in the batch, bytes that are held, those reserved, and distinct buffers."""
    seen, measure = [], engine._measure

    def look():
        batches = engine._batch._generation_batch, engine._batch._prompt_batch
        layers = [layer for batch in batches for layer in batch.prompt_cache or ()]
        rows = [row for layer in layers if isinstance(layer, BatchCompressedKVCache) for row in layer.rows]
        arrays = {id(array): array.nbytes for row in rows for array in row.arrays()}
        bodies = {id(array) for row in rows for array in row._body.arrays}
        seen.append((len(engine._running), sum(arrays.values()), engine._beginnings.reserved(engine._running.values())))
        seen[-1] += (len(bodies),)
        measure()

    engine._measure = look
    return seen


OTHERS = [("llama", False), ("gemma3_text", True), ("qwen3_next", True), ("embedded", True)]


@pytest.mark.parametrize(
    ("name", "stored"), [("llama", True), *(pytest.param(*each, marks=pytest.mark.full) for each in OTHERS)]
)
def test_what_is_common_is_read_once(name, stored, tmp_path):
    loaded = load(None if name == "embedded" else zoo_model(tmp_path / name, name))
    if name == "embedded":
        loaded[0].set_dtype(mx.float32)
    alone = one_by_one(loaded)
    folder = Folder(tmp_path / "store") if stored else None
    engine = make_engine(loaded, folder=folder, prompt_cache_size=0)
    seen = watched(engine)
    found = [told(events) for events in serve(engine, jobs())]
    assert [text for text, _ in found] == alone
    # Of the two with more in common the second follows the first, as far as a step of both ends.
    assert [cached for _, cached in found] == [0, 384, 512, 384, 384, 0]
    assert all(held <= reserved for _, held, reserved, _ in seen)
    assert max(seen)[0] == 6
    assert max(seen)[3] <= len(engine._plan.layers) * (1 + 6 + 1), "what all have, what two have, and each one's own"
    if stored:
        again = [told(events) for events in serve(make_engine(loaded, folder=folder, prompt_cache_size=0), jobs())]
        assert again == list(zip(alone, [384, 512, 512, 384, 384, 359], strict=True))


def test_it_counts_once_against_the_memory(loaded, alone):
    """Six that could not run at once if each counted in full."""
    plan = plan_caches(loaded[0], CONFIG)
    full = [plan.nbytes(job.tokens) for job in jobs()]
    limit = sum(full) - 3 * plan.shared_nbytes(384, 600)
    engine = make_engine(loaded, memory=limit, prompt_cache_size=0)
    seen = watched(engine)
    assert [told(events)[0] for events in serve(engine, jobs())] == alone
    assert max(seen)[0] == 6
    assert all(held <= reserved <= limit for _, held, reserved, _ in seen)


def test_who_comes_later_shares_what_memory_has(loaded, alone):
    """The first is answering when the others come; memory has room for them because it holds the beginning."""
    plan = plan_caches(loaded[0], CONFIG)
    first, *others = jobs()[:5]
    first.max_tokens = 200
    limit = sum(plan.nbytes(job.tokens) for job in (first, *others)) - 3 * plan.shared_nbytes(384, 600)
    engine = make_engine(loaded, memory=limit)
    seen = watched(engine)

    async def then():
        engine.submit(first)
        while not isinstance(event := await first.events.get(), Piece):
            pass
        engine.submit(*others)
        found = [told(await outcome(job)) for job in others]
        engine.cancel(first)
        return event, found

    _, (_, found) = serve(engine, [], then)
    assert [text for text, _ in found] == alone[1:5]
    assert [cached for _, cached in found] == [384, 512, 384, 384]
    assert max(seen)[0] == 5
    assert all(held <= reserved <= limit for _, held, reserved, _ in seen)


def test_others_go_on_without_the_first(loaded, alone):
    """It is cancelled, or fails with what is in the batch, before it has read what they wait for."""

    async def cancelled():
        engine.submit(*(asked := jobs()[:5]))
        while not isinstance(await asked[0].events.get(), Progress):
            pass
        engine.cancel(asked[0])
        engine.cancel(asked[3])
        return [told(await outcome(asked[place])) for place in (1, 2, 4)], asked[3]

    engine = make_engine(loaded, prompt_cache_size=0)
    _, (found, gone) = serve(engine, [], cancelled)
    assert gone.events.qsize() <= 1, "it began, or not even that"
    assert not engine._running
    assert found == [(alone[1], 0), (alone[2], 512), (alone[4], 384)]
    engine, faults = make_engine(loaded, prompt_cache_size=0), [RuntimeError("the first step fails")]
    read = engine._after_reading

    def fail(responses):
        if faults:
            raise faults.pop()
        read(responses)

    engine._after_reading = fail
    first, *others = serve(engine, jobs()[:5])
    assert "the first step fails" in str(first[-1].error)
    assert [told(events)[0] for events in others] == alone[1:5]


def test_rows_that_leave_are_nobody_elses(loaded):
    """Two go on together; a third with the same beginning, which is to lose tokens, reads alone and loses its own."""
    config = replace(CONFIG, evict=EvictConfig("knorm:trigger=32:granularity=1", budget=480, recall="off"))

    def asked():
        return [*(job_of(SYSTEM, own(seed)) for seed in (2, 3)), job_of(SYSTEM, own(4, 240))]

    found = [told(events) for events in serve(make_engine(loaded, config), asked())]
    assert found == list(zip(one_by_one(loaded, config, asked), [0, 384, 0], strict=True))
