"""Every evicted token is in exactly one span, spans are whole runs, and their text is theirs."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_tq.cli.haystack import load_text
from mlx_tq.rescue.wire import MAX_TEXT
from mlx_tq.session.plain_text import PlainText
from mlx_tq.session.spans import LONGEST, SHORTEST, make_spans, runs, widen
from mlx_tq.session.transcript import last_question

positions = st.sets(st.integers(0, 400))


@given(positions)
def test_runs(evicted):
    found = runs(evicted)
    assert [p for start, stop in found for p in range(start, stop)] == sorted(evicted)
    for start, stop in found:
        assert start - 1 not in evicted
        assert stop not in evicted


@given(positions, st.text("ab .?\n。", min_size=401, max_size=401))
def test_each_token_once(evicted, letters):
    """Whatever the text; a token is a letter here."""
    spans = make_spans([*evicted, *evicted], letters, "".join)
    said = {p for span in spans for p in range(span.start, span.stop)}
    assert sum(span.stop - span.start for span in spans) == len(said)
    assert said <= evicted
    assert not "".join(letters[p] for p in evicted - said).strip()  # what is left out says nothing
    for span in spans:
        assert span.stop - span.start < LONGEST + SHORTEST
        assert span.text == letters[span.start : span.stop]


SENTENCES = 'It costs 3.14 at most. "Why?" he said. A line without an end\nthat goes on here. No. Yes! And so on'


def test_spans_are_sentences():
    """Short ones stand together; a number does not end one, a line does; what is left over stays with the last."""
    texts = [span.text for span in make_spans(range(len(SENTENCES)), SENTENCES, "".join)]
    assert texts == [
        "It costs 3.14 at most.",
        ' "Why?" he said.',
        " A line without an end\n",
        "that goes on here.",
        " No. Yes! And so on",
    ]
    (alone,) = make_spans(range(34), text := "A sentence that is long enough. So", "".join)
    assert alone.text == text


def test_long_sentences_are_cut():
    spans = make_spans(range(150), "word " * 30, "".join)
    assert [(span.start, span.stop) for span in spans] == [(0, LONGEST), (LONGEST, 2 * LONGEST), (2 * LONGEST, 150)]


@pytest.mark.parametrize(
    ("part", "most", "whole"),
    [
        ("he said", 40, " he said."),
        ("he said.", 40, " he said."),
        ("costs", 40, "It costs 3.14 at most."),
        ("so", 40, " And so on"),
        ("without", 5, "line without an e"),
        ("most. ", 40, 'It costs 3.14 at most. "Why?"'),
    ],
)
def test_what_is_quoted_goes_to_the_ends_of_its_sentences(part, most, whole):
    start = SENTENCES.index(part)
    first, last = widen((start, start + len(part)), SENTENCES, "".join, most)
    assert SENTENCES[first:last] == whole


def test_sentences_of_real_tokens(embedded):
    """Cut between tokens: no text is lost, and nearly every span ends with its sentence."""
    plain = PlainText(embedded[1])
    ids = plain.encode(load_text()[:6000])
    spans = make_spans(range(len(ids)), ids, plain.decode)
    assert "".join(span.text for span in spans) == plain.decode(ids)
    ended = [span for span in spans if span.text.rstrip(" ").endswith((".", "?", "!", "\n", '"'))]
    assert len(ended) > 0.8 * len(spans)


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
    assert last_question(f"{report}What? Really??") == "?"
    began = time.monotonic()
    assert last_question("a" * 300_000) == "a" * 400
    assert time.monotonic() - began < 2  # minutes where each letter may begin a question
