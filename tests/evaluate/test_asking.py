from dataclasses import replace
from itertools import product
from math import sqrt

import pytest

from mlx_tq.cli.inputs import load_text
from mlx_tq.config import EvictConfig, KVConfig
from mlx_tq.errors import ConfigError
from mlx_tq.evaluate.arms import OFF, Arm, parse_arm
from mlx_tq.evaluate.asking import Sample, ask_samples, compare_answers, mcnemar, prefill_caches, share_prefixes, wilson
from mlx_tq.evaluate.inspection import count_needle_tokens
from mlx_tq.evaluate.needles import needle_samples
from mlx_tq.evaluate.results import Results

REGIONS = {"sinks": 32, "window": 64}
RECENCY = KVConfig(sinks=0, window=32, evict=EvictConfig("recency:trigger=16:granularity=1", budget="50%"))


def ask(models, samples, arms=(OFF,), results=None, **options):
    results = results or Results(None, "test", {})
    return ask_samples(*models, samples, arms, results, **{"max_tokens": 8, **options})


def ask_needles(models, arms, lengths, depths=(0, 0.5, 1), seeds=(0,), **options):
    samples = needle_samples(models[1], load_text(), arms, lengths, depths, seeds)
    return ask(models, samples, arms, **{"max_tokens": 32, **options})


def judge(text):
    return text[:3], float(len(text))


def sample_of(name, ids, **fields):
    return Sample(name, ids, "", judge, {"key": name, "group": "all"}, **fields)


@pytest.mark.full
def test_the_embedded_model_finds_a_packed_needle(exact):
    records = ask_needles(exact, [parse_arm("balanced", **REGIONS)], [500], [0.5])
    assert [(record["name"], record["verdict"]) for record in records] == [("off", "PASS"), ("balanced", "PASS")]
    for record in records:
        start, stop = record["needle"]
        assert record["live"] == stop - start
        assert record["packed"] == (0 if record["name"] == "off" else stop - start)
        assert record["expected"] in record["answer"]
        assert "What is" not in record["answer"]


@pytest.mark.full
def test_the_embedded_model_finds_needles_everywhere(exact):
    arms = [parse_arm(name, **REGIONS) for name in ("balanced", "small")]
    records = ask_needles(exact, arms, [500, 1000, 2000], seeds=range(2))
    assert len(records) == 3 * 3 * 2 * 3
    assert sum(record["verdict"] == "VOID" for record in records) <= 4
    missed = [record["name"] for record in records if record["verdict"] not in ("PASS", "VOID")]
    assert "balanced" not in missed
    assert missed.count("small") <= 1  # at 2,000 tokens the model itself gives one digit a probability of 0.64


@pytest.mark.parametrize("ask_void", [False, True])
def test_a_needle_that_the_fp16_cache_misses_is_void(tiny, embedded, ask_void):
    arms = [parse_arm("balanced", **REGIONS)]
    records = ask_needles((tiny, embedded[1]), arms, [300], [0, 1], max_tokens=2, ask_void=ask_void)
    verdicts = [(record["name"], record["depth"], record["verdict"]) for record in records]
    assert verdicts == [("off", 0, "FAIL"), ("off", 1, "FAIL"), ("balanced", 0, "VOID"), ("balanced", 1, "VOID")]
    assert all((record["live"] > 0) is ask_void for record in records[2:])
    assert all(record["answer"] == "" for record in records[2:])


def test_arms_must_have_the_same_regions_and_prompts_fit_into_the_model(tiny, embedded):
    arms = [parse_arm("balanced"), parse_arm("small", window=64)]
    with pytest.raises(ConfigError, match="different sinks and windows"):
        needle_samples(embedded[1], load_text(), arms, [500])
    with pytest.raises(ConfigError, match="exceed the model's 4,096 positions"):
        ask_needles((tiny, embedded[1]), arms[:1], [4090])


def test_needle_tokens_are_counted_after_the_round_of_the_question(tiny, embedded):
    """A text in one prefill step evicts nothing until the next forward pass begins, which is that of the question."""
    sample = Sample("a", [5] * 400 + [7, 8, 9], "", judge, shared=400, question=400, needle=(190, 210))
    _, record = ask((tiny, embedded[1]), [sample], [Arm("recency", RECENCY)], step=400, ask_void=True)
    assert (record["live"], record["packed"], record["rounds"]) == (10, 10, 1)


def test_live_tokens_need_not_be_packed(tiny):
    caches = Arm("safe", replace(RECENCY, evict=None)).caches(tiny)()
    prefill_caches(tiny, caches, [5] * 400, step=64)
    packed = caches[0].packed_tokens
    assert 300 < packed < 400
    assert count_needle_tokens(caches, (packed - 8, packed + 24)) == (32, 8)
    assert count_needle_tokens(caches, (0, 400)) == (400, packed)


@pytest.mark.full
def test_a_shared_prefix_changes_no_answer_and_results_are_resumed(exact):
    tokenizer = exact[1]
    ids = tokenizer.encode("The sky is blue and the grass is green. " * 16, add_special_tokens=False)
    names = ("The sky is", "The grass is")
    samples = [sample_of(name, [*ids, *tokenizer.encode(name, add_special_tokens=False)]) for name in names]
    shared = share_prefixes(samples)
    assert all(len(ids) <= sample.shared < len(sample.ids) - 1 for sample in shared)
    arms = [OFF, parse_arm("tq2/tq2", sinks=16, window=32)]
    once, alone = (ask(exact, these, arms, max_tokens=6, step=128) for these in (shared, samples))
    assert [record["text"] for record in once] == [record["text"] for record in alone]
    assert [record["name"] for record in once] == ["off", "off", "tq2/tq2", "tq2/tq2"]
    assert once[0]["packed"] == 0 < once[2]["packed"]
    results = Results(None, "test", {})
    results.add("off The sky is", {**once[0], "text": "saved"})
    resumed = ask(exact, shared, results=results, max_tokens=6)
    assert [record["text"] for record in resumed] == ["saved", once[1]["text"]]
    with pytest.raises(ConfigError, match="packed none of the prompts' tokens"):
        ask(exact, samples, [parse_arm("tq2/tq2", sinks=999)], max_tokens=1)


def test_an_answer_ends_at_the_stop_text_of_its_sample(exact):
    ids = exact[1].encode("one two three four one two three four one two", add_special_tokens=False)
    (whole,) = ask(exact, [sample_of("a", ids)], max_tokens=12)
    stop = whole["text"][len(whole["text"]) // 2 :][:2]
    (cut,) = ask(exact, [sample_of("a", ids, stop=stop)], max_tokens=12)
    assert cut["text"] == whole["text"].partition(stop)[0]
    assert cut["tokens"] < whole["tokens"]


@pytest.mark.parametrize(("hits", "total"), [(0, 8), (1, 20), (8, 10), (300, 1319), (8, 8)])
def test_the_ends_of_an_interval_are_1_96_of_their_own_standard_deviations_away(hits, total):
    for end in wilson(hits, total):
        assert abs(hits / total - end) == pytest.approx(1.959964 * sqrt(end * (1 - end) / total), abs=1e-9)


@pytest.mark.parametrize(("lost", "gained"), [(0, 0), (1, 0), (0, 5), (3, 4), (2, 9)])
def test_the_p_value_counts_all_ways_in_which_samples_may_change(lost, gained):
    changed = lost + gained
    as_uneven = [abs(changed - 2 * sum(ways)) >= abs(lost - gained) for ways in product((0, 1), repeat=changed)]
    assert mcnemar(lost, gained) == sum(as_uneven) / len(as_uneven)


def test_answers_are_compared_with_those_of_the_fp16_cache():
    right = {"off": "YYYN", "small": "YNNY"}
    records = [
        {"name": name, "key": str(place), "group": "all", "score": float(mark == "Y") or 0.5}
        for name, marks in right.items()
        for place, mark in enumerate(marks)
    ]
    off, small = compare_answers(records)
    assert off.items() >= {"name": "off", "right": 3, "samples": 4, "lost": None, "gained": None, "p": None}.items()
    assert small.items() >= {"right": 2, "lost": 2, "gained": 1, "score": 0.75}.items()
    assert (small["low"], small["high"]) == wilson(2, 4)
