"""Prefill steps: where they end, and whose turn it is. Short prompts do not wait for a long one, nor it for them."""

import asyncio
import json
from dataclasses import replace
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernel_cache import make_cache_folder
from zoo import build

from mlx_tq.config import BLOCK, KVConfig
from mlx_tq.prompt_cache.memory import MAX_PREFILL_STEP
from mlx_tq.server import prefill_grid
from mlx_tq.server.job import Piece, PrefillProgress
from mlx_tq.server.prefill_grid import PrefillGrid, measured_grid
from mlx_tq.server.prefill_order import PrefillOrder, PromptToPrefill

from .engines import CONFIG, job_of, make_engine, outcome, random_ids, run_job, serve, text_of, with_others

LENGTHS = st.lists(st.integers(1, 400), min_size=1, max_size=4)


@given(st.integers(1, 64).map(lambda n: n * BLOCK), st.floats(0, 1e-2), LENGTHS, st.integers(0, 300))
def test_steps_end_at_the_same_positions_wherever_a_prompt_continues(first, growth, lengths, start):
    grid, total = PrefillGrid(first, growth), sum(lengths)
    segments = [[0] * length for length in lengths]
    whole = grid.ends(segments, 0)
    assert whole == sorted({*whole})
    assert whole[-1:] == [total - 1][: total > 1]
    assert all(stop - begin <= first for begin, stop in zip([0, *whole], whole, strict=False))
    rest, skipped = [], min(start, total - 1)
    before = 0
    for segment in segments:
        if before + len(segment) > skipped:
            rest.append(segment[max(0, skipped - before) :])
        before += len(segment)
    assert grid.ends(rest, skipped) == [end for end in whole if end > skipped]


def test_steps_get_shorter_where_attention_takes_longer():
    grid = PrefillGrid(1024, 1 / 8192)
    ends = grid.ends([[0] * 65536], 0)
    sizes = [stop - begin for begin, stop in zip([0, *ends], ends, strict=False)]
    assert sizes[0] == 1024
    assert sizes == sorted(sizes, reverse=True) or sizes[-1] < sizes[-2]
    assert sizes[-2] == 1024 // 9 // BLOCK * BLOCK
    assert PrefillGrid(100).ends([[0] * 250], 0) == [100, 200, 249]


def prompts_of(*remaining, full=100):
    return [PromptToPrefill(key, count, min(count, full), full) for key, count in enumerate(remaining)]


def test_the_least_work_goes_first_with_what_fits_into_the_same_step():
    order = PrefillOrder()
    assert order.choose([]) == []
    assert order.choose(prompts_of(900, 30, 40, 500)) == [1, 2]
    assert order.choose(prompts_of(30, 30, 30, 30)) == [0, 1, 2]
    assert order.choose(prompts_of(900, 500)) == [1]
    assert order.choose(prompts_of(900, 30, 40, 500)) == [0], "each fourth step is for the oldest"
    assert order.choose(prompts_of(900, 30)) == [1]


def test_a_short_prompt_overtakes_a_long_one_and_a_long_one_does_not_starve(loaded):
    """Steps are counted by the progress of the long prompt; each takes 32 tokens."""
    engine = make_engine(loaded, decode_share=0.0, concurrency=4, prefill_step_size=32)
    long, short = job_of(random_ids(32 * 30), max_tokens=4), job_of(random_ids(32 * 3, seed=2)[1:], max_tokens=60)

    async def progress(job):
        while not isinstance(event := await job.events.get(), PrefillProgress):
            assert not isinstance(event, Piece)
        return event.done // 32

    async def first_piece(job):
        while not isinstance(await job.events.get(), Piece):
            pass

    async def then():
        engine.submit(long)
        for _ in range(3):
            await progress(long)
        engine.submit(short)
        await first_piece(short)
        overtaken = long.events.qsize()
        others = 0
        while not any(isinstance(event, Piece) for event in long.events._queue):  # short prompts keep coming
            other = job_of(random_ids(32 * 4, seed=100 + others)[1:], max_tokens=1)
            engine.submit(other)
            await first_piece(other)
            others += 1
            assert others < 60
        return overtaken, others

    overtaken, others = serve(engine, [], then)[1]
    assert overtaken <= 4, "it was running a step when the short one came, and got every fourth one"
    assert others > 5, "and the short ones did not wait for it"


@pytest.mark.full
def test_answers_of_prompts_that_wait_are_the_same(loaded):
    jobs = lambda: [job_of(random_ids(n, seed=n)[1:], max_tokens=6) for n in (700, 130, 260, 90, 500)]  # noqa: E731
    alone = [text_of(*serve(make_engine(loaded), [job])) for job in jobs()]
    assert [text_of(events) for events in serve(make_engine(loaded), jobs())] == alone


@pytest.mark.full
def test_choices_of_a_prompt_that_wait_are_the_same_and_are_stored(loaded):
    """The eighth step is for the older prompt, with 20 tokens, and for the first two of the four answers."""
    ids, prompt = random_ids(500), random_ids(64 * 6 + 2, seed=2)[1:]
    (alone,) = serve(make_engine(loaded), [job_of(prompt, max_tokens=6)])
    engine = make_engine(loaded, decode_share=0.0)

    async def then():
        choices = with_others(job_of(prompt, max_tokens=6), 3)
        engine.submit(job_of(ids[:84], ids[84:]), choices)
        events = await outcome(choices)
        return events, await run_job(engine, job_of(prompt, max_tokens=6))

    events, again = serve(engine, [], then)[1]
    assert {text_of(events, index) for index in range(4)} == {text_of(alone)} == {text_of(again)}
    assert again[0].cached_tokens == len(prompt) - 1


def test_a_waiting_prompt_can_be_cancelled_and_is_stored_as_far_as_it_was_prefilled(loaded):
    engine = make_engine(loaded, decode_share=0.0)
    ids = random_ids(64 * 30)

    async def then():
        long, short = job_of(ids), job_of(random_ids(64 * 8, seed=2)[1:], max_tokens=1)
        engine.submit(long)
        while not isinstance(await long.events.get(), PrefillProgress):
            pass
        engine.submit(short)
        while not isinstance(await short.events.get(), PrefillProgress):
            pass
        engine.cancel(long)
        while not isinstance(await short.events.get(), Piece):
            pass
        again = job_of(ids, max_tokens=1)
        engine.submit(again)
        return (await asyncio.wait_for(again.events.get(), 60)).cached_tokens

    cached = serve(engine, [], then)[1]
    assert cached >= 64
    assert cached % 64 == 0


@pytest.mark.full
def test_steps_are_measured_once(loaded, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    grid = measured_grid(loaded[0], CONFIG)
    assert grid.first % BLOCK == 0
    assert BLOCK <= grid.first <= MAX_PREFILL_STEP
    assert 0 <= grid.growth < 1
    path = tmp_path / "mlx_tq" / "prefill-steps.json"
    ((key, kept),) = json.loads(path.read_text()).items()
    assert kept == [grid.first, grid.growth]
    monkeypatch.setattr(prefill_grid, "_measure", lambda model: PrefillGrid(64, 0.5))
    assert measured_grid(loaded[0], CONFIG) == grid
    assert measured_grid(loaded[0], KVConfig.from_profile("off")) == PrefillGrid(64, 0.5), "another configuration"
    for damage in (
        "",
        "[1]",
        json.dumps({key: [33.5, 0]}),
        json.dumps({key: {"first": 64}}),
        json.dumps({key: [8, 0.0]}),
    ):
        path.write_text(damage)
        assert measured_grid(loaded[0], CONFIG) == PrefillGrid(64, 0.5)


def test_a_machine_that_was_busy_does_not_slow_later_prefills(tmp_path, monkeypatch):
    """The clock is the test's: a quiet step takes a millisecond a token, and more with the position."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(make_cache_folder(tmp_path / "cache")))
    model, clock, slowness, passes = build("llama"), [0.0], [1.0], count()
    forward = type(model).__call__

    def timed(model, tokens, cache=None):
        clock[0] += 1e-3 * tokens.shape[1] * (1 + cache[0].offset / 4096) * slowness[0]
        clock[0] += 3.0 if next(passes) == 4 else 0.0  # a step of the first measurement
        return forward(model, tokens, cache=cache)

    monkeypatch.setattr(type(model), "__call__", timed)
    monkeypatch.setattr(prefill_grid.time, "perf_counter", lambda: clock[0])
    assert grid_parts(measured_grid(model, CONFIG)) == (192, pytest.approx(1 / 4096))
    config = replace(CONFIG, sinks=8)
    slowness[0] = 4.0
    assert grid_parts(measured_grid(model, config)) == (32, pytest.approx(1 / 4096))
    slowness[0] = 1.0
    assert grid_parts(measured_grid(model, config)) == (192, pytest.approx(1 / 4096))
    slowness[0] = 4.0
    assert measured_grid(model, config).first == 192, "it is the machine that is busy now"


def grid_parts(grid):
    return grid.first, grid.growth


def test_a_cache_folder_that_cannot_be_made_is_no_error(loaded, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(prefill_grid, "_measure", lambda model: PrefillGrid(64, 0.5))
    assert measured_grid(loaded[0], CONFIG) == PrefillGrid(64, 0.5)
