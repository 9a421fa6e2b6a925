from dataclasses import replace
from itertools import product
from math import sqrt

import pytest

from mlx_tq.errors import ConfigError
from mlx_tq.evaluate.arms import OFF, parse_arm
from mlx_tq.evaluate.paired import Answered, Judged, Sample, compare, measure_paired, with_shared
from mlx_tq.evaluate.significance import mcnemar, wilson


@pytest.mark.parametrize(("hits", "asked"), [(0, 8), (1, 20), (8, 10), (300, 1319), (8, 8)])
def test_an_interval_ends_where_the_share_is_95_percent_unlikely(hits, asked):
    """Its ends are the shares from which the one that was counted is 1.96 of their own standard deviations away."""
    for end in wilson(hits, asked):
        assert abs(hits / asked - end) == pytest.approx(1.959964 * sqrt(end * (1 - end) / asked), abs=1e-9)


@pytest.mark.parametrize(("lost", "gained"), [(0, 0), (1, 0), (0, 5), (3, 4), (2, 9)])
def test_chance_is_counted_over_all_ways_that_samples_may_change(lost, gained):
    changed = lost + gained
    as_uneven = [abs(changed - 2 * sum(ways)) >= abs(lost - gained) for ways in product((0, 1), repeat=changed)]
    assert mcnemar(lost, gained) == sum(as_uneven) / len(as_uneven)


def test_answers_are_counted_beside_those_of_the_fp16_cache():
    right = {"off": "YYYN", "small": "YNNY"}
    answers = [
        Answered(name, str(place), "all", "", "", float(mark == "Y") or 0.5, "", 1, 0)
        for name, marks in right.items()
        for place, mark in enumerate(marks)
    ]
    off, small = compare(answers)
    assert (off.name, off.right, off.asked, off.lost, off.gained, off.p) == ("off", 3, 4, 0, 0, 1.0)
    assert (small.right, small.lost, small.gained, small.score) == (2, 2, 1, 0.75)
    assert (small.low, small.high) == wilson(2, 4)


def judged(text: str) -> Judged:
    return Judged(text[:3], float(len(text)))


def test_what_samples_share_is_read_once_and_changes_no_answer(exact):
    """Greedy in float32; and an earlier answer is not asked for again."""
    model, tokenizer = exact
    ids = tokenizer.encode("The sky is blue and the grass is green. " * 16, add_special_tokens=False)
    asked = [
        Sample(name, "all", [*ids, *tokenizer.encode(name, add_special_tokens=False)], 0, "", judged)
        for name in ("The sky is", "The grass is")
    ]
    shared = with_shared(asked)
    assert all(len(ids) <= sample.shared < len(sample.ids) - 1 for sample in shared)
    arms = [OFF, parse_arm("tq2/tq2", sinks=16, window=32)]
    told = {}
    options = {"max_tokens": 6, "step": 128, "report": lambda key, answered: told.update({key: answered})}
    once, alone = (measure_paired(model, tokenizer, samples, arms, **options) for samples in (shared, asked))
    assert [answered.text for answered in once] == [answered.text for answered in alone]
    assert [answered.name for answered in once] == ["off", "off", "tq2/tq2", "tq2/tq2"]
    assert once[0].packed == 0 < once[2].packed
    first = vars(replace(once[0], text="kept"))
    known = {"off The sky is": first}.get
    again = measure_paired(model, tokenizer, shared, [OFF], max_tokens=6, known=known)
    assert [again[0].text, again[1].text] == ["kept", once[1].text]
    with pytest.raises(ConfigError, match="packed none of the prompts' tokens"):
        measure_paired(model, tokenizer, asked, [parse_arm("tq2/tq2", sinks=999)], max_tokens=1)
    with pytest.raises(ConfigError, match="positions"):
        measure_paired(model, tokenizer, asked, [OFF], max_tokens=10**6)


def test_an_answer_ends_where_its_sample_says(exact):
    model, tokenizer = exact
    ids = tokenizer.encode("one two three four one two three four one two", add_special_tokens=False)
    sample = Sample("a", "all", ids, 0, "", judged)
    (whole,) = measure_paired(model, tokenizer, [sample], [OFF], max_tokens=12)
    stop = whole.text[len(whole.text) // 2 :][:2]
    (cut,) = measure_paired(model, tokenizer, [replace(sample, stop=stop)], [OFF], max_tokens=12)
    assert cut.text == whole.text.partition(stop)[0]
    assert cut.tokens < whole.tokens
