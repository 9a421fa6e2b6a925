"""The engines of a server's ranks take the same steps, and answer like an engine of one process."""

import asyncio
import gc
import weakref
from dataclasses import replace
from itertools import count

import numpy as np
import pytest
from cli.tools import facts
from mlx_lm.utils import load_tokenizer
from server.engines import GREEDY, job_of, limits_of, metric, outcome, run_job, text_of, watch_passes

from mlx_tq.config import EvictConfig, KVConfig
from mlx_tq.distributed.group import ALONE, join
from mlx_tq.distributed.launch import is_launched
from mlx_tq.models import embedded_path
from mlx_tq.models.load import divide
from mlx_tq.prompt_cache.compressed import plan_caches
from mlx_tq.server.api_errors import ApiError
from mlx_tq.server.broadcast import OrderBroadcast
from mlx_tq.server.engine import Engine
from mlx_tq.server.job import SessionStart
from mlx_tq.server.metrics import Metrics
from mlx_tq.server.sampling import Sampling
from mlx_tq.session.transcript import Quotation

from .test_agreement import random_model
from .together import run

VOCABULARY = 4096  # of the tokenizer
CONFIG = KVConfig(
    key="q8", value="tq4", sinks=16, window=32, evict=EvictConfig("knorm:trigger=32:granularity=1", 100, recall=64)
)


class Watch:
    """Records the rows of every forward pass, what is stored, and how many caches of sessions are alive."""

    def __init__(self, monkeypatch, model, engine):
        self.passes, self.most_caches, self._caches = [], 0, []
        register = OrderBroadcast.register

        def patched(broadcast, caches):
            registered = register(broadcast, caches)
            self._caches.append(weakref.ref(registered))
            return registered

        def note(layers):
            rows = [(row.offset, row.positions.tolist()) for row in layers[0]]
            self.passes.append((rows, metric(engine, "prompt_cache_entries"), metric(engine, "prompt_cache_bytes")))
            self.most_caches = max(self.most_caches, self.live_caches())

        monkeypatch.setattr(OrderBroadcast, "register", patched)
        watch_passes(monkeypatch, model, note)

    def live_caches(self):
        return sum(reference() is not None for reference in self._caches)


def answer(size):
    """Return the passes of this rank's engine, and the first rank's answers or the others' numbers of caches."""
    ranks = join() if is_launched() else ALONE
    assert ranks.size == size
    tokenizer, model = load_tokenizer(embedded_path()), random_model(np.random.default_rng(0), 2, VOCABULARY)
    if not ranks.is_alone:
        divide(model, ranks)
    limits = limits_of(memory=1_000_000)
    engine = Engine(model, tokenizer, CONFIG, plan_caches(model, CONFIG), limits, Metrics())
    with pytest.MonkeyPatch.context() as monkeypatch:
        watch = Watch(monkeypatch, model, engine)
        if ranks.is_first:
            try:
                return watch.passes, asyncio.run(ask_all(engine, tokenizer))
            finally:
                engine.join(60)
        engine.serve()
        gc.collect()
        return watch.passes, (watch.most_caches, watch.live_caches())


async def ask_all(engine, tokenizer):
    """Run greedy jobs, one with two answers, one with a stop sequence, sampled ones, one whose sampler raises and one
    that is cancelled, all at once; then a session.
    """

    numbers = count()

    def job(lines, tokens=12, sampler=GREEDY, **fields):
        # Prompts share no beginning: which job continues from another's, and so what it evicts, depends on the time.
        ids = tokenizer.encode(f"{chr(97 + next(numbers))}. " + "".join(facts(lines)))
        return job_of(ids, max_tokens=tokens, sampler=sampler, **fields)

    calls = count()

    def fail_at_fourth(logprobs):
        if next(calls) == 3:
            raise RuntimeError("the sampler is broken")
        return GREEDY(logprobs)

    first = job(6)
    jobs = [job(12), job(14, stops=["e"]), replace(first, others=(replace(first, index=1),))]
    jobs += [job(8, sampler=Sampling(2.0).sampler(VOCABULARY, seed)) for seed in (1, 2)]
    endless, broken = job(9, 400), job(11, 400, sampler=fail_at_fourth)
    engine.start(asyncio.get_running_loop())
    engine.submit(*jobs, endless, broken)
    assert isinstance((await outcome(broken))[-1], ApiError)
    texts = [texts_of(job, await outcome(job)) for job in jobs]
    engine.cancel(endless)
    session, tokens = SessionStart(None, 0), []
    for question in ("".join(facts(10)), "\nWhat is the access code?\n", "\nAnd the gate of house 3?\n"):
        ids = tokenizer.encode(question)
        turn = job_of(tokens, ids, max_tokens=8, session=session)
        texts.append(texts_of(turn, await run_job(engine, turn)))
        result = await turn.session_result.get()
        tokens, quoted = result.tokens, tokenizer.encode(" the gate")
        quotation = Quotation([(0, 2)], ["x"], quoted)
        session = SessionStart(result.caches, len(tokens), 1, quote=lambda live, rows, made=quotation: made)
        assert result.stats.evicted > 0
    return texts


def texts_of(job, events):
    return [text_of(events, index) for index in range(len(job.answers))]


@pytest.mark.full
def test_engines_of_ranks_take_the_same_steps(tmp_path):
    """The same requests at once, the same rows, evicted and recalled; sessions' caches live until they are replaced."""
    (alone,) = run(tmp_path / "alone", 1, answer, 1)
    first, second = run(tmp_path / "together", 2, answer, 2)
    assert all(each.value for each in (alone, first, second)), (alone.err, first.err, second.err)
    passes, texts = first.value[:2]
    assert second.value[0] == passes
    assert texts == alone.value[1]
    assert max(len(rows) for rows, *_ in passes) > 2
    assert any(len(positions) < offset for rows, *_ in passes for offset, positions in rows)
    most, last = second.value[1]
    assert (1 <= most <= 2, last) == (True, 0)
