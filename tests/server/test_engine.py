"""The engine in this process, where its caches and every call of attention can be seen."""

import asyncio
import math
import threading
import time
from dataclasses import replace

import mlx.core as mx
import pytest
from cli.tools import facts
from contract.spies import watch

from mlx_tq.cache.batch import BatchCompressedKVCache
from mlx_tq.config import PROFILES, EvictConfig, KVConfig
from mlx_tq.models import load
from mlx_tq.prompt_cache.compressed import plan_caches
from mlx_tq.prompt_cache.passes import sequence_in
from mlx_tq.server.conversation import Prompt
from mlx_tq.server.errors import ModelFailedError, QueueFullError, UnavailableError
from mlx_tq.server.jobs import Job, Left, Piece, Started
from mlx_tq.session.recall import recall

from .engines import CONFIG, GREEDY, LIMITS, make_engine, make_job, outcome, serve


def gauge(engine, name):
    return engine._metrics.registry.get_sample_value(f"mlx_tq_{name}")


def test_a_batch_attends_to_packed_rows(loaded, monkeypatch):
    """Each token of each answer runs over packed rows in each layer, and nothing is decoded to arrays."""
    engine = make_engine(loaded)
    monkeypatch.setattr("mlx_tq.server.engine._MEASURE_S", 0)
    seen = watch(monkeypatch)
    held, sizes = [], []
    measure = engine._measure

    def look():
        held.append([(type(cache), len(cache.rows)) for cache in engine._batch._generation_batch.prompt_cache])
        measure()
        planned = sum(engine._plan.nbytes(each.prefilled + each.generated) for each in engine._running.values())
        sizes.append([*(gauge(engine, name) for name in ("running", "kv_bytes", "kv_fp16_bytes")), planned])

    monkeypatch.setattr(engine, "_measure", look)
    jobs = [make_job(280 + 5 * n, seed=n) for n in range(5)]
    for events in serve(engine, jobs):
        assert isinstance(events[0], Started)
        assert sum(isinstance(event, Piece) for event in events) == 4 or events[-1].finish == "stop"
    layers = len(loaded[0].layers)
    assert [(BatchCompressedKVCache, 5)] * layers in held
    assert seen.materialized == 0
    assert seen.few >= 3 * 5 * layers
    assert seen.many >= 5 * layers
    assert max(sizes)[0] == 5
    assert all(compressed <= planned for _, compressed, _, planned in sizes)
    *_, (running, compressed, native, _), last = sizes
    assert running == 5
    assert 2 * native > 1.2 * compressed, "the model's own type is float32"
    assert last == [0, 0, 0, 0]


def test_a_batch_says_what_each_says_alone(loaded):
    """Prompts of different lengths, that begin at once; each is read in full, alone and in company."""

    def texts(jobs):
        said = serve(make_engine(loaded, prompt_cache_size=0), jobs)
        return ["".join(event.text for event in events if isinstance(event, Piece)) for events in said]

    def jobs():
        return [make_job(40 + 70 * n, max_tokens=12, seed=n) for n in range(4)]

    together = texts(jobs())
    assert len(set(together)) > 1
    assert together == [text for job in jobs() for text in texts([job])]


def test_jobs_wait_for_memory(loaded):
    """Two fit, so the third starts when one of them is done."""
    plan = plan_caches(loaded[0], CONFIG)
    jobs = [make_job(100, max_tokens=6 + 2 * n, seed=n) for n in range(3)]
    order = []
    engine = make_engine(loaded, memory=2 * plan.nbytes(110))
    for place, job in enumerate(jobs):
        put = job.events.put_nowait

        def note(event, place=place, put=put):
            order.append((place, "start" if isinstance(event, Started) else getattr(event, "finish", None)))
            put(event)

        job.events.put_nowait = note
    serve(engine, jobs)
    order = [entry for entry in order if entry[1]]
    assert [place for place, what in order[:2]] == [0, 1]
    assert order.index((2, "start")) == 3


def test_the_queue_is_bounded(loaded):
    """Also of an engine whose caches are mlx-lm's own."""
    engine = make_engine(loaded, PROFILES["off"], queue=2)
    jobs = [make_job(8), make_job(8)]

    async def main():
        with engine._changed:
            engine.start(asyncio.get_running_loop())
            for job in jobs:
                engine.submit(job)
            with pytest.raises(QueueFullError, match="2 requests are waiting"):
                engine.submit(make_job(8))
            engine.cancel(jobs[0])  # leaves its place to another
            engine.submit(make_job(8))
        return await outcome(jobs[1])

    try:
        assert asyncio.run(main())[-1].finish
    finally:
        engine.join(30)
    with pytest.raises(UnavailableError):
        engine.submit(make_job(8))


def test_stalled_step_is_reported(loaded):
    engine = make_engine(loaded, stalled_s=0.2)
    job = make_job(20, max_tokens=2)
    entered, goes_on, seen = threading.Event(), threading.Event(), []

    def stuck(tokens, logits):
        entered.set()
        goes_on.wait(30)
        return logits

    job.processors.append(stuck)

    def look():
        entered.wait(30)
        seen.append(engine.is_stalled)
        time.sleep(0.5)
        seen.append(engine.is_stalled)
        goes_on.set()

    async def idle():
        await asyncio.sleep(0.5)
        return engine.is_stalled

    looking = threading.Thread(target=look)
    looking.start()
    _, stalled_when_idle = serve(engine, [job], idle)
    looking.join()
    assert seen == [False, True]
    assert not stalled_when_idle


def test_model_failure_ends_only_its_batch(loaded, folder, monkeypatch):
    """A forward pass that raises; and weights that give NaN."""
    engine = make_engine(loaded)
    passes, kind = [], type(loaded[0])
    run = kind.__call__

    def broken(*arguments, **options):
        passes.append(arguments)
        if len(passes) == 4:
            raise RuntimeError("the model is broken")
        return run(*arguments, **options)

    monkeypatch.setattr(kind, "__call__", broken)

    async def again():
        job = make_job(20)
        engine.submit(job)
        return await outcome(job)

    jobs = [make_job(20, max_tokens=60), make_job(20, max_tokens=60, seed=2)]
    (one, two), later = serve(engine, jobs, then=again)
    assert all(isinstance(events[-1].error, ModelFailedError) for events in (one, two))
    assert later[-1].finish
    model, tokenizer = load(folder)
    model.model.norm.weight = mx.full(model.model.norm.weight.shape, math.nan)
    (events,) = serve(make_engine((model, tokenizer)), [make_job(20)])
    with pytest.raises(ModelFailedError, match="logits are NaN"):
        raise events[-1].error


def test_a_job_that_cannot_join_the_batch_fails_alone(loaded):
    """Others join it in the same moment, or are in it already."""
    engine = make_engine(loaded)
    impossible = {"max_tokens": 0}  # mlx-lm's batch refuses it

    async def late():
        running, second = make_job(20, max_tokens=30), make_job(20, **impossible)
        engine.submit(running)
        assert isinstance(await running.events.get(), Started)
        engine.submit(second)
        return await outcome(running), await outcome(second), await second.left.get(), engine.is_healthy

    jobs = [make_job(20), make_job(20, **impossible), make_job(30)]
    (one, two, three), (running, second, left, healthy) = serve(engine, jobs, then=late)
    assert one[-1].finish
    assert three[-1].finish
    assert running[-1].finish
    assert healthy
    for (event,) in (two, second):
        with pytest.raises(ModelFailedError, match="could not be begun"):
            raise event.error
    assert left == Left()


def test_stopping_ends_every_job(loaded):
    engine = make_engine(loaded, concurrency=1, prompt_concurrency=1)
    jobs = [make_job(8, max_tokens=4000), make_job(8)]

    async def main():
        engine.start(asyncio.get_running_loop())
        for job in jobs:
            engine.submit(job)
        assert isinstance(await jobs[0].events.get(), Started)
        engine.stop()
        return await asyncio.gather(*map(outcome, jobs))

    for events in asyncio.run(main()):
        assert isinstance(events[-1].error, UnavailableError)
    engine.join(30)
    assert not engine.is_healthy


@pytest.mark.parametrize(("recall", "shared"), [("auto", 60), ("off", 0)])
def test_with_eviction(loaded, monkeypatch, recall, shared):
    """Rows lose tokens in a batch; a prompt that shares a beginning which lost some has it back, or is read anew."""
    config = replace(CONFIG, evict=EvictConfig("knorm:trigger=32:granularity=1", 80, recall))
    engine = make_engine(loaded, config)
    kept = []
    keep = engine._kept_prompts.keep

    def look(tokens, caches, kind):
        kept.append((len(tokens), caches[0].offset, caches[0].size()))
        keep(tokens, caches, kind)

    monkeypatch.setattr(engine._kept_prompts, "keep", look)
    first = make_job(300)
    other = Prompt([*first.prompt.ids[:60], *range(300, 340)], [[*first.prompt.ids[:60], *range(300, 340)]], ["user"])

    async def again():
        job = Job(other, 4, GREEDY, [])
        engine.submit(job)
        return await outcome(job)

    _, later = serve(engine, [first, make_job(280, seed=9)], then=again)
    assert later[0] == Started(cached=shared)
    assert later[-1].finish
    assert all(length == offset for length, offset, _ in kept)
    assert max(length for length, _, _ in kept) > 300 > 250 > max(stored for _, _, stored in kept)


def test_an_archive_that_fails_is_logged_once_and_the_tokens_are_those_without_recall(loaded, monkeypatch, caplog):
    monkeypatch.setenv("XDG_CACHE_HOME", "/sys")  # in which root can make nothing either
    texts = []
    for rows in ("off", 96):
        evict = EvictConfig("recency:granularity=16:trigger=32", 100, rows)
        engine = make_engine(loaded, KVConfig("q8", "tq4", sinks=16, window=32, evict=evict))
        (events,) = serve(engine, [make_job(300)])
        texts.append([event.text for event in events if isinstance(event, Piece)])
    assert texts[0] == texts[1]
    (said,) = [record.message for record in caplog.records if "archive" in record.message]
    assert "no file can be made in /sys/mlx_tq" in said


@pytest.mark.parametrize("step", [LIMITS["prefill_step_size"], pytest.param(2048, marks=pytest.mark.full)])
def test_rows_come_back_for_the_question_of_a_request(loaded, step):
    """Of prompts side by side, each its own; before the next one asks they have left again. Also where the whole
    document is read in one step, whose round is held before the question.
    """
    tokenizer = loaded[1]
    config = KVConfig(
        "q8", "tq4", sinks=16, window=32, evict=EvictConfig("recency:granularity=16:trigger=32", 160, "off")
    )

    def answers(config):
        engine, jobs = make_engine(loaded, config, prefill_step_size=step), []
        for code in (417295, 860312):
            text, question = facts(40, code)
            said = tokenizer.apply_chat_template(
                [{"role": "user", "content": f"{text}\n\n{question}"}], add_generation_prompt=True
            )
            jobs.append(Job(Prompt(said, [said], ["user"]), 8, GREEDY, []))
        kept = []
        engine._kept_prompts._kept.insert_cache = lambda model, tokens, caches, cache_type: kept.append(
            sequence_in(caches)
        )
        texts = ["".join(e.text for e in events if isinstance(e, Piece)) for events in serve(engine, jobs)]
        return texts, kept, engine._metrics.registry.get_sample_value("mlx_tq_recalled_tokens_total")

    texts, kept, recalled = answers(replace(config, evict=replace(config.evict, recall=96)))
    assert ["417295" in texts[0], "860312" in texts[1]] == [True, True]
    assert 0 < recalled <= 2 * 96
    assert len(kept) == 4, "at the ends of prompts and answers"
    assert all(sequence.archived and not len(sequence.recalled) for sequence in kept)
    texts, _, recalled = answers(config)
    assert (["417295" in texts[0], "860312" in texts[1]], recalled) == ([False, False], 0)


def test_a_look_that_fails_ends_its_request_and_the_next_one_is_answered(loaded, monkeypatch):
    """It fails between two steps, with the document read and the question not."""
    config = KVConfig("q8", "tq4", sinks=16, window=32, evict=EvictConfig("recency:trigger=32", 160, recall=96))
    engine = make_engine(loaded, config)

    def fail(*_, **__):
        monkeypatch.undo()
        raise MemoryError("no room for a copy")

    monkeypatch.setattr("mlx_tq.server.asking.recall", fail)
    text, question = facts(40)
    ids = loaded[1].encode(f"{text}\n{question}")
    first, second = (Job(Prompt(ids, [ids], ["user"]), 8, GREEDY, []) for _ in range(2))

    async def again():
        engine.submit(second)
        return await outcome(second)

    (failed,), answered = serve(engine, [first], again)
    assert isinstance(failed[-1].error, ModelFailedError)
    assert "no room for a copy" in str(failed[-1].error)
    assert any(isinstance(event, Piece) for event in answered)
    assert engine._metrics.registry.get_sample_value("mlx_tq_recalled_tokens_total") > 0


def test_a_request_that_is_repeated_asks_with_its_whole_question(loaded, monkeypatch):
    """What is kept of the first time ends before it: its last token alone would bring back something else."""
    config = KVConfig("q8", "tq4", sinks=16, window=32, evict=EvictConfig("recency:trigger=32", 160, recall=96))
    engine, asked = make_engine(loaded, config), []

    def spied(model, caches, ids, *arguments, **options):
        found = recall(model, caches, ids, *arguments, **options)
        asked.append((ids, found.positions))
        return found

    monkeypatch.setattr("mlx_tq.server.asking.recall", spied)
    text, question = facts(40)
    ids = loaded[1].encode(f"{text}\n{question}")
    first, second = (Job(Prompt(ids, [ids], ["user"]), 8, GREEDY, []) for _ in range(2))

    async def again():
        engine.submit(second)
        return await outcome(second)

    (once,), twice = serve(engine, [first], again)
    assert [event.text for event in once if isinstance(event, Piece)] == [
        event.text for event in twice if isinstance(event, Piece)
    ]
    assert (once[0].cached, twice[0].cached) == (0, len(ids) - len(asked[0][0]))
    assert asked[0] == asked[1]
    assert asked[0][1]
