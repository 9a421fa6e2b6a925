"""A fact that eviction removed whole is answered again: a conversation, a service of its own process, FAISS.

Of each case four answers: with every token, with eviction, and with rescue over the very cache that eviction left.
"""

import pytest
from rescue.harness import Server

from mlx_tq import EvictConfig, KVConfig, Session
from mlx_tq.cli.haystack import QUESTION, Verdict, build_case, judge_answer, load_text
from mlx_tq.config import RescueConfig
from mlx_tq.evaluate.inspection import count_needle_tokens

PREFIX, KEPT, WINDOW = 16, 176, 32
TOKENS = 640
# The newest stay, so wherever a fact stands that is older than these it leaves.
EVICT = EvictConfig("recency:granularity=16:trigger=16", KEPT, "off")
EVICTS = KVConfig(sinks=PREFIX, window=WINDOW, evict=EVICT)
KEEPS = KVConfig(sinks=PREFIX, window=WINDOW)
DEPTHS = {"start": 0.0, "middle": 0.5, "end": 1.0}
QUICK = {("start", 0)}
CASES = [
    pytest.param(where, seed, id=f"{where} {seed}", marks=() if (where, seed) in QUICK else pytest.mark.full)
    for where in DEPTHS
    for seed in range(5)
]


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    """With an embedder, so that FAISS is asked too."""
    server = Server(tmp_path_factory.mktemp("rescue") / "data", embedder="hashing")
    server.wait_until_embedded()
    yield server
    server.stop()


def found(session, answer):
    """The answer to the question holds the code word, to the letter."""
    return judge_answer("".join(session.respond(QUESTION, max_tokens=24)), answer) is Verdict.PASS


@pytest.mark.parametrize(("where", "seed"), CASES)
def test_an_evicted_fact_is_answered(exact, service, tmp_path, where, seed):
    model, tokenizer = exact
    room = {"sinks": PREFIX, "window": KEPT + 64}
    case = build_case(tokenizer, load_text(), tokens=TOKENS, depth=DEPTHS[where], seed=seed, chat=False, **room)
    text = tokenizer.decode(case.ids[: case.question])
    fact = case.ids[case.needle[0] : case.needle[1]]
    patient = RescueConfig(service.url, timeout=60)  # however long a busy machine takes to answer
    with (
        Session(model, tokenizer, EVICTS, rescue=patient) as rescued,
        Session(model, tokenizer, EVICTS, warn=lambda _: None) as alone,
        Session(model, tokenizer, KEEPS) as whole,
    ):
        "".join(rescued.respond(text, max_tokens=2))
        start = next(i for i in range(TOKENS) if rescued.ids[i : i + len(fact)] == fact)
        live, _ = count_needle_tokens(rescued.cache, (start, start + len(fact)))
        assert live == 0
        rescued.save(tmp_path / "turn.safetensors")
        alone.load(tmp_path / "turn.safetensors")
        assert rescued.client.flush(60)
        service.wait_until_embedded()
        assert found(rescued, case.answer)
        quoted = rescued.turns[-1].quotation.ranges
        assert any(first <= start and start + len(fact) <= last for first, last in quoted)
        assert rescued.client.stats.found > 0
        assert not found(alone, case.answer)
        assert not alone.turns[-1].quotation.ids
        "".join(whole.respond(text, max_tokens=2))
        assert found(whole, case.answer)  # else the case would say nothing
