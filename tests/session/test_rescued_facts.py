"""A fact that eviction removed completely is answered again with rescue, and not without it."""

import pytest
from rescue.harness import Server

from mlx_tq import EvictConfig, KVConfig, Session
from mlx_tq.cli.haystack import QUESTION, Verdict, build_case, judge_answer
from mlx_tq.cli.inputs import load_text
from mlx_tq.config import RescueConfig
from mlx_tq.evaluate.inspection import count_needle_tokens

SINKS, BUDGET, WINDOW = 16, 176, 32
TOKENS = 640
# The most recent tokens stay, so any older fact is evicted.
EVICT = EvictConfig("recency:granularity=16:trigger=16", BUDGET, "off")
EVICTING = KVConfig(sinks=SINKS, window=WINDOW, evict=EVICT)
WHOLE = KVConfig(sinks=SINKS, window=WINDOW)
DEPTHS = {"start": 0.0, "middle": 0.5, "end": 1.0}
CASES = [pytest.param(where, seed, id=f"{where} {seed}") for where in DEPTHS for seed in range(5)]


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    server = Server(tmp_path_factory.mktemp("rescue") / "data", embedder="hashing")
    server.wait_until_embedded()
    yield server
    server.stop()


def answers(session, answer):
    return judge_answer("".join(session.respond(QUESTION, max_tokens=24)), answer) is Verdict.PASS


@pytest.mark.full
@pytest.mark.parametrize(("where", "seed"), CASES)
def test_an_evicted_fact_is_answered(exact, service, tmp_path, where, seed):
    model, tokenizer = exact
    room = {"sinks": SINKS, "window": BUDGET + 64}
    case = build_case(tokenizer, load_text(), tokens=TOKENS, depth=DEPTHS[where], seed=seed, chat=False, **room)
    text = tokenizer.decode(case.ids[: case.question])
    fact = case.ids[case.needle[0] : case.needle[1]]
    warnings = []
    patient = RescueConfig(service.url, timeout=60)  # for a busy machine
    with (
        Session(model, tokenizer, EVICTING, rescue=patient) as rescued,
        Session(model, tokenizer, EVICTING, warn=warnings.append) as alone,
        Session(model, tokenizer, WHOLE) as whole,
    ):
        "".join(rescued.respond(text, max_tokens=2))
        start = next(i for i in range(TOKENS) if rescued.ids[i : i + len(fact)] == fact)
        live, _ = count_needle_tokens(rescued.cache, (start, start + len(fact)))
        assert live == 0
        rescued.save(tmp_path / "turn.safetensors")
        alone.load(tmp_path / "turn.safetensors")
        assert rescued.client.flush(60)
        service.wait_until_embedded()
        assert answers(rescued, case.answer)
        quoted = rescued.turns[-1].quotation.ranges
        assert any(first <= start and start + len(fact) <= last for first, last in quoted)
        assert rescued.client.stats.retrieved > 0
        assert rescued.quoted_tokens == sum(len(turn.quotation.ids) for turn in rescued.turns)
        assert not answers(alone, case.answer)
        assert not alone.turns[-1].quotation.ids
        assert sum("or --rescue auto" in warning for warning in warnings) == 1
        stats = alone.stats
        assert stats.live + stats.evicted == stats.tokens == len(alone.ids)
        assert stats.archived + stats.dropped == stats.evicted
        assert stats.nbytes < stats.native_nbytes
        "".join(whole.respond(text, max_tokens=2))
        assert answers(whole, case.answer)
