"""The engine in this process, driven by jobs and observed through events, metrics and forward passes."""

import asyncio
import math
import time
from dataclasses import replace
from threading import Event
from types import SimpleNamespace

import mlx.core as mx
import pytest
from cli.tools import facts, zoo_model
from contract.spies import watch
from mlx_lm.sample_utils import make_sampler

from mlx_tq.config import PROFILES, EvictConfig, KVConfig
from mlx_tq.kernels import execution_record
from mlx_tq.models import load
from mlx_tq.prompt_cache.compressed import plan_caches
from mlx_tq.prompt_cache.layer_group import layer_group_of
from mlx_tq.server.api_errors import ModelFailedError, QueueFullError, UnavailableError
from mlx_tq.server.job import Piece, SessionResult, Started
from mlx_tq.server.prompt_memory import PromptMemory
from mlx_tq.session.restore import recall_rows

from .engines import (
    CONFIG,
    LIMITS,
    job_of,
    make_engine,
    make_job,
    metric,
    outcome,
    random_ids,
    record_gauge,
    run_job,
    serve,
    text_of,
    tokens_of,
    watch_passes,
)

RECALL = KVConfig("q8", "tq4", sinks=16, window=32, evict=EvictConfig("recency:trigger=32", 160, recall=96))


def test_a_batch_attends_to_packed_rows(loaded, monkeypatch):
    engine, plan = make_engine(loaded, decode_share=0.0), plan_caches(loaded[0], CONFIG)
    calls, sizes = watch(monkeypatch), []
    gauges = engine.metrics.running, engine.metrics.kv_bytes, engine.metrics.kv_native_bytes
    running, compressed, native = (record_gauge(monkeypatch, gauge) for gauge in gauges)
    watch_passes(monkeypatch, loaded[0], lambda layers: sizes.append([len(rows) for rows in layers]))
    for events in serve(engine, [make_job(280 + 5 * n, seed=n, max_tokens=40) for n in range(5)]):
        assert isinstance(events[0], Started)
        assert sum(isinstance(event, Piece) for event in events) == 40 or events[-1].finish_reason == "stop"
    layers = len(loaded[0].layers)
    assert [5] * layers in sizes
    assert calls["materialize"] == 0
    assert calls["attend"] + calls["attend_batch"] >= 3 * 5 * layers
    assert calls["prefill"] >= 5 * layers
    assert max(running) == 5
    assert max(compressed) <= 5 * plan.cache_peak_nbytes(340)
    assert max(native) == 5 * plan.native_nbytes(340) > 1.2 * max(compressed)
    assert [running[-1], compressed[-1], native[-1]] == [0, 0, 0]


def test_a_batch_generates_what_each_job_generates_alone(loaded):
    def texts(jobs):
        return [text_of(events) for events in serve(make_engine(loaded, prompt_cache_bytes=0), jobs)]

    def jobs():
        return [make_job(40 + 70 * n, max_tokens=8, seed=n) for n in range(3)]

    together = texts(jobs())
    assert len(set(together)) > 1
    assert together == [text for job in jobs() for text in texts([job])]


def test_jobs_wait_for_memory(loaded, monkeypatch):
    plan = plan_caches(loaded[0], CONFIG)
    engine = make_engine(loaded, memory=2 * plan.nbytes(110))
    waiting, running = (record_gauge(monkeypatch, g) for g in (engine.metrics.waiting, engine.metrics.running))
    jobs = [make_job(100, max_tokens=6 + 2 * n, seed=n) for n in range(3)]
    assert all(events[-1].finish_reason for events in serve(engine, jobs))
    assert max(running) == 2
    assert 1 in waiting[1:]


def test_a_cancelled_job_that_waits_for_memory_lets_others_pass(loaded, monkeypatch):
    engine = make_engine(loaded, memory=2 * plan_caches(loaded[0], CONFIG).nbytes(110))
    running = record_gauge(monkeypatch, engine.metrics.running)
    first, large, small = make_job(100), make_job(180), make_job(100, seed=2)
    large.cancelled.set()

    async def run():
        engine.submit(first, large, small)
        return await asyncio.gather(outcome(first), outcome(small))

    _, events = serve(engine, [], run)
    assert [of_job[-1].finish_reason for of_job in events] == ["length", "length"]
    assert max(running) == 2


def test_a_stalled_step_is_reported_and_the_queue_is_bounded(loaded):
    """A cancelled job makes room for another. Nothing is compressed."""
    engine, (entered, release) = make_engine(loaded, PROFILES["off"], queue=2, stalled_s=0.2), (Event(), Event())

    def block(tokens, logits):
        entered.set()
        release.wait(30)
        return logits

    running, waiting = make_job(8, processors=[block]), [make_job(8) for _ in range(3)]

    async def then():
        engine.submit(running)
        await asyncio.to_thread(entered.wait, 30)
        stalled = [engine.is_stalled]
        time.sleep(0.5)
        stalled.append(engine.is_stalled)
        with pytest.raises(QueueFullError, match="2 requests are waiting"):
            engine.submit(*waiting)
        engine.submit(waiting[0])
        engine.submit(waiting[1])
        with pytest.raises(QueueFullError, match="2 requests are waiting"):
            engine.submit(waiting[2])
        engine.cancel(waiting[0])
        engine.submit(waiting[2])
        release.set()
        answered = [await outcome(job) for job in waiting[1:]]
        await asyncio.sleep(0.5)
        stalled.append(engine.is_stalled)  # while idle
        return stalled, answered, await waiting[0].session_result.get()

    stalled, answered, result = serve(engine, [], then)[1]
    assert stalled == [False, True, False]
    assert all(events[-1].finish_reason for events in answered)
    assert result == SessionResult()


def test_a_model_failure_ends_only_its_batch(loaded, folder, monkeypatch):
    engine, passes = make_engine(loaded), []

    def fail_at_fourth(layers):
        passes.append(layers)
        if len(passes) == 4:
            raise RuntimeError("the model is broken")

    watch_passes(monkeypatch, loaded[0], fail_at_fourth)
    jobs = [make_job(20, max_tokens=60), make_job(20, max_tokens=60, seed=2)]
    failed, later = serve(engine, jobs, then=lambda: run_job(engine, make_job(20)))
    assert all(isinstance(events[-1], ModelFailedError) for events in failed)
    assert later[-1].finish_reason
    model, tokenizer = load(folder)
    model.model.norm.weight = mx.full(model.model.norm.weight.shape, math.nan)
    (events,) = serve(make_engine((model, tokenizer)), [make_job(20)])
    with pytest.raises(ModelFailedError, match="logits are NaN"):
        raise events[-1]


@pytest.mark.parametrize("fails_at", [pytest.param((3,), marks=pytest.mark.full), (9, 10)])
def test_a_memory_error_loses_no_answer(loaded, monkeypatch, fails_at):
    """In a prefill, and while decoding, twice. A job that does not even fit alone fails."""
    lengths = {20: 20, 90: 12, 200: 15}  # tokens of prompts, and of their answers

    def jobs():
        return [make_job(size, seed=size, max_tokens=count) for size, count in lengths.items()]

    config = replace(CONFIG, window=512)  # nothing is packed, so that a prefill computes what decoding did
    expected = serve(make_engine(loaded, config, prompt_cache_bytes=0), jobs())
    engine, passes = make_engine(loaded, config, prompt_cache_bytes=0), []

    def fail(layers):
        passes.append(len(layers[0]))
        if len(passes) in fails_at:
            raise RuntimeError("[metal::malloc] Unable to allocate 1000000 bytes.")

    watch_passes(monkeypatch, loaded[0], fail)
    answered = serve(engine, jobs())
    assert len(passes) > max(fails_at)
    for events, undisturbed in zip(answered, expected, strict=True):
        assert text_of(events) == text_of(undisturbed)
        assert [event for event in events if isinstance(event, Started)] == [Started(0)]
        pieces = [[event.finish_reason for event in both if isinstance(event, Piece)] for both in (events, undisturbed)]
        assert pieces[0] == pieces[1]


def test_a_job_that_cannot_join_the_batch_fails_alone(loaded):
    engine = make_engine(loaded)
    impossible = {"max_tokens": 0}  # mlx-lm's batch refuses it

    async def then():
        running, second = make_job(20, max_tokens=30), make_job(20, **impossible)
        engine.submit(running)
        assert isinstance(await running.events.get(), Started)
        engine.submit(second)
        return await outcome(running), await outcome(second), await second.session_result.get(), engine.is_healthy

    jobs = [make_job(20), make_job(20, **impossible), make_job(30)]
    (one, two, three), (running, second, result, healthy) = serve(engine, jobs, then=then)
    assert one[-1].finish_reason
    assert three[-1].finish_reason
    assert running[-1].finish_reason
    assert healthy
    for events in (two, second):
        with pytest.raises(ModelFailedError, match="could not be started"):
            raise events[-1]
    assert result == SessionResult()


def test_a_processor_sees_each_token_of_a_job_that_joins_a_batch_without_one(loaded):
    engine, calls = make_engine(loaded), []

    def force(tokens, logits):
        calls.append(tokens.size)
        return mx.where(mx.arange(logits.shape[1]) == 300, 0.0, -math.inf)[None]

    async def then():
        free = make_job(8, max_tokens=4000)
        engine.submit(free)
        while not isinstance(await free.events.get(), Piece):
            pass
        job = make_job(30, seed=2, max_tokens=12, processors=[force], logprobs=0)
        events = await run_job(engine, job)
        meanwhile = free.events.qsize()
        engine.cancel(free)
        return events, meanwhile

    events, meanwhile = serve(engine, [], then)[1]
    assert tokens_of(events) == [300] * 12
    assert calls[:12] == list(range(30, 42))
    assert meanwhile > 10


@pytest.mark.parametrize("name", ["gemma3_text", pytest.param("gpt_oss", marks=pytest.mark.full)])
def test_sliding_windows_in_a_batch(name, tmp_path, monkeypatch):
    """Second turns, whose windows are full, join prompts without any row; memory is cleared meanwhile."""
    loaded, offsets = load(zoo_model(tmp_path / name, name)), []
    record_stored_prompts(
        monkeypatch, lambda tokens, caches: offsets.append({len(tokens), *(cache.offset for cache in caches)})
    )
    watch_passes(monkeypatch, loaded[0], lambda layers: mx.clear_cache())

    async def two_turns():
        first = [make_job(count, seed=count, max_tokens=12, logprobs=0) for count in (10, 90, 200)]
        engine.submit(*first)
        prompts = [[*job.prompt.ids, *tokens_of(await outcome(job)), *random_ids(9, seed=5)] for job in first]
        prompts += [random_ids(count, seed=count)[1:] for count in (12, 150)]
        jobs = [job_of(ids, max_tokens=6) for ids in prompts]
        engine.submit(*jobs)
        return prompts, [await outcome(job) for job in jobs]

    engine = make_engine(loaded)
    prompts, answers = serve(engine, [], two_turns)[1]
    assert [events[0].cached_tokens for events in answers] == [*(len(ids) - 9 for ids in prompts[:3]), 0, 0]
    assert all(len(lengths) == 1 for lengths in offsets)
    for ids, events in zip(prompts, answers, strict=True):
        (alone,) = serve(make_engine(loaded), [job_of(ids, max_tokens=6)])
        assert text_of(events) == text_of(alone)


def test_the_prompt_cache_keeps_its_limit(loaded, monkeypatch):
    """By the bytes that are held: those of mlx-lm's cache would be over the limit with one prompt."""
    plan = plan_caches(loaded[0], CONFIG)
    engine = make_engine(loaded, prompt_cache_bytes=(limit := plan.native_nbytes(280)))
    nbytes, entries = (
        record_gauge(monkeypatch, gauge)
        for gauge in (engine.metrics.prompt_cache_bytes, engine.metrics.prompt_cache_entries)
    )
    serve(engine, [make_job(300, seed=n, max_tokens=1) for n in range(6)])
    assert max(nbytes) <= limit
    assert 1 < max(entries) < 6


def test_the_speed_of_prefill_is_that_of_the_latest_steps(tmp_path, monkeypatch):
    """The clock is the test's: a step takes a second, and the first three, on a busy machine, take twenty."""
    loaded, seconds, clock = load(zoo_model(tmp_path / "llama", "llama")), iter([20.0] * 3), [0.0]

    def tick(layers):
        clock[0] += next(seconds, 1.0)

    watch_passes(monkeypatch, loaded[0], tick)
    monkeypatch.setattr("mlx_tq.server.engine.time", SimpleNamespace(monotonic=lambda: clock[0]))
    engine = make_engine(loaded, prefill_step_size=8, metrics_interval_s=1000)
    serve(engine, [make_job(1200, max_tokens=1)])
    assert engine.estimate(random_ids(801, seed=2)[1:])["prefill_seconds"] == pytest.approx(100, rel=0.1)


def test_engines_do_not_draw_the_same_random_numbers(loaded):
    sampler = make_sampler(5.0)
    answers = [text_of(serve(make_engine(loaded), [make_job(20, max_tokens=12, sampler=sampler)])[0]) for _ in range(2)]
    assert answers[0] != answers[1]


def test_stopping_ends_every_job(loaded):
    engine = make_engine(loaded, concurrency=1, prompt_concurrency=1)
    jobs = [make_job(8, max_tokens=4000), make_job(8)]

    async def then():
        engine.submit(*jobs)
        assert isinstance(await jobs[0].events.get(), Started)
        engine.stop()
        return await asyncio.gather(*map(outcome, jobs))

    for events in serve(engine, [], then)[1]:
        assert isinstance(events[-1], UnavailableError)
    assert not engine.is_healthy
    with pytest.raises(UnavailableError):
        engine.submit(make_job(8))


def record_stored_prompts(monkeypatch, note):
    """Call `note(tokens, caches)` for everything that is stored in memory."""
    insert = PromptMemory.insert

    def patched(self, tokens, caches):
        note(tokens, caches)
        insert(self, tokens, caches)

    monkeypatch.setattr(PromptMemory, "insert", patched)


@pytest.mark.parametrize(("rows", "shared"), [("auto", 60), pytest.param("off", 0, marks=pytest.mark.full)])
def test_eviction_in_a_batch(loaded, monkeypatch, rows, shared):
    """A prompt whose shared prefix lost tokens has them recalled, or is prefilled in full."""
    config = replace(CONFIG, evict=EvictConfig("knorm:trigger=32:granularity=1", 80, rows))
    engine, stored = make_engine(loaded, config), []
    record_stored_prompts(
        monkeypatch, lambda tokens, caches: stored.append((len(tokens), caches[0].offset, caches[0].size()))
    )
    first = make_job(300)
    later = job_of([*first.prompt.ids[:60], *range(300, 340)])
    unlike = job_of(random_ids(280, seed=9)[1:])
    _, events = serve(engine, [first, unlike], then=lambda: run_job(engine, later))
    assert events[0] == Started(cached_tokens=shared)
    assert events[-1].finish_reason
    assert all(length == offset for length, offset, _ in stored)
    assert max(length for length, _, _ in stored) > 300 > 250 > max(live for _, _, live in stored)


def test_the_log_says_once_what_ran(loaded, caplog):
    caplog.set_level("INFO", "mlx_tq.server.engine")
    execution_record.clear()
    serve(make_engine(loaded), [make_job(300), make_job(310, seed=1)])
    (message,) = [record.message for record in caplog.records if "first answer" in record.message]
    assert message.startswith("the first answer ran on cpu kernels; prefill: attend")
    assert message.endswith("; decode: attend; in full precision: no layer")


def test_a_failing_archive_is_logged_once_and_changes_no_token(loaded, monkeypatch, caplog):
    monkeypatch.setenv("XDG_CACHE_HOME", "/sys")  # not even root can write there
    texts = []
    for rows in ("off", 96):
        evict = EvictConfig("recency:granularity=16:trigger=32", 100, rows)
        engine = make_engine(loaded, KVConfig("q8", "tq4", sinks=16, window=32, evict=evict))
        texts.append(text_of(*serve(engine, [make_job(300)])))
    assert texts[0] == texts[1]
    (message,) = [record.message for record in caplog.records if "archive" in record.message]
    assert "no file can be made in /sys/mlx_tq" in message


@pytest.mark.parametrize("step", [LIMITS["prefill_step_size"], pytest.param(2048, marks=pytest.mark.full)])
def test_rows_are_recalled_for_the_question_of_a_request(loaded, monkeypatch, step):
    """Each prompt of a batch recalls its own rows, which are evicted again before the caches are stored."""
    evict, stored = EvictConfig("recency:granularity=16:trigger=32", 160, "off"), []
    record_stored_prompts(monkeypatch, lambda tokens, caches: stored.append(layer_group_of(caches)))

    def answers(evict):
        engine, jobs = make_engine(loaded, replace(RECALL, evict=evict), prefill_step_size=step), []
        for code in (417295, 860312):
            message = {"role": "user", "content": "\n\n".join(facts(20, code))}
            jobs.append(job_of(loaded[1].apply_chat_template([message], add_generation_prompt=True), max_tokens=8))
        stored.clear()
        return [text_of(events) for events in serve(engine, jobs)], metric(engine, "recalled_tokens_total")

    texts, recalled = answers(replace(evict, recall=96))
    assert ["417295" in texts[0], "860312" in texts[1]] == [True, True]
    assert 0 < recalled <= 2 * 96
    assert len(stored) == 4, "at the ends of prompts and answers"
    assert all(sequence.archived and not len(sequence.recalled) for sequence in stored)
    texts, recalled = answers(evict)
    assert (["417295" in texts[0], "860312" in texts[1]], recalled) == ([False, False], 0)


def question_job(loaded):
    text, question = facts(24)
    return job_of(loaded[1].encode(f"{text}\n{question}"), max_tokens=8)


def test_a_failing_recall_ends_its_request_only(loaded, monkeypatch):
    engine = make_engine(loaded, RECALL)

    def fail(*_, **__):
        monkeypatch.undo()
        raise MemoryError("no room for a copy")

    monkeypatch.setattr("mlx_tq.session.restore.recall_rows", fail)
    (failed,), answered = serve(engine, [question_job(loaded)], lambda: run_job(engine, question_job(loaded)))
    assert isinstance(failed[-1], ModelFailedError)
    assert "no room for a copy" in str(failed[-1])
    assert any(isinstance(event, Piece) for event in answered)
    assert metric(engine, "recalled_tokens_total") > 0


def test_a_repeated_request_recalls_with_its_whole_question(loaded, monkeypatch):
    """The stored prompt ends before the question."""
    engine, calls = make_engine(loaded, RECALL), []

    def spied(model, caches, ids, *arguments, **options):
        recalled = recall_rows(model, caches, ids, *arguments, **options)
        calls.append((ids, recalled.positions))
        return recalled

    monkeypatch.setattr("mlx_tq.session.restore.recall_rows", spied)
    job = question_job(loaded)
    (first,), second = serve(engine, [job], lambda: run_job(engine, question_job(loaded)))
    assert text_of(first) == text_of(second)
    assert (first[0].cached_tokens, second[0].cached_tokens) == (0, len(job.prompt.ids) - len(calls[0][0]))
    assert calls[0] == calls[1]
    assert calls[0][1]
