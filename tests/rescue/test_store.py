"""Stores without a service: the embedding queue, resident indexes, and keyword search within its budget."""

import random
import sqlite3
import unicodedata
from contextlib import closing
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from rescue_svc.errors import RescueServiceError
from rescue_svc.index import Residents
from rescue_svc.store import NewSpan, fts
from rescue_svc.store.files import DATABASE, INDEXES, connect, write_durably

from .harness import EACH_STORE, command, open_store

MODEL, DIM = "test-1", 4
# Each word is in about half as many spans as the one before.
VOCABULARY = ["the", "of", "cache", "token", "rotation", "zebra"]


@pytest.fixture
def store(opening, tmp_path, storage):
    return opening(data_dir=tmp_path, **storage(tmp_path))[0]


def spans(*starts, text="été"):
    """Return spans of ten positions."""
    return [NewSpan(start, start + 10, -1, 0.5, f"{text} {start}") for start in starts]


def texts(*texts):
    return [NewSpan(n, n + 1, -1, 0.0, text) for n, text in enumerate(texts)]


def embed(store, model=MODEL):
    """Embed each span without a vector; return the ids in their order."""
    done = []

    def vectors(waiting):
        done.extend(item.span for item in waiting)
        return np.eye(DIM, dtype=np.float32)[[item.span % DIM for item in waiting]]

    while store.embed_next(model, 100, vectors):
        pass
    return done


@EACH_STORE
def test_a_session_counts_its_spans_and_bytes(store):
    assert store.write("a", spans(0, 10)) == (2, 2)
    assert store.write("b", spans(0)) == (1, 1)
    assert store.write("a", spans(10, 20)) == (1, 3)
    store.write("c", spans(0))
    store.write("b", spans(0))
    counts = [(s.name, s.spans, s.text_bytes) for s in store.sessions()]
    assert counts == [("b", 1, 7), ("c", 1, 7), ("a", 3, 7 + 8 + 8)]  # the last written comes first


@EACH_STORE
def test_spans_are_embedded_once_per_model_and_forgotten_with_their_ids(store):
    store.write("a", spans(0, 10))
    store.write("b", spans(0))
    assert store.count_pending(MODEL) == 3
    assert embed(store) == [1, 2, 3]
    assert (store.count_pending(MODEL), embed(store)) == (0, [])
    a = store.session("a").id
    assert (store.count_vectors(a, MODEL), store.count_vectors(a, "another")) == (2, 0)
    assert store.count_pending("another") == len(embed(store, "another")) == 3
    assert (store.count_pending("another"), store.count_pending(MODEL)) == (0, 3)  # it replaced the first
    assert (store.count_vectors(a, MODEL), store.count_vectors(a, "another")) == (0, 2)
    forgotten, b = store.session("a"), store.session("b").id
    assert store.forget("a").spans == 2
    assert (store.spans(forgotten), store.count_vectors(a, "another"), store.count_vectors(b, "another")) == ([], 0, 1)
    store.write("a", spans(0))
    assert store.session("a").id > b
    assert [span.id for span in store.spans(store.session("a"))] == [4]  # ids are not used again


@EACH_STORE
def test_a_failed_span_stays_in_the_queue_until_it_is_given_up(store):
    store.write("a", spans(0, 10))

    with pytest.raises(ZeroDivisionError):
        store.embed_next(MODEL, 2, lambda _: 1 / 0)
    assert store.count_pending(MODEL) == 2
    store.give_up(MODEL, 1)
    assert embed(store) == [2]
    assert store.count_pending(MODEL) == 1


# Connections to SQLite; Python 3.13 warns of those that nobody closes.


@pytest.fixture
def connections(monkeypatch):
    """Return a list that gets every connection that is opened."""
    opened, real = [], sqlite3.connect

    def connect_and_remember(*args, **options):
        opened.append(real(*args, **options))
        return opened[-1]

    monkeypatch.setattr(sqlite3, "connect", connect_and_remember)
    return opened


def is_open(connection):
    try:
        connection.total_changes  # noqa: B018  raises if it is closed
    except sqlite3.ProgrammingError:
        return False
    return True


@pytest.mark.parametrize("words", [("doctor",), ("sessions",), ("rebuild",), ("backup", "copy"), ("forget", "a")])
def test_commands_close_the_connections_to_a_damaged_database(connections, opening, tmp_path, words):
    opening(data_dir=tmp_path / "data")[0].write("a", spans(0))
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / DATABASE).write_bytes(b"no database" * 1000)
    connections.clear()
    words = [tmp_path / word if word == "copy" else word for word in words]
    assert command(*words, "--embedder", "none", "--data-dir", tmp_path / "damaged").code == 1
    assert connections
    assert not [*filter(is_open, connections)]


def test_a_store_that_cannot_be_opened_closes_its_connections(connections, opening, tmp_path):
    (tmp_path / INDEXES).touch()  # a file, where a folder is needed
    with pytest.raises(RescueServiceError, match="cannot be used"):
        open_store(data_dir=tmp_path)
    assert connections
    assert not [*filter(is_open, connections)]
    (tmp_path / INDEXES).unlink()
    opening(data_dir=tmp_path)  # the lock was released


@pytest.mark.full  # SQLite waits ten seconds for the reader
def test_a_store_that_cannot_be_sealed_closes_its_connections(connections, opening, tmp_path):
    store, _ = open_store(data_dir=tmp_path)
    store.write("a", spans(0))
    with closing(sqlite3.connect(tmp_path / DATABASE, isolation_level=None)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT * FROM spans").fetchone()
        with pytest.raises(RescueServiceError, match="reads the database"):
            store.close()
        assert [*filter(is_open, connections)] == [reader]
    opening(data_dir=tmp_path)  # the lock was released


# Resident indexes, which only SQLite needs.


def residents(store, max_bytes=2**20):
    return Residents(store, MODEL, lambda: DIM, max_bytes)


def test_an_index_follows_the_store_and_is_restored_from_its_file(store):
    store.write("a", spans(0, 10))
    embed(store)
    index, a = residents(store), store.session("a").id
    assert index.resume(a) == 2
    store.write("a", spans(20))
    embed(store)
    assert index.resume(a) == index.resume(a) == 3  # each vector once
    query = np.eye(DIM, dtype=np.float32)[3]
    assert next(iter(index.search(a, query, 8, set()).items())) == (3, 1.0)
    assert index.hibernate(a) == 3
    assert not index.is_resident(a)
    assert (residents(store).resume(a), len(list(store.directory.glob("index/*.index")))) == (3, 1)
    index.resume(a)
    index.forget(a)
    assert not index.is_resident(a)
    assert not list(store.directory.glob("index/*"))


def test_an_index_file_older_than_a_vector_is_rebuilt(store):
    store.write("a", spans(0, 10))
    first, second = embed(store)
    index, a = residents(store), store.session("a").id
    index.resume(a)
    index.hibernate(a)
    with closing(connect(store.directory / DATABASE)) as database:
        database.execute("DELETE FROM embeddings WHERE span = ?", (first,))
    store.give_up(MODEL, 0)  # so that the search for spans without a vector begins again
    store.embed_next(MODEL, 2, lambda waiting: np.eye(DIM, dtype=np.float32)[[3] * len(waiting)])
    results = residents(store).search(a, np.eye(DIM, dtype=np.float32)[3], 8, set())
    assert results == {first: 1.0, second: 0.0}
    assert residents(store).resume(a) == 2


def test_the_least_recently_used_index_is_evicted_first(store):
    for name in ("a", "b", "c"):
        store.write(name, spans(0))
    embed(store)
    index = residents(store, max_bytes=2 * DIM * 4)
    a, b, c = (store.session(name).id for name in ("a", "b", "c"))
    for session in (a, b, a, c):
        index.resume(session)
    assert [index.is_resident(session) for session in (a, b, c)] == [True, False, True]


# Keyword search, which leaves out the commonest words where they would read too many postings.


@pytest.fixture
def budget_of_four(monkeypatch):
    monkeypatch.setattr(fts, "MIN_POSTINGS", 4)


@pytest.mark.full
@EACH_STORE
def test_cached_word_counts_change_no_result(budget_of_four, store, tmp_path, storage):
    """Every result equals that of a store that was just opened, while the session grows past several budgets."""
    rng = random.Random(1)
    for first in range(0, 900, 30):
        words = ([word for place, word in enumerate(VOCABULARY) if rng.random() < 0.5**place] for _ in range(30))
        new = [NewSpan(first + n, first + n + 1, -1, 0.0, " ".join(text) or "nothing") for n, text in enumerate(words)]
        store.write("s", new)
        fresh, _ = open_store(data_dir=tmp_path / "fresh", **storage(tmp_path / "fresh"))
        fresh.write("s", new)
        question, excluded = " ".join(rng.sample(VOCABULARY, 4)), set(rng.sample(range(1, first + 30), 5))
        results = store.bm25(store.session("s"), question, 8, excluded)
        assert results == fresh.bm25(fresh.session("s"), question, 8, excluded)
        assert results
        assert not excluded & set(results)
        fresh.close()
    assert store._common_words
    store.forget("s")
    assert not store._common_words


@EACH_STORE
def test_the_commonest_word_is_left_out_beyond_the_budget(budget_of_four, store):
    store.write("s", texts("the zebra", *["the cache"] * 19))
    store.write("fits", texts("zebra", *["cache"] * 3))
    session, fits = store.session("s"), store.session("fits")
    assert list(store.bm25(session, "the zebra", 8, set())) == [1]
    for _ in range(2):
        assert len(store.bm25(session, "the", 8, set())) == 8  # the question has no other word
        assert set(store.bm25(fits, "zebra cache", 8, set())) == {21, 22, 23, 24}


@EACH_STORE
@pytest.mark.parametrize(
    ("text", "query"),
    [
        ("résumé", "re\u0301sume\u0301"),
        ("fox", "fox\u0301"),
        ("İstanbul", "İSTANBUL".lower()),
        ("STRASSE", "straße"),
        ("ΦΙΛΟΣ", "φίλος"),
        ("ﬁle x²", "file x2"),
        ("résumé_2", "resume"),
    ],
)
def test_spellings_of_a_word_are_one(store, text, query):
    store.write("s", texts(text, "another"))
    assert list(store.bm25(store.session("s"), query, 9, set())) == [1]


# Letters with other forms; words of them end in no English suffix, which would be stemmed.
LETTERS = [*"bfgkBFGKáÁäüÜǗİßφΦςΣфЙй漢ﬀ²①½", "a\u0301"]
WORDS = st.lists(st.sampled_from(LETTERS), min_size=1, max_size=5).map("".join)
FORMS = [str.lower, str.upper, *(partial(unicodedata.normalize, form) for form in ("NFC", "NFD"))]


def test_both_stores_find_a_word_in_any_form(opening, tmp_path, postgres, times):
    stores = [opening(data_dir=tmp_path, **options)[0] for options in ({}, {"store": postgres.database()})]

    @examples(max_examples=times(300))
    @given(st.lists(st.lists(WORDS, min_size=1, max_size=3), min_size=1, max_size=5), st.data())
    def check(pages, data):
        word = data.draw(st.sampled_from(data.draw(st.sampled_from(pages))))
        query = data.draw(st.sampled_from(FORMS))(word)
        joined = [data.draw(st.sampled_from(" _-.'\u2060")).join(page) for page in pages]
        results = []
        for store in stores:
            store.write("s", texts(*joined))
            session = store.session("s")
            found = store.bm25(session, query, 99, set())
            results.append({span.start for span in store.spans(session, list(found))})
            store.forget("s")
        assert results[0] == results[1] >= {number for number, page in enumerate(pages) if word in page}

    check()


def test_both_stores_score_alike(opening, tmp_path, postgres):
    """FTS5's BM25 equals ours: rare and common words, repeated ones, stems, and other scripts."""
    rng = random.Random(2)
    words = [*VOCABULARY, "evicted", "evicts", "generalizations", "7742", "Été", "naïve", "ΔΕΛΤΑ", "слово", "v2", "x"]
    pages = texts(*(" ".join(rng.choices(words, k=rng.randint(1, 300))) for _ in range(60)))
    # FTS5 counts two words of one stem twice.
    several = [" ".join(rng.sample([*set(words) - {"evicts"}], 3)) for rng in map(random.Random, range(20))]
    scores = []
    for settings in ({}, {"store": postgres.database()}):
        store, _ = opening(data_dir=tmp_path, **settings)
        store.write("s", pages)
        scores.append([store.bm25(store.session("s"), question, 99, set()) for question in (*words, *several)])
    for one, other in zip(*scores, strict=True):
        assert one == pytest.approx(other, rel=1e-5)


def test_a_write_that_fails_leaves_the_file_and_nothing_else(tmp_path):
    path = tmp_path / "1.index"
    write_durably(path, b"before")
    with pytest.raises(TypeError):
        write_durably(path, b"after", "no bytes")
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [("1.index", b"before")]
