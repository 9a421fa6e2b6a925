"""Fusion of scores, and joining of adjacent spans."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rescue_svc.service.rank import fuse, merge_ranges, to_chunks
from rescue_svc.store import Span

THOUSANDTHS = st.integers(-1000, 1000).map(lambda n: n / 1000)
SCORES = st.dictionaries(st.integers(0, 20), THOUSANDTHS, max_size=10)
WORDS = st.dictionaries(st.integers(0, 20), st.integers(1, 50_000).map(lambda n: n / 1000), max_size=10)


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=8))
def test_merged_ranges_cover_the_same_positions(ranges):
    merged = merge_ranges(ranges)
    assert {p for a, b in merged for p in range(a, b)} == {p for a, b in ranges for p in range(a, b)}
    assert all(first[1] < second[0] for first, second in pairwise(merged))


@given(SCORES, WORDS, st.floats(0, 1))
def test_every_candidate_is_ranked_once_by_cosine_and_words(dense, bm25, alpha):
    ranked = [s.id for s in fuse(dense, bm25, alpha)]
    assert len(ranked) == len(set(ranked))
    assert set(ranked) == set(bm25) | {span for span, cosine in dense.items() if cosine > 0}
    cosines = [s.dense for s in fuse(dense, bm25, 1.0) if s.dense is not None]
    assert cosines == sorted(cosines, reverse=True)
    words = [bm25.get(s.id, 0) for s in fuse(dense, bm25, 0.0)]
    assert words == sorted(words, reverse=True)


def test_a_span_without_a_vector_is_not_hidden():
    ranked = fuse({1: 0.9, 2: 0.1}, {3: 8.0, 2: 1.0}, 0.7)
    assert [s.id for s in ranked] == [3, 1, 2]
    assert ranked[0].similarity == 1.0


@pytest.mark.parametrize(
    ("spans", "joined"),
    [
        ([(20, 30, 0, "c"), (50, 60, 0, "x"), (0, 10, 0, "a"), (10, 20, 0, "b")], [("abc", 0, 30), ("x", 50, 60)]),
        ([(0, 10, 0, "a"), (10, 20, 1, "b")], [("a", 0, 10), ("b", 10, 20)]),
        ([(0, 10, 0, "a"), (9, 20, 0, "b"), (21, 30, 0, "c")], [("a", 0, 10), ("b", 9, 20), ("c", 21, 30)]),
    ],
    ids=["in order, with the best rank", "other layers", "overlap and gap"],
)
def test_adjacent_spans_join_and_have_the_best_scores_of_their_parts(spans, joined):
    spans = [Span(start, stop, layer, -id, text, id) for id, (start, stop, layer, text) in enumerate(spans)]
    ranked = fuse({span.id: 1 - span.id / 99 for span in spans}, {len(spans) - 1: 4.0}, 1)
    results = to_chunks(spans, ranked, join=True)
    assert [(result.text, *result.token_range) for result in results] == joined
    for result in results:
        ids = [span.id for span in spans if span.text in result.text]
        assert (result.score, result.dense, result.similarity) == (-min(ids), 1 - min(ids) / 99, 1 - min(ids) / 99)
        assert result.bm25 == (1.0 if len(spans) - 1 in ids else None)
