"""Prompt lookup in the engine: answers stay the same, also when a second request arrives in the middle of a draft."""

import asyncio
import gc

import mlx.core as mx
import pytest
from zoo import build

from mlx_tq.config import KVConfig
from mlx_tq.integration.rollback import VerifyPass
from mlx_tq.prompt_cache.compressed import plan_caches
from mlx_tq.server.engine import Engine
from mlx_tq.server.job import Piece
from mlx_tq.server.metrics import Metrics
from mlx_tq.server.sampling import Sampling
from mlx_tq.speculative.lookup_mode import LookupMode
from server.engines import (
    CONFIG,
    GREEDY,
    job_of,
    limits_of,
    make_job,
    metric,
    outcome,
    run_job,
    serve,
    text_of,
    tokens_of,
    watch_passes,
)

LINE = "The access code for Victor is 0707. "
TOKENS = 30


def engine_with(loaded, mode, config=CONFIG):
    model, tokenizer = loaded
    plan = None if config.is_off else plan_caches(model, config)
    return Engine(model, tokenizer, config, plan, limits_of(decode_share=0), Metrics(), drafter=LookupMode(mode))


def victor(tokenizer, **fields):
    return job_of(tokenizer.encode(LINE * 6 + "The"), max_tokens=TOKENS, **fields)


def answers(loaded, mode, make_jobs, config=CONFIG):
    """Return the pieces of the answers to jobs that arrive together, and the engine."""
    engine = engine_with(loaded, mode, config)
    events = serve(engine, make_jobs(loaded[1]))
    return [[event for event in of_job if isinstance(event, Piece)] for of_job in events], engine


@pytest.mark.parametrize(
    ("config", "seed"),
    [
        (CONFIG, None),
        pytest.param(CONFIG, 5, marks=pytest.mark.full),
        pytest.param(KVConfig.from_profile("off"), 5, marks=pytest.mark.full),
    ],
    ids=["greedy", "seeded", "mlx-lm's cache"],
)
def test_an_answer_is_the_same_as_without(exact, config, seed):
    def make(tokenizer):
        sampler = GREEDY if seed is None else Sampling(0.5).sampler(tokenizer.vocab_size, seed)
        return [victor(tokenizer, sampler=sampler, logprobs=1)]

    (plain,), _ = answers(exact, "off", make, config)
    (drafted,), engine = answers(exact, "on", make, config)
    assert [piece.text for piece in drafted] == [piece.text for piece in plain]
    assert [piece.logprob.token for piece in drafted] == [piece.logprob.token for piece in plain]
    assert mx.allclose(*(mx.array([piece.logprob.logprob for piece in said]) for said in (plain, drafted)), atol=1e-3)
    assert metric(engine, "drafted_tokens_total") > metric(engine, "accepted_tokens_total") > 4
    gc.collect()
    assert not any(type(item) is VerifyPass for item in gc.get_objects()), "a pass keeps copies of recurrent states"


@pytest.mark.parametrize("config", [CONFIG, pytest.param(KVConfig.from_profile("off"), marks=pytest.mark.full)])
def test_states_are_set_back_when_a_draft_is_rejected(exact, config):
    """Also when another answer joins in the middle of a draft."""
    loaded = build("qwen3_5"), exact[1]

    def sampler(logprobs):
        return 3 + logprobs[..., 3:6].argmax(axis=-1)  # three tokens, so that text repeats

    def make(tokenizer):
        prompts = [[3 + i * i % 7 % 3 for i in range(count)] for count in (100, 250)]
        return [job_of(prompt, max_tokens=TOKENS, logprobs=0, sampler=sampler) for prompt in prompts]

    plain, _ = answers(loaded, "off", make, config)
    drafted, engine = answers(loaded, "on", make, config)
    assert [tokens_of(events) for events in drafted] == [tokens_of(events) for events in plain]
    for pair in zip(drafted, plain, strict=True):
        logprobs = (mx.array([piece.logprob.logprob for piece in said]) for said in pair)
        assert mx.allclose(*logprobs, atol=1e-4)
    assert metric(engine, "drafted_tokens_total") > metric(engine, "accepted_tokens_total") > 4


@pytest.mark.full
@pytest.mark.parametrize("config", [CONFIG, KVConfig.from_profile("off")])
def test_drafts_go_on_when_a_sliding_window_is_full(exact, config, monkeypatch):
    """Another answer joins in the middle, and a later turn continues from the stored windows."""
    loaded = build("gemma3_text"), exact[1]
    kind, sizes = type(loaded[0]), set()
    forward = kind.__call__

    def watched(model, tokens, cache=None, **options):
        sizes.update((tokens.shape[1] > 1, part.max_size > 16) for part in cache or () if hasattr(part, "max_size"))
        return forward(model, tokens, cache=cache, **options)

    monkeypatch.setattr(kind, "__call__", watched)

    def sampler(logprobs):
        return 3 + logprobs[..., 3:6].argmax(axis=-1)  # three tokens, so that text repeats

    def make(*ids, max_tokens=TOKENS):
        return job_of(ids, max_tokens=max_tokens, logprobs=0, sampler=sampler)

    prompts = [[3 + i * i % 7 % 3 for i in range(count)] for count in (100, 250)]
    said = tokens_of(serve(engine_with(loaded, "off", config), [make(*prompts[0])])[0])

    def run(mode):
        engine = engine_with(loaded, mode, config)
        jobs, later = [make(*prompt) for prompt in prompts], make(*prompts[0], *said, 4, max_tokens=8)
        events, continued = serve(engine, jobs, lambda: run_job(engine, later))
        return [tokens_of(of_job) for of_job in (*events, continued)], engine

    (plain, _), (drafted, engine) = run("off"), run("on")
    assert drafted == plain
    assert drafted[0] == said
    assert metric(engine, "drafted_tokens_total") > metric(engine, "accepted_tokens_total") > 4
    assert metric(engine, "cached_tokens_total") > 100
    assert sizes == {(True, False), (False, False), (True, True)}, "only drafts see wider windows"


def test_a_stop_sequence_inside_a_draft(exact):
    def make(tokenizer):
        return [victor(tokenizer, stops=["Victor"])]

    (plain,), _ = answers(exact, "off", make)
    (drafted,), _ = answers(exact, "on", make)
    assert text_of(drafted) == text_of(plain)
    assert drafted[-1].stop == "Victor"


@pytest.mark.parametrize("steps", [7, *(pytest.param(steps, marks=pytest.mark.full) for steps in (4, 5))])
def test_a_request_that_joins_in_the_middle_changes_nothing(exact, steps, monkeypatch):
    """Its prompt takes some steps, so its answer begins while the other one is drafted."""
    num_rows = []
    watch_passes(monkeypatch, exact[0], lambda layers: num_rows.append(len(layers[0])))

    def make(tokenizer):
        return [victor(tokenizer), make_job(64 * steps, max_tokens=8)]

    alone = [answers(exact, "off", lambda tokenizer, n=n: [make(tokenizer)[n]])[0][0] for n in range(2)]
    num_rows.clear()
    together, engine = answers(exact, "on", make)
    assert 2 in num_rows
    assert [text_of(said) for said in together] == [text_of(said) for said in alone]
    assert [len(said) for said in together] == [len(said) for said in alone]
    assert metric(engine, "accepted_tokens_total") > 0


@pytest.mark.full
def test_a_later_turn_finds_the_stored_caches_of_a_drafted_answer(exact):
    tokenizer = exact[1]
    (alone,), _ = answers(exact, "off", lambda tokenizer: [victor(tokenizer, logprobs=0)])
    later = [*victor(tokenizer).prompt.ids, *(piece.logprob.token for piece in alone), 60, 61, 62, 63]
    said = {}
    for mode in ("off", "on"):
        engine = engine_with(exact, mode)

        async def main(engine=engine):
            engine.start(asyncio.get_running_loop())
            for job in (victor(tokenizer), job_of(later, max_tokens=12)):
                engine.submit(job)
                events = await outcome(job)
            return text_of(events)

        try:
            said[mode] = asyncio.run(main()), metric(engine, "cached_tokens_total")
        finally:
            engine.join(30)
    assert said["on"] == said["off"]
    assert said["on"][1] > len(victor(tokenizer).prompt.ids)


def test_a_server_drafts_by_default(server):
    before = server.metrics()["mlx_tq_drafted_tokens_total"]
    server.post("/v1/completions", prompt=LINE * 6 + "The", max_tokens=TOKENS, temperature=0).raise_for_status()
    assert server.metrics()["mlx_tq_drafted_tokens_total"] > before
