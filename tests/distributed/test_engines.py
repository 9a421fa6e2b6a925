"""The engines of a server's ranks make the same steps and give the same answers as one process."""

import asyncio

import numpy as np
import pytest
from cli.tools import facts
from mlx_lm.utils import load_tokenizer
from server.engines import GREEDY, LIMITS, outcome

from mlx_tq.config import EvictConfig, KVConfig
from mlx_tq.distributed.group import ALONE, join
from mlx_tq.distributed.launch import is_launched
from mlx_tq.models import embedded_path
from mlx_tq.models.sharding import divide
from mlx_tq.prompt_cache.compressed import plan_caches
from mlx_tq.server.conversation import Prompt
from mlx_tq.server.engine import Engine
from mlx_tq.server.jobs import Failed, Job, Piece, Start
from mlx_tq.server.limits import EngineLimits
from mlx_tq.server.metrics import Metrics
from mlx_tq.server.sampling import Sampling
from mlx_tq.session.transcript import Rehydration

from .test_agreement import random_model
from .together import run

VOCABULARY = 4096  # of the tokenizer
CONFIG = KVConfig(
    key="q8", value="tq4", sinks=16, window=32, evict=EvictConfig("knorm:trigger=32:granularity=1", 100, recall=64)
)


class Watched(Engine):
    """Records the rows of the batch and the cached prompts after each step."""

    def __init__(self, *args):
        super().__init__(*args)
        self.steps, self.most_kept = [], 0

    def _step(self):
        super()._step()
        found = self._batch.extract_cache(list(self._running))
        rows = [(uid, list(tokens), caches[0].positions.tolist()) for uid, (caches, tokens) in found.items()]
        self.most_kept = max(self.most_kept, len(self._following._kept))
        self.steps.append((rows, len(self._kept_prompts), self._kept_prompts.nbytes))


def answer(size):
    """Return the steps of this rank's engine, and the answers on the first rank, or how many caches others kept."""
    ranks = join() if is_launched() else ALONE
    assert ranks.size == size
    tokenizer, model = load_tokenizer(embedded_path()), random_model(np.random.default_rng(0), 2, VOCABULARY)
    if not ranks.is_alone:
        divide(model, ranks)
    limits = EngineLimits(**{**LIMITS, "memory": 1_000_000})
    engine = Watched(model, tokenizer, CONFIG, plan_caches(model, CONFIG), limits, Metrics())
    if not ranks.is_first:
        engine.follow()
        return engine.steps, (engine.most_kept, len(engine._following._kept))
    try:
        return engine.steps, asyncio.run(ask_all(engine, tokenizer))
    finally:
        engine.join(60)


class FailingSampler:
    """A greedy sampler whose fourth call raises."""

    def __init__(self):
        self.calls = 0

    def __call__(self, logprobs):
        self.calls += 1
        if self.calls > 3:
            raise RuntimeError("the sampler is broken")
        return GREEDY(logprobs)


async def ask_all(engine, tokenizer):
    """Submit greedy jobs, two of a prompt, one with a stop text, sampled ones, one whose sampler raises and one that is
    cancelled, all at once; then a session.
    """

    def job(count, tokens=12, sampler=GREEDY, **about):
        ids = tokenizer.encode("".join(facts(count)))
        return Job(Prompt(ids, [ids], ["assistant"]), tokens, sampler, [], **about)

    jobs = [job(12), job(14, stops=["e"]), job(6, others=[job(6, index=1)])]
    jobs[2].others[0].events = jobs[2].events
    jobs += [job(8, sampler=Sampling(2.0).sampler(VOCABULARY, seed)) for seed in (1, 2)]
    endless, broken = job(9, 400), job(11, 400, sampler=FailingSampler())
    with engine._changed:  # its thread waits until all are in the queue
        engine.start(asyncio.get_running_loop())
        engine.submit(*jobs, endless, broken)
    assert isinstance((await outcome(broken))[-1], Failed)
    said = [said_by(await outcome(each)) for each in jobs]
    engine.cancel(endless)
    turn, read = Start(None, 0), []
    for question in ("".join(facts(10)), "\nWhat is the access code?\n", "\nAnd the gate of house 3?\n"):
        ids = tokenizer.encode(question)
        each = Job(Prompt([*read, *ids], [read, ids], ["assistant", "user"]), 8, GREEDY, [])
        each.start = turn
        engine.submit(each)
        said.append(said_by(await outcome(each)))
        left = await each.left.get()
        read, quoted = left.tokens, tokenizer.encode(" the gate")
        turn = Start(left.caches, len(read), 1, quote=lambda live, rows, ids=quoted: Rehydration([(0, 2)], ["x"], ids))
        assert left.held.evicted > 0
    return said


def said_by(events):
    """Return the text of each answer."""
    pieces = [event for event in events if isinstance(event, Piece)]
    return ["".join(piece.text for piece in pieces if piece.index == n) for n in range(1 + pieces[-1].index)]


@pytest.mark.full
def test_engines_of_ranks_make_the_same_steps(tmp_path):
    """The same requests run at once, the same rows are evicted and recalled, and a session's caches are kept."""
    (alone,) = run(tmp_path / "alone", 1, answer, 1)
    first, second = run(tmp_path / "together", 2, answer, 2)
    assert all(each.value for each in (alone, first, second)), (alone.err, first.err, second.err)
    steps, said = first.value[:2]
    assert second.value[0] == steps
    assert said == alone.value[1]
    assert max(len(rows) for rows, *_ in steps) > 2
    assert any(len(positions) < len(tokens) for rows, *_ in steps for _, tokens, positions in rows)
    most, last = second.value[1]
    assert (1 <= most <= 2, last) == (True, 0)
