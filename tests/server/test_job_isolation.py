"""A job that fails does not affect the other jobs of its batch."""

import asyncio
from itertools import count

import mlx.core as mx
import pytest

from mlx_tq.server.errors import ModelFailedError
from mlx_tq.server.jobs import Failed, Left, Piece, Start
from mlx_tq.server.sampling import Sampling
from mlx_tq.session.looks import Looks

from .engines import GREEDY, make_engine, make_job, outcome, serve
from .harness import together

VOCABULARY = 4096


def raises(*_):
    raise RuntimeError("it is broken")


def return_wrong_shape(_, values):
    return values[..., :-1] if values.ndim > 1 else mx.concatenate([values, values])


def writes_before_it_raises(_, values):
    values[:] = 0
    raise RuntimeError("it is broken")


FAULTS = [raises, return_wrong_shape]


def failing_sampler(fault, good):
    """A greedy sampler that fails after `good` calls."""
    calls = count()

    def sample(logprobs):
        tokens = GREEDY(logprobs)
        return tokens if next(calls) < good else fault(None, tokens)

    return sample


def failing_processor(fault, good):
    """A processor that changes nothing and fails after `good` calls."""
    calls = count()

    def process(tokens, logits):
        return logits if next(calls) < good else fault(tokens, logits)

    return process


def text_of(events):
    return "".join(event.text for event in events if isinstance(event, Piece))


def others():
    """Jobs that go on: greedy ones, and one of a seed."""
    return [
        make_job(30, max_tokens=12, seed=2),
        make_job(70, max_tokens=12, seed=3),
        make_job(50, max_tokens=12, seed=4, sampler=Sampling(2.0).sampler(VOCABULARY, 7)),
    ]


@pytest.fixture(scope="module")
def expected(loaded):
    """The texts of the other jobs, each run alone."""
    return [text_of(serve(make_engine(loaded), [job])[0]) for job in others()]


def check_only_these_fail(bad, engine, expected):
    """Check that all of `bad` fail, and that the others and a later job return the expected texts."""

    async def later():
        job = others()[0]
        engine.submit(job)
        return text_of(await outcome(job)), engine.is_healthy

    events, (again, healthy) = serve(engine, [*bad, *others()], then=later)
    for failed in events[: len(bad)]:
        assert isinstance(failed[-1], Failed)
        assert isinstance(failed[-1].error, ModelFailedError)
    assert [text_of(each) for each in events[len(bad) :]] == expected
    assert (again, healthy) == (expected[0], True)
    return [str(failed[-1].error) for failed in events[: len(bad)]]


def test_samplers_and_processors(loaded, expected):
    """They fail at the first token of an answer or later."""
    bad = []
    for good in (0, 3):
        for fault in FAULTS:
            bad.append(make_job(40, max_tokens=60, sampler=failing_sampler(fault, good)))
        for fault in (*FAULTS, writes_before_it_raises):
            bad.append(make_job(40, max_tokens=60))
            bad[-1].processors = [failing_processor(fault, good)]
    shared = failing_sampler(raises, 6)
    bad += [make_job(40, max_tokens=60, seed=seed, sampler=shared) for seed in (5, 6)]
    for message in check_only_these_fail(bad, make_engine(loaded, concurrency=32, queue=32), expected):
        assert message.startswith("sampling failed: ")


def test_a_sampler_that_all_share(loaded):
    """It is called once for all, and all fail."""
    shared = failing_sampler(raises, 2)
    for failed in serve(make_engine(loaded), [make_job(40, seed=seed, sampler=shared) for seed in (5, 6)]):
        assert isinstance(failed[-1].error, ModelFailedError)


def test_jobs_that_share_a_sampler_are_sampled_in_one_call(loaded):
    sizes = []

    def sampler(logprobs):
        sizes.append(len(logprobs))
        return GREEDY(logprobs)

    serve(make_engine(loaded), [make_job(40, max_tokens=12, seed=seed, sampler=sampler) for seed in range(4)])
    assert max(sizes) == 4


class Tokenizer:
    """A tokenizer the first of whose detokenizers cannot read a token."""

    def __init__(self, tokenizer):
        self._tokenizer, self._made = tokenizer, 0

    def __getattr__(self, name):
        return getattr(self._tokenizer, name)

    @property
    def detokenizer(self):
        made = self._tokenizer.detokenizer
        self._made += 1
        if self._made == 1:
            calls = count()
            made.add_token = lambda _: None if next(calls) < 2 else raises()
        return made


def test_detokenizer_recall_and_admission_errors_fail_one_job(loaded, expected, monkeypatch):
    """The detokenizer may fail at a token that the model has and its tokenizer has not."""
    model, tokenizer = loaded
    engine = make_engine((model, Tokenizer(tokenizer)), concurrency=16, queue=16)
    _, *looking, waiting = bad = [make_job(40) for _ in range(5)]
    fits = engine._fits

    def listen(running, batch, uid):
        if running.job in looking:
            running.looks = Looks([], running.recalled)
            monkeypatch.setattr(running.looks, ("token", "brought", "begin")[looking.index(running.job)], raises)
            running.looks.begin()

    monkeypatch.setattr(engine._asking, "listen", listen)
    monkeypatch.setattr(engine, "_fits", lambda *about: raises() if engine._waiting[0] is waiting else fits(*about))
    check_only_these_fail(bad, engine, expected)


@pytest.mark.parametrize("max_tokens", [4, 400], ids=["complete", "cancelled"])
def test_failure_to_store_caches_releases_the_session(loaded, expected, monkeypatch, max_tokens):
    engine = make_engine(loaded)
    bad = make_job(40, max_tokens=max_tokens)
    bad.start = Start(None, 0)
    keep = engine._keep_answered

    def broken(running, *rest):
        return raises() if running.job is bad else keep(running, *rest)

    monkeypatch.setattr(engine, "_keep_answered", broken)

    async def main():
        engine.start(asyncio.get_running_loop())
        jobs = others()
        engine.submit(bad, *jobs)
        while not isinstance(await bad.events.get(), Piece):
            pass
        if max_tokens > 4:
            monkeypatch.setattr(engine._batch, "extract_cache", raises)
            engine.cancel(bad)
        left = await asyncio.wait_for(bad.left.get(), 60)
        monkeypatch.undo()
        return left, [text_of(await outcome(job)) for job in jobs], engine.is_healthy

    try:
        assert asyncio.run(main()) == (Left(), expected, True)
    finally:
        engine.join(30)


# Over HTTP.

HI = [{"role": "user", "content": "hi"}]
BIG = 10**30
REFUSED = [
    {"repetition_penalty": 1.1, "repetition_context_size": BIG},
    {"repetition_penalty": 1.1, "repetition_context_size": 2**63},
    {"repetition_penalty": 1e-38},
    {"repetition_penalty": 0.009},
    {"repetition_penalty": 11},
    {"temperature": 1, "top_k": BIG},
    {"max_tokens": BIG},
    {"max_completion_tokens": BIG},
    {"seed": 2**64},
    {"logit_bias": {"9" * 5000: 1}},
    {"logit_bias": {"1": 1e30}},
    {"presence_penalty": BIG},
    {"top_logprobs": BIG, "logprobs": True},
    {"n": BIG},
]
ANSWERED = [
    {"seed": 2**64 - 1, "n": 2, "temperature": 1},
    {"repetition_penalty": 0.01, "repetition_context_size": 2**31 - 1},
    {"repetition_penalty": 0},
    {"temperature": 1, "top_k": 2**31 - 1},
    {"presence_penalty": 2, "frequency_penalty": -2, "repetition_penalty": 10},
    {"logit_bias": {"5": 100, "6": -100}},
    {"temperature": 100, "top_p": 1e-300, "min_p": 1e-300},
]


def test_extreme_parameters_do_not_affect_other_requests(server):
    """Beside an answer that goes on; what is answered is the same as ever."""

    def story():
        return server.chat("Tell a story", max_tokens=30, temperature=2, seed=3).choices[0].message.content

    def ask():
        for body in REFUSED:
            response = server.post(messages=HI, **body)
            assert response.status_code == 400, body
            assert response.json()["error"]["param"].split(".")[0] in body, response.text
        for body in ANSWERED:
            response = server.post(messages=HI, **{"max_tokens": 2, **body})
            assert response.status_code == 200, (body, response.text)

    expected = story()
    beside, _ = together([story, ask])
    assert beside == expected


def test_huge_numbers_are_rejected_on_other_routes(server):
    for path, body, param in (
        ("/v1/responses", {"input": "hi", "max_output_tokens": BIG}, "max_output_tokens"),
        ("/v1/embeddings", {"input": "hi", "dimensions": BIG}, "dimensions"),
        ("/v1/completions", {"prompt": "hi", "max_tokens": BIG}, "max_tokens"),
        ("/v1/completions", {"prompt": [BIG]}, "prompt"),
    ):
        response = server.post(path, **body)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)
