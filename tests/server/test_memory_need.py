"""Memory: what answers, states and prefill steps take, and who waits or is refused for lack of it."""

import asyncio

import mlx.core as mx
import pytest
from cli.tools import zoo_model

from mlx_tq.errors import ConfigError
from mlx_tq.models import load
from mlx_tq.prompt_cache.compressed import plan_caches
from mlx_tq.prompt_cache.memory import other_bytes

from .engines import CONFIG, make_engine, make_job, outcome, record_gauge, serve, watch_passes

TOKENS, ANSWER, STEP = 300, 6, 192
AMPLE = 2**40


def most_running(monkeypatch, engine):
    """Return how many of three jobs run at most at once."""
    running = record_gauge(monkeypatch, engine.metrics.running)
    events = serve(engine, [make_job(TOKENS, max_tokens=ANSWER, seed=n) for n in range(3)])
    assert all(answer[-1].finish_reason for answer in events)
    return max(running)


def engine_with(loaded, memory, *, includes_steps=True):
    limits = {"memory": memory, "memory_includes_steps": includes_steps, "prefill_step_size": STEP}
    return make_engine(loaded, prompt_cache_bytes=0, **limits)


def test_a_job_waits_until_its_prefill_steps_fit(loaded, monkeypatch):
    need = engine_with(loaded, AMPLE).memory_need
    caches, step = need.caches_nbytes(TOKENS + ANSWER), need.step_nbytes(TOKENS + ANSWER)
    assert step > caches / 4
    most = []
    for memory, includes_steps in ((2 * caches, True), (2 * caches, False), (2 * caches + step, True)):
        most.append(most_running(monkeypatch, engine_with(loaded, memory, includes_steps=includes_steps)))
        monkeypatch.undo()
    assert most == [1, 2, 2]


def test_steps_take_no_more_than_computed(loaded):
    engine = engine_with(loaded, AMPLE)
    computed = engine.memory_need.step_nbytes(TOKENS + ANSWER)
    serve(engine, [make_job(TOKENS, max_tokens=ANSWER), make_job(50, max_tokens=ANSWER)])
    assert engine.memory_need.step_nbytes(TOKENS + ANSWER) == computed


@pytest.mark.full
def test_a_model_whose_steps_take_more_than_computed_makes_later_jobs_wait(loaded, monkeypatch):
    extra, need = 1 << 26, engine_with(loaded, AMPLE).memory_need
    memory = 3 * need.caches_nbytes(TOKENS + ANSWER) + 2 * need.step_nbytes(TOKENS + ANSWER)
    engine = engine_with(loaded, memory)
    engine.memory_need.check(TOKENS, TOKENS + ANSWER)
    running = record_gauge(monkeypatch, engine.metrics.running)
    watch_passes(monkeypatch, loaded[0], lambda layers: mx.eval(mx.zeros(extra // 4)))

    async def then():
        before = max(running)
        running.clear()
        later = [make_job(TOKENS, max_tokens=ANSWER, seed=10 + n) for n in range(3)]
        engine.submit(*later)
        answers = await asyncio.gather(*map(outcome, later))
        assert all(answer[-1].finish_reason for answer in answers)
        return before, max(running)

    jobs = [make_job(TOKENS, max_tokens=ANSWER, seed=n) for n in range(3)]
    assert serve(engine, jobs, then)[1] == (3, 1)
    assert engine.memory_need.step_nbytes(TOKENS + ANSWER) >= 0.9 * extra  # what caches grew by meanwhile is theirs
    with pytest.raises(ConfigError, match=rf"in prefill steps of {STEP}, \S+ MB for a moment; \S+ MB are available"):
        engine.memory_need.check(TOKENS, TOKENS + ANSWER)


def test_what_a_short_prompt_took_beyond_the_computed_is_not_multiplied(loaded, monkeypatch):
    """Its step is much shorter and takes as much more: a long prompt is not refused for that."""
    extra, need, long = 1 << 26, engine_with(loaded, AMPLE).memory_need, 4000
    engine = engine_with(loaded, need.caches_nbytes(long) + need.step_nbytes(long) + 2 * extra)
    watch_passes(monkeypatch, loaded[0], lambda layers: mx.eval(mx.zeros(extra // 4)))
    serve(engine, [make_job(40, max_tokens=ANSWER)])
    engine.memory_need.check(long - ANSWER, long)


def test_states_count_twice(tmp_path, monkeypatch):
    model, tokenizer = load(zoo_model(tmp_path / "qwen3_next", "qwen3_next"))
    packed = plan_caches(model, CONFIG).cache_peak_nbytes(TOKENS + ANSWER, STEP)
    states = other_bytes(model)(TOKENS + ANSWER)
    assert states > 0
    once, twice = (2 * (packed + count * states) for count in (1, 2))
    assert most_running(monkeypatch, engine_with((model, tokenizer), once, includes_steps=False)) == 1
    monkeypatch.undo()
    assert most_running(monkeypatch, engine_with((model, tokenizer), twice, includes_steps=False)) == 2
