"""A conversation over one cache: what is read, what is kept, what comes back, and what an interruption leaves."""

import signal
import threading

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from rescue.harness import Server

from mlx_tq import EvictConfig, KVConfig, Session, attention, make_prompt_cache, save_prompt_cache
from mlx_tq.config import PROFILES, RescueConfig
from mlx_tq.errors import CacheFormatError, ConfigError
from mlx_tq.haystack import load_text
from mlx_tq.models import fingerprint
from mlx_tq.session.quote import MARK, OPENING

# Small regions, so that a text of a page is mostly packed and soon over budget.
SMALL = KVConfig(key="q8", value="q8", prefix=16, window=32)
EVICTS = KVConfig(
    key="q8",
    value="q8",
    prefix=16,
    window=32,
    evict=EvictConfig(policy="recency", budget=128, granularity=16, trigger=16),
)
FACT = "The access code is 417295."
QUESTION = "What is the access code?"


def page(letters=1200, fact=FACT):
    text = load_text()[:letters]
    return f"{text[:300]} {fact} {text[300:]}"


def say(session, text, **options):
    return "".join(session.respond(text, **options))


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    """A real one."""
    server = Server(tmp_path_factory.mktemp("rescue") / "data", embedder="none")
    yield server
    server.stop()


@pytest.fixture
def chat(embedded):
    """Make sessions; all are closed after the test. What they warn of is in `warned`."""
    made = []

    def make(config=SMALL, **options):
        session = Session(*embedded, config, warn=make.warned.append, **{"max_tokens": 12, **options})
        made.append(session)
        return session

    make.warned = []
    yield make
    for session in made:
        session.close()


def test_a_conversation_is_what_the_template_makes_of_it(embedded, chat):
    """Token by token, and with mlx-lm's cache the answers are mlx-lm's own to the whole conversation."""
    model, tokenizer = embedded
    session = chat(PROFILES["off"], system_prompt="Be short.")
    messages = [{"role": "system", "content": "Be short."}]
    for words in ("The access code is 417295.", QUESTION, "And what is the access code?"):
        messages.append({"role": "user", "content": words})
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        expected = mlx_lm.generate(model, tokenizer, prompt, max_tokens=12)
        assert say(session, words) == expected
        assert session.ids[: len(prompt)] == prompt
        messages.append({"role": "assistant", "content": expected})
    assert "417295" in expected
    assert [turn.prompt_tokens for turn in session.turns][1:] == [19, 20]  # new tokens alone
    assert all(cache.offset == len(session.ids) for cache in session.cache)


def test_what_was_evicted_comes_back(chat, service):
    """With a real service; without it the same conversation has lost the fact."""
    answers = {}
    for rescue in ("off", service.url):
        session = chat(EVICTS, rescue=rescue)
        say(session, page())
        fact = session.ids.index(session.tokenizer.encode("417295")[0], 5)
        assert fact not in session._live()  # `recency` leaves the newest alone
        answers[rescue] = say(session, QUESTION)
        turn = session.turns[-1]
        assert bool(turn.rehydration.ids) == (rescue != "off")
        assert turn.finish_reason == "stop"
    assert "417295" not in answers["off"]
    assert "417295" in answers[service.url]
    quoted = session.tokenizer.decode(turn.rehydration.ids)
    assert quoted.startswith(OPENING)
    assert MARK in quoted
    assert "417295" in quoted
    assert any(first <= fact < last for first, last in turn.rehydration.ranges)
    stats = session.stats
    assert stats.live + stats.evicted == stats.tokens == len(session.ids)
    assert stats.rescued == len(turn.rehydration.ids)
    assert stats.rescue.found >= 1
    assert stats.nbytes < stats.fp16_nbytes
    assert [w for w in chat.warned if "choose --rescue auto" in w] == chat.warned[:1]


def test_a_quotation_stays_while_it_is_needed_and_is_not_stored_twice(chat, service):
    """It is far larger than the budget, and the answer longer than the window."""
    session = chat(EVICTS, rescue=RescueConfig(service.url, max_tokens=200))
    say(session, page())
    live = []
    for _ in session.respond(QUESTION, max_tokens=48):
        live.append(set(map(int, session._live())))
    turn = session.turns[-1]
    (start, stop) = session._memory.copies[0]
    assert stop - start == len(turn.rehydration.ids) > 100
    assert all(set(range(start, stop)) <= now for now in live)
    say(session, "Go on.", max_tokens=60)
    assert not set(range(start, stop)) <= set(map(int, session._live()))  # and then it goes as others do
    session.client.flush(30)
    kept = service.dump(session.session_id)["token_ranges"]
    stored = {position for first, last in kept for position in range(first, last)}
    assert stored
    assert not stored & {p for first, last in session._memory.copies for p in range(first, last)}


def test_the_last_position_is_the_end(chat, embedded, monkeypatch):
    monkeypatch.setattr(embedded[0].args, "max_position_embeddings", 400)
    session = chat(EVICTS)
    overhead = len(session._around.opening()) + len(session._around.closing())
    say(session, "word" + " word" * (357 - overhead), max_tokens=1)
    assert len(session.ids) == 360  # 90 %
    assert session.stats.evicted > 0
    assert not any("positions" in warning for warning in chat.warned)
    say(session, "word", max_tokens=1)
    assert [w for w in chat.warned if "positions" in w] == [
        f"the conversation has {len(session.ids)} of the model's 400 positions; it ends there, evicted tokens included."
    ]
    before = session.ids
    with pytest.raises(ConfigError, match=r"3\d\d tokens and this turn .* Start a new conversation"):
        say(session, "word " * 50)
    assert session.ids == before
    said = say(session, "Hi", max_tokens=-1)
    assert said
    assert len(session.ids) <= session.positions
    session.reset()
    assert session.stats.tokens == 0
    assert "417295" in say(session, f"{FACT} {QUESTION}")


@pytest.mark.parametrize("config", [PROFILES["off"], SMALL], ids=["mlx-lm's cache", "compressed"])
def test_stopping_an_answer_keeps_the_session(chat, config):
    session = chat(config)
    for piece in session.respond(f"{FACT} {QUESTION}"):
        if piece:
            session.stop()
    assert session.turns[-1].finish_reason == "interrupted"
    for _ in session.respond("Hello"):
        break  # leaving the loop does the same
    assert all(cache.offset == len(session.ids) for cache in session.cache)
    assert "417295" in say(session, QUESTION)


def test_stopping_before_the_answer_undoes_the_turn(chat):
    session = chat(prefill_step_size=32)
    say(session, FACT)
    before = session.ids
    replies = session.respond(page(4000, ""))
    threading.Timer(0.3, session.stop).start()
    assert list(replies) == []
    assert session.ids == before
    assert session.stats.turns == 1
    assert all(cache.offset == len(before) for cache in session.cache)
    assert "417295" in say(session, QUESTION)


def test_a_first_turn_that_is_undone_leaves_nothing(chat):
    session = chat(prefill_step_size=32)
    replies = session.respond(page(4000, ""))
    threading.Timer(0.3, session.stop).start()
    assert list(replies) == []
    stats = session.stats
    assert (stats.turns, stats.tokens, stats.live, stats.nbytes, stats.fp16_nbytes) == (0, 0, 0, 0, 0)


@pytest.mark.parametrize("most", [0, -2, 1.5, True, "3"])
def test_max_tokens_that_cannot_be_met(chat, embedded, most):
    with pytest.raises(ConfigError, match="1 or more, or -1"):
        say(chat(), QUESTION, max_tokens=most)
    with pytest.raises(ConfigError, match="1 or more, or -1"):
        Session(*embedded, SMALL, max_tokens=most)


@pytest.mark.parametrize(("text", "says"), [("a \udcff", "message is not UTF-8"), (None, "NoneType"), (b"a", "bytes")])
def test_what_is_no_text(chat, text, says):
    session = chat()
    with pytest.raises(ConfigError, match=says):
        say(session, text)
    with pytest.raises(ConfigError, match="system prompt is not UTF-8"):
        chat(system_prompt="\udcff")
    assert session.stats.turns == 0


def test_a_closed_session_does_not_answer(chat):
    session = chat()
    session.close()
    with pytest.raises(ConfigError, match="closed"):
        say(session, QUESTION)


@pytest.mark.parametrize("calls_before", [8, 26], ids=["in the prompt", "in the answer"])
def test_ctrl_c_in_a_forward_pass(embedded, chat, calls_before):
    """The exception comes when half of the six layers have read the token."""
    model, _ = embedded
    session = chat()
    say(session, FACT)
    layer = model.model.layers[3]
    original, calls = type(layer).__call__, []

    def interrupted(self, *args, **kwargs):
        calls.append(self)
        if self is layer and len(calls) > calls_before:
            signal.raise_signal(signal.SIGINT)
        return original(self, *args, **kwargs)

    type(layer).__call__ = interrupted
    try:
        with pytest.raises(KeyboardInterrupt):
            say(session, QUESTION)
    finally:
        type(layer).__call__ = original
    assert all(cache.offset == len(session.ids) for cache in session.cache)
    assert "417295" in say(session, QUESTION)


def test_one_turn_at_a_time(chat):
    session = chat()
    first = session.respond(FACT)
    next(first)
    with pytest.raises(ConfigError, match="in progress"):
        say(session, QUESTION)
    first.close()
    assert "417295" in say(session, QUESTION)


def test_saved_and_resumed_it_goes_on_as_if_nothing_happened(chat, service, tmp_path):
    """In a session of another configuration, at a service that has forgotten it."""
    session = chat(EVICTS, rescue=service.url)
    say(session, page())
    session.save(tmp_path / "chat.safetensors")
    ids, live, evicted = session.ids, session._live(), session.stats.evicted
    answer = say(session, QUESTION)
    assert session.client.forget(session.session_id, 30)
    resumed = chat(SMALL, rescue=service.url)
    say(resumed, "something else")
    resumed.load(tmp_path / "chat.safetensors")
    assert (resumed.ids, resumed.session_id, resumed.config) == (ids, session.session_id, EVICTS)
    assert np.array_equal(resumed._live(), live)
    assert resumed.stats.evicted == evicted > 0
    assert resumed.client.flush(30)
    assert say(resumed, QUESTION) == answer
    assert "417295" in answer
    assert resumed.ids == session.ids


def test_files_that_are_no_conversation(chat, tmp_path, embedded):
    session = chat()
    with pytest.raises(ConfigError, match="nothing to save"):
        session.save(tmp_path / "x.safetensors")
    with pytest.raises(CacheFormatError, match="no conversation"):
        session.load(tmp_path / "x.safetensors")
    (tmp_path / "x.safetensors").write_bytes(bytes(20))
    with pytest.raises(CacheFormatError, match="damaged"):
        session.load(tmp_path / "x.safetensors")
    caches = make_prompt_cache(embedded[0], SMALL)
    with attention(embedded[0]):
        embedded[0](mx.array([[5, 6, 7]]), cache=caches)
    save_prompt_cache(tmp_path / "x.safetensors", caches, model=fingerprint(embedded[0]), config=SMALL)
    with pytest.raises(CacheFormatError, match="not a conversation"):
        session.load(tmp_path / "x.safetensors")
    assert "417295" in say(session, f"{FACT} {QUESTION}")
    with pytest.raises(CacheFormatError, match=f"{tmp_path}: .*it is a folder"):
        session.save(tmp_path)
    assert "417295" in say(session, QUESTION)  # and the session is as it was
