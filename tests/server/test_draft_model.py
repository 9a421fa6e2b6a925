"""A draft model in the server: answers stay the same, whatever it drafts."""

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from mlx_tq.config import EvictConfig, KVConfig
from mlx_tq.errors import ConfigError
from mlx_tq.prompt_cache.build import build_caches
from mlx_tq.prompt_cache.compressed import plan_caches
from mlx_tq.server.engine import Engine
from mlx_tq.server.job import Piece
from mlx_tq.server.metrics import Metrics
from mlx_tq.server.sampling import Sampling
from mlx_tq.speculative.draft_model import DraftModel
from mlx_tq.speculative.lookup_mode import NO_LOOKUP

from .engines import CONFIG, GREEDY, job_of, limits_of, make_job, metric, random_ids, serve, text_of
from .harness import running

TOKENS = 24
LINE = "The access code for Victor is 0707. "


def engine_with(loaded, drafter, config=CONFIG):
    model, tokenizer = loaded
    return Engine(
        *(model, tokenizer, config, plan_caches(model, config), limits_of(decode_share=0), Metrics()), drafter=drafter
    )


def answers(loaded, drafter, jobs):
    """Return the texts of jobs that arrive together, and the engine."""
    engine = engine_with(loaded, drafter)
    events = serve(engine, jobs)
    return [text_of([event for event in of_job if isinstance(event, Piece)]) for of_job in events], engine


class Wrong:
    """A draft model whose tokens are never the right ones."""

    def __init__(self, model):
        self._model = model

    def __call__(self, tokens, cache=None):
        logits = self._model(tokens, cache=cache)
        return mx.roll(logits, 1, axis=-1)

    def __getattr__(self, name):
        return getattr(self._model, name)


def own_drafts(model):
    return DraftModel(model, lambda: make_prompt_cache(model), 3)


def compressed_drafts(model):
    plan = plan_caches(model, CONFIG)
    return DraftModel(model, lambda: build_caches(plan), 7)


def wrong_drafts(model):
    return DraftModel(Wrong(model), lambda: make_prompt_cache(model), 2)


@pytest.mark.parametrize(
    ("make_drafter", "seed"),
    [
        pytest.param(own_drafts, 5, marks=pytest.mark.full),
        (compressed_drafts, None),
        (wrong_drafts, None),
        pytest.param(own_drafts, None, marks=pytest.mark.full),
        pytest.param(compressed_drafts, 5, marks=pytest.mark.full),
        pytest.param(wrong_drafts, 5, marks=pytest.mark.full),
    ],
)
def test_an_answer_is_the_same_as_without(exact, make_drafter, seed):
    model, tokenizer = exact

    def jobs():
        sampler = GREEDY if seed is None else Sampling(0.5).sampler(tokenizer.vocab_size, seed)
        return [job_of(tokenizer.encode(LINE * 6 + "The"), max_tokens=TOKENS, sampler=sampler)]

    plain, _ = answers(exact, NO_LOOKUP, jobs())
    drafted, engine = answers(exact, make_drafter(model), jobs())
    assert drafted == plain
    accepted, total = metric(engine, "accepted_tokens_total"), metric(engine, "drafted_tokens_total")
    assert total >= TOKENS / 2
    assert accepted < total / 8 if make_drafter is wrong_drafts else accepted > total / 4
    if seed is None and make_drafter is own_drafts:
        assert accepted > 0.9 * total


@pytest.mark.full
def test_the_draft_model_prefills_in_slices_during_the_answer(exact):
    """Of 1,400 tokens, the first two steps of the answer read 512 each, and then it drafts."""
    jobs = [make_job(1400, max_tokens=TOKENS)]
    plain, _ = answers(exact, NO_LOOKUP, [make_job(1400, max_tokens=TOKENS)])
    lengths = []

    class Watched(Wrong):
        def __call__(self, tokens, cache=None):
            lengths.append(tokens.shape[1])
            return self._model(tokens, cache=cache)

    drafted, engine = answers(exact, own_drafts(Watched(exact[0])), jobs)
    assert drafted == plain
    assert lengths[:2] == [512, 512]
    assert lengths[3:5] == [1, 1], "then the rest, and its last token with the logits"
    assert metric(engine, "accepted_tokens_total") > TOKENS / 3


@pytest.mark.full
def test_drafts_for_interleaved_and_concurrent_answers(exact):
    """Each has the single stream for a while, and the draft model's caches go from one conversation to another."""
    drafter = own_drafts(exact[0])

    def jobs():
        return [job_of(random_ids(200, seed), max_tokens=8 + 8 * seed) for seed in range(3)]

    plain = [answers(exact, NO_LOOKUP, [job])[0][0] for job in jobs()]
    together, engine = answers(exact, drafter, jobs())
    assert together == plain
    assert metric(engine, "accepted_tokens_total") > 0
    for job, expected in zip(jobs(), plain, strict=True):
        assert answers(exact, drafter, [job])[0] == [expected]


def test_an_error_of_the_draft_model_leaves_no_wrong_rows(exact):
    """A pass fails in the middle; the next answer drafts from the start."""
    model = exact[0]

    class Failing(Wrong):
        passes = 0

        def __call__(self, tokens, cache=None):
            logits = self._model(tokens, cache=cache)
            self.passes += 1
            if self.passes == 5:
                raise RuntimeError("[metal] out of memory")
            return logits

    drafter = own_drafts(Failing(model))
    ids = random_ids(100)
    drafts = drafter.begin(model, make_prompt_cache(model), ids)
    drafts.append(drafts.draft(3)[0])  # three passes
    with pytest.raises(RuntimeError, match="out of memory"):
        drafts.draft(3)
    assert drafts.draft(3)
    assert {cache.offset for cache in drafter._caches} == {len(drafts) + 2}, "all tokens, and two of three drafts"
    fresh = own_drafts(model).begin(model, make_prompt_cache(model), drafts.ids)
    assert drafts.draft(3) == fresh.draft(3)


def test_an_evicting_cache_is_refused(exact):
    config = KVConfig.from_profile("small", sinks=16, window=32, evict=EvictConfig("recency", "50%"))
    model, _ = exact
    with pytest.raises(ConfigError, match="the draft model cannot be used: an eviction round cannot be undone"):
        own_drafts(model).check(model, build_caches(plan_caches(model, config)))


@pytest.mark.full
def test_a_server_with_a_draft_model(tmp_path, folder):
    question = {
        "messages": [{"role": "user", "content": LINE * 3 + "Who has the code?"}],
        "max_tokens": 20,
        "temperature": 0,
    }
    with running(folder, tmp_path / "log", "--dtype", "float32", "--draft-model", folder) as server:
        drafted = server.post(**question).json()["choices"][0]["message"]["content"]
        metrics = server.metrics()
    assert metrics["mlx_tq_accepted_tokens_total"] > 8
    with running(folder, tmp_path / "log", "--dtype", "float32") as server:
        assert server.post(**question).json()["choices"][0]["message"]["content"] == drafted
