"""The search by words leaves out the commonest where they cost too much; what it remembers changes nothing."""

import random

import pytest

from rescue_svc.opening import open_all
from rescue_svc.settings import load_settings
from rescue_svc.store import NewSpan, fts

from .harness import EACH_STORE

# Each word is in about half as many spans as the one before.
VOCABULARY = ["the", "of", "cache", "token", "rotation", "zebra"]


def opened(kept_in, folder):
    return open_all(load_settings(data_dir=folder, **kept_in(folder)), "", 0)[0]


@pytest.fixture
def store(tmp_path, monkeypatch, kept_in):
    """With a budget of four."""
    monkeypatch.setattr(fts, "MIN_POSTINGS", 4)
    made = opened(kept_in, tmp_path / "data")
    yield made
    made.close()


def a_text(rng):
    return " ".join(word for place, word in enumerate(VOCABULARY) if rng.random() < 0.5**place) or "nothing"


@EACH_STORE
def test_what_is_remembered_changes_no_answer(store):
    """A session grows past several budgets; each answer is the one of a search that remembers nothing."""
    remembered, rng = 0, random.Random(1)
    for first in range(0, 900, 10):
        store.write("s", [NewSpan(n, n + 1, -1, 0.0, a_text(rng)) for n in range(first, first + 10)])
        session = store.session("s")
        question = " ".join(rng.sample(VOCABULARY, 4))
        excluded = set(rng.sample(range(1, first + 10), 5))
        found = store.bm25(session, question, 8, excluded)
        known = store._common_words.pop(session.id, {})
        assert store.bm25(session, question, 8, excluded) == found
        assert not excluded & set(found)
        store._common_words[session.id] = known
        remembered += len(known)
    assert remembered > 90  # there was something to remember
    store.forget("s")
    assert store._common_words == {}


@EACH_STORE
def test_the_commonest_word_is_left_out_beyond_the_budget(store):
    store.write("s", [NewSpan(n, n + 1, -1, 0.0, "the cache" if n else "the zebra") for n in range(20)])
    session = store.session("s")
    assert list(store.bm25(session, "the zebra", 8, set())) == [1]
    for _ in range(2):
        assert len(store.bm25(session, "the", 8, set())) == 8  # alone it is all there is to go by


@EACH_STORE
def test_a_word_that_just_fits_the_budget_is_asked_for_every_time(store):
    store.write("s", [NewSpan(n, n + 1, -1, 0.0, "cache" if n else "zebra") for n in range(4)])
    session = store.session("s")
    for _ in range(2):
        assert set(store.bm25(session, "zebra cache", 8, set())) == {1, 2, 3, 4}


def test_both_stores_score_alike(tmp_path, postgres):
    """FTS5's BM25 against ours, to the last figures: rare and common words, repeated ones, stems, and other scripts."""
    rng = random.Random(2)
    words = [*VOCABULARY, "evicted", "evicts", "generalizations", "7742", "Été", "naïve", "ΔΕΛΤΑ", "слово", "v2", "x"]
    texts = [" ".join(rng.choices(words, k=rng.randint(1, 300))) for _ in range(60)]
    answers = []
    for place in (lambda _: {}, lambda folder: {"store": postgres.database(folder)}):
        store = opened(place, tmp_path / "data")
        store.write("s", [NewSpan(n, n + 1, -1, 0.0, text) for n, text in enumerate(texts)])
        # FTS5 counts two words of one stem twice.
        several = [" ".join(rng.sample([*set(words) - {"evicts"}], 3)) for rng in map(random.Random, range(20))]
        asked = [*words, *several]
        answers.append([store.bm25(store.session("s"), question, 99, set()) for question in asked])
        store.close()
    for one, other in zip(*answers, strict=True):
        assert one == pytest.approx(other, rel=1e-5)
