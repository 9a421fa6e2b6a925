"""Evicted tokens become spans of sentences, and hits are quoted within a limit."""

import time
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_tq import RescueConfig
from mlx_tq.cli.inputs import load_text
from mlx_tq.rescue.wire import MAX_TEXT, RetrievedSpan
from mlx_tq.session.text import PlainText
from mlx_tq.session.transcript import (
    LONGEST_SPAN,
    SHORTEST_SPAN,
    SearchHits,
    Transcript,
    TurnRange,
    extend_to_sentences,
    last_question,
    make_spans,
    to_ranges,
)

positions = st.sets(st.integers(0, 400))


@given(positions)
def test_ranges_are_maximal(evicted):
    ranges = to_ranges(evicted)
    assert [p for start, stop in ranges for p in range(start, stop)] == sorted(evicted)
    for start, stop in ranges:
        assert start - 1 not in evicted
        assert stop not in evicted


@given(positions, st.text("ab .?\n。", min_size=401, max_size=401))
def test_each_evicted_token_is_in_one_span(evicted, letters):
    """A token is a letter."""
    spans = make_spans([*evicted, *evicted], letters, "".join)
    sent = {p for span in spans for p in range(span.start, span.stop)}
    assert sum(span.stop - span.start for span in spans) == len(sent)
    assert sent <= evicted
    assert not "".join(letters[p] for p in evicted - sent).strip()  # only blanks are left out
    for span in spans:
        assert span.stop - span.start < LONGEST_SPAN + SHORTEST_SPAN
        assert span.text == letters[span.start : span.stop]


SENTENCES = 'It costs 3.14 at most. "Why?" he said. A line without an end\nthat goes on here. No. Yes! And so on'


def test_spans_are_sentences():
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
    cuts = [(span.start, span.stop) for span in make_spans(range(150), "word " * 30, "".join)]
    assert cuts == list(pairwise([0, LONGEST_SPAN, 2 * LONGEST_SPAN, 150])), "long sentences are cut"


@pytest.mark.parametrize(
    ("part", "margin", "whole"),
    [
        ("he said", 40, " he said."),
        ("he said.", 40, " he said."),
        ("costs", 40, "It costs 3.14 at most."),
        ("so", 40, " And so on"),
        ("without", 5, "line without an e"),
        ("most. ", 40, 'It costs 3.14 at most. "Why?"'),
    ],
)
def test_a_hit_is_extended_to_the_ends_of_its_sentences(part, margin, whole):
    start = SENTENCES.index(part)
    first, last = extend_to_sentences((start, start + len(part)), SENTENCES, "".join, margin)
    assert SENTENCES[first:last] == whole


def test_spans_of_real_tokens_end_with_sentences(embedded):
    plain = PlainText(embedded[1])
    ids = plain.encode(load_text()[:6000])
    spans = make_spans(range(len(ids)), ids, plain.decode)
    assert "".join(span.text for span in spans) == plain.decode(ids)
    ended = [span for span in spans if span.text.rstrip(" ").endswith((".", "?", "!", "\n", '"'))]
    assert len(ended) > 0.8 * len(spans)


def test_texts_over_the_limit_of_the_service_are_halved_and_blank_ones_left_out():
    spans = make_spans(range(4), [0, 0, 0, 0], lambda some: "x" * (MAX_TEXT // 2 * len(some)))
    assert [(span.start, span.stop) for span in spans] == [(0, 2), (2, 4)]
    assert make_spans([3], [0] * 4, lambda _: " \n") == []


@pytest.mark.parametrize("granularity", [64, 16, 1])
def test_stored_text_is_below_1_3_times_the_evicted_tokens(embedded, granularity):
    """Every other block is evicted, which is the worst case."""
    plain = PlainText(embedded[1])
    ids = plain.encode(load_text()[:8000])
    evicted = [p for p in range(len(ids)) if p // granularity % 2]
    spans = make_spans(evicted, ids, plain.decode)
    assert sum(len(plain.encode(span.text)) for span in spans) < 1.3 * len(evicted)


def test_of_a_long_message_the_last_question_is_searched_for():
    assert last_question(" What is the code? ") == "What is the code?"
    report = "The report says this and that. " * 30
    assert last_question(f"{report}Why? And what is the code? {report}") == "And what is the code?"
    assert last_question(report) == report.strip()[-400:]
    assert last_question(f"{report}What? Really??") == "?"
    began = time.monotonic()
    assert last_question("a" * 300_000) == "a" * 400
    assert time.monotonic() - began < 2  # minutes if each letter may begin a question


def test_hits_that_are_live_are_not_quoted_and_others_within_the_limit(embedded):
    tokenizer = embedded[1]
    transcript = Transcript(PlainText(tokenizer), None, RescueConfig(), "session", 200)
    transcript.append(tokenizer.encode("The garden of every house has seven trees and a gate. " * 8))
    live = np.array([*range(10, 30), *range(41, 50)])
    ranges = [(12, 20), (40, 50), (60, 70)]
    assert transcript.quote(SearchHits(tuple(ranges), 200), live).ranges == ranges[1:]
    last = SearchHits(((60, 70),), 200)
    room = 200 - len(transcript.quote(last, live).ids)
    assert transcript.quote(last, live, used=room).ranges == ranges[2:]
    assert transcript.quote(last, live, used=room + 1).ranges == []


@pytest.mark.parametrize("end", ["forgotten", "not confirmed", "kept"])
def test_evicted_text_is_sent_once_and_anew_after_a_truncation(end):
    """A trim makes room for other tokens at the same positions. The service may delete without confirming that."""
    sent = []
    plain = SimpleNamespace(decode=lambda ids: "".join(map(chr, ids)))
    client = SimpleNamespace(
        write=lambda _, spans, temporary: sent.append([(span.start, span.text) for span in spans]),
        forget=lambda *_: sent.append(end) or end == "forgotten",
    )
    transcript = Transcript(plain, client, RescueConfig(), "a", 100, temporary=end != "kept")
    transcript.append([ord("a") + i for i in range(8)])
    for evicted in ([1, 2], [1, 2], [1, 2, 5]):
        transcript.send_evicted(np.array(evicted))
    transcript.truncate(4)
    transcript.append(list(map(ord, "xyz")))
    transcript.send_evicted(np.array([1, 2, 5]))
    after = {
        "forgotten": ["forgotten", [(1, "bc")]],
        "not confirmed": ["not confirmed", [(1, "bc")]],
        "kept": [[(1, "bc")]],
    }
    assert sent == [[(1, "bc")], [(5, "f")], *after[end], [(5, "y")]]


def test_in_a_kept_session_the_rest_of_a_cut_span_is_sent_anew():
    """Its span at the service has text that is gone, so a search does not find it."""
    sent = []
    plain = SimpleNamespace(decode="".join)
    client = SimpleNamespace(write=lambda _, spans, temporary: sent.append([(s.start, s.stop) for s in spans]))
    transcript = Transcript(plain, client, RescueConfig(), "a", 100, temporary=False)
    transcript.append("word " * 60)
    transcript.send_evicted(np.arange(200))
    transcript.truncate(150)
    assert sent[0] == [(0, 64), (64, 128), (128, 200)]
    assert sent[1][0][0] <= 128
    assert sent[1][-1][1] == 150
    assert len(sent[1]) <= 2, "not the whole conversation"


def test_text_that_the_service_did_not_delete_is_not_found():
    """Other tokens have taken its positions."""
    found = [RetrievedSpan(0, 3, "abc", 0.9), RetrievedSpan(3, 6, "xyz", 0.9), RetrievedSpan(4, 9, "ef", 0.9)]
    client = SimpleNamespace(retrieve=lambda *_, **__: found, write=lambda *_, **__: None)
    plain = SimpleNamespace(decode=lambda ids: "".join(map(chr, ids)))
    transcript = Transcript(plain, client, RescueConfig(), "a", 100)
    transcript.append(list(map(ord, "abcdef")))
    transcript.send_evicted(np.arange(6))
    hits = transcript.search("a?", np.zeros(0, np.int64))
    assert hits.ranges == ((0, 6),), "extended to the ends of its sentence"


def test_positions_at_the_service_stay_when_turns_are_removed():
    """A token is a letter: upper case opens the conversation, and each turn is of a word."""
    stored = {}
    plain = SimpleNamespace(decode=lambda ids: "".join(map(chr, ids)))

    def write(_, spans, temporary):
        stored.update((span.start + i, letter) for span in spans for i, letter in enumerate(span.text))

    transcript = Transcript(plain, SimpleNamespace(write=write), RescueConfig(), "a", 100)
    transcript.opening = list(map(ord, "OPEN"))
    text = "OPENone.two.three.four."
    transcript.append(list(map(ord, text)))
    ends = [4, 8, 12, 18, 23]
    transcript.turn_ranges = [TurnRange(0 if i == 0 else a, a, b) for i, (a, b) in enumerate(pairwise(ends))]
    transcript.quoted = [(4, 6), (9, 10)]
    assert transcript.lengths_after_removal() == [23, 19, 15, 9, 0]
    transcript.send_evicted(np.array([1, 2, 13, 14]))
    for count, ids, removed in (
        (1, "OPENtwo.three.four.", "one."),
        (2, "OPENfour.", "one.two.three."),
        (1, "", text[4:]),
    ):
        transcript.remove(count)
        assert (plain.decode(transcript.ids), plain.decode(transcript.removed)) == (ids, removed)
        assert transcript.quoted == [(4 - 4 - len(removed), 6 - 4 - len(removed)), transcript.quoted[1]]
    assert transcript.turn_ranges == []
    quoted = {4, 5, 9}
    assert stored == {i: letter for i, letter in enumerate(text) if i not in quoted and i not in (0, 3)}
