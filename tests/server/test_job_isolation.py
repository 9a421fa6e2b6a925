"""A job that fails does not affect the other jobs of its batch."""

import asyncio
from dataclasses import replace
from itertools import count

import mlx.core as mx
import pytest
from mlx_lm.generate import BatchGenerator

from mlx_tq.config import EvictConfig, KVConfig
from mlx_tq.server.api_errors import ModelFailedError
from mlx_tq.server.job import Job, Piece, SessionResult, SessionStart
from mlx_tq.server.sampling import Sampling
from mlx_tq.session.restore import RecallDuringDecode

from .engines import GREEDY, make_engine, make_job, outcome, run_job, serve, text_of
from .harness import together

VOCABULARY = 4096
# Nothing of these prompts is evicted, but answers look for archived tokens.
RECALL = KVConfig("tq4", "tq4", sinks=16, window=32, evict=EvictConfig("recency", 400, recall=64))


def raises(*_, **__):
    raise RuntimeError("it is broken")


def return_wrong_shape(_, values):
    return values[..., :-1] if values.ndim > 1 else mx.concatenate([values, values])


def write_then_raise(_, values):
    values[:] = 0
    raise RuntimeError("it is broken")


FAULTS = [raises, return_wrong_shape]


def failing(function, fault, good_calls):
    """Return a sampler or logits processor that fails after some calls."""
    calls = count()
    return lambda *values: function(*values) if next(calls) < good_calls else fault(None, function(*values))


def others():
    """Return jobs that must succeed: greedy ones, and one with a seed."""
    return [
        make_job(30, max_tokens=12, seed=2),
        make_job(70, max_tokens=12, seed=3),
        make_job(50, max_tokens=12, seed=4, sampler=Sampling(2.0).sampler(VOCABULARY, 7)),
    ]


@pytest.fixture(scope="module")
def expected(loaded):
    """Return the texts of the other jobs, each run alone."""
    return [text_of(serve(make_engine(loaded), [job])[0]) for job in others()]


def check_only_these_fail(bad, engine, expected):
    """Check that all of `bad` fail, and that the others and a later job return the expected texts."""

    async def later():
        return text_of(await run_job(engine, others()[0])), engine.is_healthy

    results, (again, healthy) = serve(engine, [*bad, *others()], then=later)
    for events in results[: len(bad)]:
        assert isinstance(events[-1], ModelFailedError)
    assert [text_of(events) for events in results[len(bad) :]] == expected
    assert (again, healthy) == (expected[0], True)
    return [str(events[-1]) for events in results[: len(bad)]]


def test_errors_of_samplers_and_processors_fail_one_job(loaded, expected):
    bad = []
    for good_calls in (0, 3):
        bad += [make_job(40, max_tokens=60, sampler=failing(GREEDY, fault, good_calls)) for fault in FAULTS]
        bad += [
            make_job(40, max_tokens=60, processors=[failing(lambda _, logits: logits, fault, good_calls)])
            for fault in (*FAULTS, write_then_raise)
        ]
    shared = failing(GREEDY, raises, 6)
    bad += [make_job(40, max_tokens=60, seed=seed, sampler=shared) for seed in (5, 6)]
    for message in check_only_these_fail(bad, make_engine(loaded, concurrency=32, queue=32), expected):
        assert message.startswith("sampling failed: ")


def test_jobs_that_share_a_sampler_are_sampled_together_and_fail_together(loaded):
    sizes = []

    def sample(logprobs):
        sizes.append(len(logprobs))
        return GREEDY(logprobs)

    sampler = failing(sample, raises, 5)
    engine = make_engine(loaded, prefill_step_size=2048)  # one step for all prompts
    for events in serve(engine, [make_job(40, seed, max_tokens=12, sampler=sampler) for seed in range(4)]):
        assert isinstance(events[-1], ModelFailedError)
    assert max(sizes) == 4


class BrokenTokenizer:
    """A tokenizer whose first detokenizer fails at the third token."""

    def __init__(self, tokenizer):
        self._tokenizer, self._detokenizers = tokenizer, count()

    def __getattr__(self, name):
        return getattr(self._tokenizer, name)

    @property
    def detokenizer(self):
        detokenizer = self._tokenizer.detokenizer
        if next(self._detokenizers) == 0:
            calls = count()
            detokenizer.add_token = lambda _: None if next(calls) < 2 else raises()
        return detokenizer


class BrokenJob(Job):
    """A job whose memory cannot be estimated."""

    @property
    def max_total_tokens(self):
        raise RuntimeError("it is broken")


def test_detokenizer_and_admission_errors_fail_one_job(loaded, expected):
    model, tokenizer = loaded
    engine = make_engine((model, BrokenTokenizer(tokenizer)), concurrency=16, queue=16, memory=2**30)
    job = make_job(40)
    broken = BrokenJob(job.prompt, job.max_tokens, job.sampler, [])
    check_only_these_fail([make_job(40), broken], engine, expected)


class BrokenRecall(RecallDuringDecode):
    """Fails for prompts of 40 tokens at the start of the answer, of 41 at a token, and of 42 at the end."""

    def __init__(self, caches, *args, **options):
        super().__init__(caches, *args, **options)
        self.prompt_tokens = caches[0].offset

    def start(self):
        return raises() if self.prompt_tokens == 40 else super().start()

    def count_token(self):
        return raises() if self.prompt_tokens == 41 else super().count_token()

    def result(self):
        return raises() if self.prompt_tokens == 42 else super().result()


@pytest.mark.full
def test_recall_errors_fail_one_job(loaded, monkeypatch):
    expected = [text_of(serve(make_engine(loaded, RECALL), [job])[0]) for job in others()]
    monkeypatch.setattr("mlx_tq.server.job_recall.RecallDuringDecode", BrokenRecall)
    engine = make_engine(loaded, RECALL, concurrency=16, queue=16)
    check_only_these_fail([make_job(length) for length in (40, 41, 42)], engine, expected)


@pytest.mark.parametrize("max_tokens", [4, 400], ids=["complete", "cancelled"])
def test_a_session_is_released_when_its_caches_cannot_be_stored(loaded, expected, monkeypatch, max_tokens):
    engine = make_engine(loaded, prefill_step_size=2048)  # one step for all prompts
    bad = replace(make_job(40, max_tokens=max_tokens), session=SessionStart(None, 0))
    monkeypatch.setattr("mlx_tq.server.engine.cache_stats", raises)

    async def then():
        jobs = others()
        engine.submit(bad, *jobs)
        while not isinstance(await bad.events.get(), Piece):
            pass
        if max_tokens > 4:
            monkeypatch.setattr(BatchGenerator, "extract_cache", raises)
            engine.cancel(bad)
        result = await asyncio.wait_for(bad.session_result.get(), 60)
        monkeypatch.undo()
        return result, [text_of(await outcome(job)) for job in jobs], engine.is_healthy

    assert serve(engine, [], then)[1] == (SessionResult(), expected, True)


# Over HTTP.

HI = [{"role": "user", "content": "hi"}]
ACCEPTED = [
    {"seed": 2**64 - 1, "n": 2, "temperature": 1},
    {"repetition_penalty": 0.01, "repetition_context_size": 2**31 - 1},
    {"repetition_penalty": 0},
    {"temperature": 1, "top_k": 2**31 - 1},
    {"presence_penalty": 2, "frequency_penalty": -2, "repetition_penalty": 10},
    {"logit_bias": {"5": 100, "6": -100}},
    {"temperature": 100, "top_p": 1e-300, "min_p": 1e-300},
]


def test_extreme_parameters_do_not_affect_other_requests(server):
    def story():
        return server.chat("Tell a story", max_tokens=30, temperature=2, seed=3).choices[0].message.content

    def send_extremes():
        for body in ACCEPTED:
            response = server.post(messages=HI, **{"max_tokens": 2, **body})
            assert response.status_code == 200, (body, response.text)

    expected = story()
    assert together([story, send_extremes])[0] == expected
