"""The stores by themselves: what a session holds, what it gives back, and what is gone."""

from dataclasses import replace

import numpy as np
import pytest

from rescue_svc.errors import SessionFullError, SessionNotFoundError, StoreFullError
from rescue_svc.index import Residents
from rescue_svc.opening import open_all
from rescue_svc.settings import load_settings
from rescue_svc.store import NewSpan

from .harness import EACH_STORE

MODEL, DIM = "test-1", 4
CAPS = {"max_session_spans": 4, "max_spans": 6, "max_sessions": 3}


@pytest.fixture
def opened(tmp_path, kept_in):
    """A store and the index over it."""
    folder = tmp_path / "data"
    store, index = open_all(load_settings(data_dir=folder, **kept_in(folder), **CAPS), MODEL, lambda: DIM)
    yield store, index
    store.close()


@pytest.fixture
def store(opened):
    return opened[0]


def spans(*starts, text="été"):
    """Spans of ten positions."""
    return [NewSpan(start, start + 10, -1, 0.5, f"{text} {start}") for start in starts]


def embed(store, model=MODEL):
    """Give each span without a vector one; return the ids in their order."""
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
    assert {s.name: (s.spans, s.text_bytes) for s in store.sessions()} == {"a": (3, 7 + 8 + 8), "b": (1, 7)}
    store.write("c", spans(0))
    store.write("b", spans(0))
    assert [session.name for session in store.sessions()] == ["b", "c", "a"]  # the one written last comes first


@EACH_STORE
def test_spans_are_in_the_order_in_which_they_came(store):
    """Also where one of a call comes twice: its first place counts, and the score that it had there."""
    *two, again = spans(10, 0, 10)
    assert store.write("a", [*two, replace(again, score=0.9)]) == (2, 2)
    found = store.spans(store.session("a"))
    assert [(span.start, span.score) for span in found] == [(10, 0.5), (0, 0.5)]


@EACH_STORE
def test_caps_take_what_just_fits_and_nothing_more(store):
    assert store.write("a", spans(0, 10, 20, 30)) == (4, 4)
    with pytest.raises(SessionFullError):
        store.write("a", spans(40))
    assert store.write("b", spans(0, 10)) == (2, 2)
    with pytest.raises(StoreFullError, match="6"):
        store.write("b", spans(20))
    assert store.write("c", spans()) == (0, 0)
    with pytest.raises(StoreFullError, match="3 sessions"):
        store.write("d", spans())
    assert [session.spans for session in store.sessions()] == [0, 2, 4]  # what was refused left nothing


@EACH_STORE
def test_spans_by_id_are_of_the_session_that_is_asked(store):
    store.write("a", spans(20, 0, 10))
    store.write("b", spans(0))
    a, b = store.session("a"), store.session("b")
    assert [(span.id, span.start) for span in store.spans(a)] == [(1, 20), (2, 0), (3, 10)]
    assert [span.id for span in store.spans(a, [3, 1, 4])] == [1, 3]
    assert [span.id for span in store.spans(b, [3, 1, 4])] == [4]
    assert store.spans(a, []) == []


@EACH_STORE
@pytest.mark.parametrize(
    ("ranges", "covered"),
    [
        ([(0, 10)], {1}),
        ([(0, 9)], set()),
        ([(1, 10)], set()),
        ([(0, 11), (19, 30)], {1, 3}),
        ([(0, 5), (5, 10)], set()),
        ([(0, 30)], {1, 2, 3}),
    ],
)
def test_a_span_is_covered_when_all_of_it_is(store, ranges, covered):
    store.write("a", spans(0, 10, 20))
    store.write("b", spans(0))
    assert store.covered(store.session("a"), ranges) == covered


@EACH_STORE
def test_words_are_of_the_session_and_the_best_first(store):
    store.write("a", [NewSpan(0, 1, -1, 0.0, "one fox and a long tail of other words"), NewSpan(1, 2, -1, 0.0, "fox")])
    store.write("b", [NewSpan(0, 1, -1, 0.0, "fox fox")])
    found = store.bm25(store.session("a"), "fox", 8, set())
    assert list(found) == [2, 1]
    assert found[2] > found[1]
    assert list(store.bm25(store.session("a"), "fox", 1, {2})) == [1]
    assert store.bm25(store.session("a"), "owl", 8, set()) == {}


@EACH_STORE
def test_vectors_wait_are_kept_and_are_counted(store):
    store.write("a", spans(0, 10))
    store.write("b", spans(0))
    assert store.count_pending(MODEL) == 3
    assert embed(store) == [1, 2, 3]
    assert (store.count_pending(MODEL), embed(store)) == (0, [])
    a = store.session("a").id
    assert (store.count_vectors(a, MODEL), store.count_vectors(a, "another")) == (2, 0)
    assert store.count_pending("another") == len(embed(store, "another")) == 3
    assert (store.count_pending("another"), store.count_pending(MODEL)) == (0, 3)  # it took the place of the first
    assert (store.count_vectors(a, MODEL), store.count_vectors(a, "another")) == (0, 2)


@EACH_STORE
def test_what_cannot_be_embedded_waits_and_what_is_given_up_lets_others_pass(store):
    store.write("a", spans(0, 10))

    def fail(waiting):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        store.embed_next(MODEL, 2, fail)
    assert store.count_pending(MODEL) == 2
    store.give_up(MODEL, 1)
    assert embed(store) == [2]
    assert store.count_pending(MODEL) == 1


@EACH_STORE
def test_the_nearest_come_first_and_those_left_out_do_not(opened):
    store, index = opened
    store.write("a", spans(0, 10, 20))
    store.write("b", spans(0))
    embed(store)
    a = index.current(store.session("a").id)
    query = np.array([0, 0.6, 0.8, 0], np.float32)
    assert a.search(query, 2, set()) == pytest.approx({2: 0.8, 1: 0.6})
    assert list(a.search(query, 8, {2})) == [1, 3]
    assert a.similarities(query, [1, 3, 4]) == pytest.approx({1: 0.6, 3: 0})
    assert index.resume(store.session("a").id) == 3


def test_vectors_are_pulled_as_they_come(store):
    store.write("a", spans(0, 10))
    embed(store)
    a = store.session("a").id
    held = store.vectors(a, MODEL, 0, DIM)
    assert (held.spans.tolist(), held.last) == ([1, 2], 2)
    np.testing.assert_array_equal(held.vectors, np.eye(DIM)[[1, 2]])
    newer = store.vectors(a, MODEL, 1, DIM)
    assert (newer.spans.tolist(), newer.last) == ([2], 2)
    assert store.vectors(a, MODEL, 2, DIM).last == 2
    assert [store.count_vectors(a, MODEL, upto) for upto in (0, 1, 2, 3)] == [0, 1, 2, 2]
    assert store.vectors(a, "another", 0, DIM).last == 0


@EACH_STORE
def test_forgotten_is_gone_and_the_rest_stays(store):
    store.write("a", spans(0, 10, text="Xylophon"))
    store.write("b", spans(0))
    embed(store)
    a, b = store.session("a"), store.session("b")
    store.bm25(a, "Xylophon", 8, set())
    assert store.forget("a").spans == 2
    assert store.session("a") is None
    assert (store.spans(a), store.bm25(a, "Xylophon", 8, set()), store.count_vectors(a.id, MODEL)) == ([], {}, 0)
    with pytest.raises(SessionNotFoundError):
        store.forget("a")
    assert [span.id for span in store.spans(b)] == [3]
    assert store.count_vectors(b.id, MODEL) == 1
    store.write("a", spans(0))
    assert store.session("a").id > b.id  # an id is given once
    assert [span.id for span in store.spans(store.session("a"))] == [4]


def residents(store, max_bytes=2**20):
    return Residents(store, "numpy", MODEL, lambda: DIM, max_bytes)


def test_an_index_follows_the_store_and_comes_back_from_its_file(store):
    store.write("a", spans(0, 10))
    embed(store)
    index, a = residents(store), store.session("a").id
    assert index.resume(a) == 2
    store.write("a", spans(20))
    embed(store)
    assert index.resume(a) == index.resume(a) == 3  # each vector once
    query = np.eye(DIM, dtype=np.float32)[3]
    assert next(iter(index.current(a).search(query, 8, set()).items())) == (3, 1.0)
    assert index.hibernate(a) == 3
    assert not index.is_resident(a)
    assert (residents(store).resume(a), len(list(store.directory.glob("index/*.index")))) == (3, 1)
    index.resume(a)
    index.forget(a)
    assert not index.is_resident(a)
    assert not list(store.directory.glob("index/*"))


def test_an_index_file_from_before_a_vector_was_made_again_is_not_believed(store):
    store.write("a", spans(0, 10))
    first, second = store.pending(MODEL, 0, 2)
    embed(store)
    index, a = residents(store), store.session("a").id
    index.resume(a)
    index.hibernate(a)
    store.store_vectors(MODEL, [first], np.eye(DIM, dtype=np.float32)[[3]])
    found = residents(store).current(a).search(np.eye(DIM, dtype=np.float32)[3], 8, set())
    assert found == {first.span: 1.0, second.span: 0.0}
    assert residents(store).resume(a) == 2


def test_the_index_that_was_used_longest_ago_leaves_first(store):
    for name in ("a", "b", "c"):
        store.write(name, spans(0))
    embed(store)
    index = residents(store, max_bytes=2 * DIM * 4)
    a, b, c = (store.session(name).id for name in ("a", "b", "c"))
    for session in (a, b, a, c):
        index.resume(session)
    assert [index.is_resident(session) for session in (a, b, c)] == [True, False, True]
