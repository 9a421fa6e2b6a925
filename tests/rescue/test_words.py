"""The search by words leaves out the commonest where they cost too much; what it remembers changes nothing."""

import random

import pytest

from rescue_svc.settings import Caps
from rescue_svc.store import NewSpan, SqliteStore, budget, words

CAPS = Caps(10**6, 10**6, 10)
# Each word is in about half as many spans as the one before.
VOCABULARY = ["the", "of", "cache", "token", "rotation", "zebra"]


@pytest.fixture
def store(tmp_path, monkeypatch):
    """With a budget of four."""
    monkeypatch.setattr(budget, "MIN_POSTINGS", 4)
    made = SqliteStore(tmp_path, CAPS)
    yield made
    made.close()


def a_text(rng):
    return " ".join(word for place, word in enumerate(VOCABULARY) if rng.random() < 0.5**place) or "nothing"


def test_what_is_remembered_changes_no_answer(store):
    """A session grows past several budgets; each answer is the one of a search that remembers nothing."""
    remembered, rng = 0, random.Random(1)
    for first in range(0, 900, 10):
        store.write("s", [NewSpan(n, n + 1, -1, 0.0, a_text(rng)) for n in range(first, first + 10)])
        session = store.session("s")
        question = " ".join(rng.sample(VOCABULARY, 4))
        excluded = set(rng.sample(range(1, first + 10), 5))
        with store._read() as connection:
            afresh = words.search(connection, session.id, session.spans, question, 8, excluded, {})
        assert store.bm25(session, question, 8, excluded) == afresh
        assert not excluded & set(afresh)
        remembered += len(store._common_words[session.id])
    assert remembered > 90  # there was something to remember
    store.forget("s")
    assert store._common_words == {}


def test_the_commonest_word_is_left_out_beyond_the_budget(store):
    store.write("s", [NewSpan(n, n + 1, -1, 0.0, "the cache" if n else "the zebra") for n in range(20)])
    session = store.session("s")
    assert list(store.bm25(session, "the zebra", 8, set())) == [1]
    assert len(store.bm25(session, "the", 8, set())) == 8  # alone it is all there is to go by


def test_a_word_that_just_fits_the_budget_is_asked_for_every_time(store):
    store.write("s", [NewSpan(n, n + 1, -1, 0.0, "cache" if n else "zebra") for n in range(4)])
    session = store.session("s")
    for _ in range(2):
        assert set(store.bm25(session, "zebra cache", 8, set())) == {1, 2, 3, 4}
