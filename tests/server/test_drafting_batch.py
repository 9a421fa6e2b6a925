"""Prompt lookup in the engine: answers stay the same, also when a second request arrives in the middle of a draft."""

import asyncio

import mlx.core as mx
import pytest

from mlx_tq.config import KVConfig
from mlx_tq.prompt_cache.compressed import plan_caches
from mlx_tq.server.engine import Engine
from mlx_tq.server.job import Piece
from mlx_tq.server.metrics import Metrics
from mlx_tq.server.sampling import Sampling
from mlx_tq.speculative.lookup_mode import LookupMode
from server.engines import CONFIG, GREEDY, job_of, limits_of, make_job, metric, outcome, serve, text_of, watch_passes

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
    [(CONFIG, None), (CONFIG, 5), (KVConfig.from_profile("off"), 5)],
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


def test_a_stop_sequence_inside_a_draft(exact):
    def make(tokenizer):
        return [victor(tokenizer, stops=["Victor"])]

    (plain,), _ = answers(exact, "off", make)
    (drafted,), _ = answers(exact, "on", make)
    assert text_of(drafted) == text_of(plain)
    assert drafted[-1].stop == "Victor"


@pytest.mark.parametrize("steps", [5, 7, pytest.param(4, marks=pytest.mark.full)])
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
