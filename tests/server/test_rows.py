"""A job whose own work fails ends alone: the others of its batch say what they say alone."""

import asyncio

import mlx.core as mx
import pytest

from mlx_tq.conversation.looks import Looks
from mlx_tq.server.errors import ModelFailedError
from mlx_tq.server.jobs import Failed, Left, Piece, Start
from mlx_tq.server.sampling import Sampling

from .engines import GREEDY, make_engine, make_job, outcome, serve
from .harness import together

VOCABULARY = 4096


def raises(*_):
    raise RuntimeError("it is broken")


def has_another_shape(_, values):
    return values[..., :-1] if values.ndim > 1 else mx.concatenate([values, values])


def writes_before_it_raises(_, values):
    values[:] = 0
    raise RuntimeError("it is broken")


FAULTS = [raises, has_another_shape]


def breaks(fault, sampled, good):
    """A function that works `good` times and then has a fault."""
    calls = []

    def call(*values):
        calls.append(values)
        result = GREEDY(*values) if sampled else values[-1]
        return result if len(calls) <= good else fault(None, result)

    return call


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
def alone(loaded):
    """What the others say alone."""
    return [text_of(serve(make_engine(loaded), [job])[0]) for job in others()]


def check_that_only(bad, engine, alone):
    """All of `bad` fail; the others say what they say alone, and so does one that comes later."""

    async def later():
        job = others()[0]
        engine.submit(job)
        return text_of(await outcome(job)), engine.is_healthy

    events, (again, healthy) = serve(engine, [*bad, *others()], then=later)
    for failed in events[: len(bad)]:
        assert isinstance(failed[-1], Failed)
        assert isinstance(failed[-1].error, ModelFailedError)
    assert [text_of(each) for each in events[len(bad) :]] == alone
    assert (again, healthy) == (alone[0], True)
    return [str(failed[-1].error) for failed in events[: len(bad)]]


def test_samplers_and_processors(loaded, alone):
    """They fail at the first token of an answer or later."""
    bad = []
    for good in (0, 3):
        for fault in FAULTS:
            bad.append(make_job(40, max_tokens=60, sampler=breaks(fault, True, good)))
        for fault in (*FAULTS, writes_before_it_raises):
            bad.append(make_job(40, max_tokens=60))
            bad[-1].processors = [breaks(fault, False, good)]
    shared = breaks(raises, True, 6)
    bad += [make_job(40, max_tokens=60, seed=seed, sampler=shared) for seed in (5, 6)]
    for message in check_that_only(bad, make_engine(loaded, concurrency=32, queue=32), alone):
        assert message.startswith("the next token of the answer could not be chosen: ")


def test_a_sampler_that_all_share(loaded):
    """It is called once for all, and all fail."""
    shared = breaks(raises, True, 2)
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
            made.add_token = breaks(raises, False, 2)
        return made


def test_readers_looks_and_what_is_looked_up_before_a_job_joins(loaded, alone, monkeypatch):
    """The reader cannot read a token, such as one that the model has and its tokenizer has not."""
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
    check_that_only(bad, engine, alone)


@pytest.mark.parametrize("max_tokens", [4, 400], ids=["complete", "cancelled"])
def test_what_is_kept_of_an_answer(loaded, alone, monkeypatch, max_tokens):
    """The session of a job whose caches cannot be kept has its turn back."""
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
        assert asyncio.run(main()) == (Left(), alone, True)
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


def test_numbers_of_a_request_end_no_other_one(server):
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


def test_numbers_of_other_routes(server):
    for path, body, param in (
        ("/v1/responses", {"input": "hi", "max_output_tokens": BIG}, "max_output_tokens"),
        ("/v1/embeddings", {"input": "hi", "dimensions": BIG}, "dimensions"),
        ("/v1/completions", {"prompt": "hi", "max_tokens": BIG}, "max_tokens"),
        ("/v1/completions", {"prompt": [BIG]}, "prompt"),
    ):
        response = server.post(path, **body)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)
