"""Every evicted token is in exactly one span, spans are whole runs, and their text is theirs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_tq.haystack import load_text
from mlx_tq.rescue.wire import MAX_TEXT
from mlx_tq.session.memory import last_question
from mlx_tq.session.plain import PlainText
from mlx_tq.session.spans import MAX_TOKENS, make_spans, runs

positions = st.sets(st.integers(0, 400))


@given(positions)
def test_runs(evicted):
    found = runs(evicted)
    assert [p for start, stop in found for p in range(start, stop)] == sorted(evicted)
    for start, stop in found:
        assert start - 1 not in evicted
        assert stop not in evicted


@given(positions, st.integers(1, 50))
def test_each_token_once(evicted, limit):
    ids = [1000 + p for p in range(401)]
    spans = make_spans([*evicted, *evicted], ids, lambda some: " ".join(map(str, some)), limit)
    assert [p for span in spans for p in range(span.start, span.stop)] == sorted(evicted)
    for span in spans:
        assert span.stop - span.start <= limit
        assert span.text == " ".join(str(1000 + p) for p in range(span.start, span.stop))


def test_long_runs_are_cut_evenly():
    spans = make_spans(range(1000), list(range(1000)), str)
    assert [span.stop - span.start for span in spans] == [250, 250, 250, 250]
    assert MAX_TOKENS == 256


def test_what_the_service_would_refuse_is_not_sent():
    """Texts over its limit are halved, empty ones left out."""
    spans = make_spans(range(4), [0, 0, 0, 0], lambda some: "x" * (MAX_TEXT // 2 * len(some)))
    assert [(span.start, span.stop) for span in spans] == [(0, 2), (2, 4)]
    assert make_spans([3], [0] * 4, lambda _: " \n") == []


@pytest.mark.parametrize("granularity", [64, 16, 1])
def test_stored_text_is_below_1_3_times_the_evicted_tokens(embedded, granularity):
    """Counted in tokens of the same model, over blocks that alternate: the worst case, nothing is adjacent."""
    plain = PlainText(embedded[1])
    ids = plain.encode(load_text()[:8000])
    evicted = [p for p in range(len(ids)) if p // granularity % 2]
    spans = make_spans(evicted, ids, plain.decode)
    assert sum(len(plain.encode(span.text)) for span in spans) < 1.3 * len(evicted)


def test_what_is_asked():
    assert last_question(" What is the code? ") == "What is the code?"
    report = "The report says this and that. " * 30
    assert last_question(f"{report}Why? And what is the code? {report}") == "And what is the code?"
    assert last_question(report) == report.strip()[-400:]
