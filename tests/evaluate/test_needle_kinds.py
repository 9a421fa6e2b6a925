import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.utils import load_tokenizer

from benchmarks.studies.needle_kinds import DECOY, KINDS, plant
from mlx_tq.cli.haystack import NEEDLE, QUESTION, Fact, build_scene, load_text
from mlx_tq.errors import ConfigError
from mlx_tq.models import embedded_path

TEXT = load_text()
TOKENIZER = load_tokenizer(embedded_path())
SIZES = {"tokens": 1000, "sinks": 32, "window": 64}


@settings(max_examples=30, deadline=None)
@given(kind=st.sampled_from(sorted(KINDS)), depth=st.floats(0, 1), seed=st.integers(0, 10**6))
def test_every_needle_lies_where_the_scene_says_and_within_the_packed_range(kind, depth, seed):
    planted = plant(kind, TOKENIZER, TEXT, depth, seed, **SIZES)
    scene = planted.scene
    for fact, (start, stop) in zip(planted.facts, scene.needles, strict=True):
        assert TOKENIZER.decode(scene.ids[start:stop]) == " " + fact.sentence
        assert SIZES["sinks"] <= start < stop <= len(scene.ids) - SIZES["window"]
    assert scene.needles == sorted(scene.needles)
    assert len({fact.answer for fact in planted.facts}) == len(planted.facts)
    assert len(scene.ids) + max(map(len, scene.questions)) == SIZES["tokens"]
    for index in planted.asked:
        assert planted.facts[index].question in TOKENIZER.decode(scene.questions[index])


def test_what_each_kind_plants_and_asks():
    single = plant("single", TOKENIZER, TEXT, 0.5, 1, **SIZES)
    (fact,) = single.facts
    assert (fact.sentence, fact.question) == (NEEDLE.format(answer=fact.answer), QUESTION)
    other = plant("paraphrased", TOKENIZER, TEXT, 0.5, 1, **SIZES)
    assert other.facts[0].sentence == fact.sentence
    assert other.facts[0].question != QUESTION
    assert plant("multi", TOKENIZER, TEXT, 0.5, 1, **SIZES).asked == [0, 1, 2, 3]
    asked = [plant("decoys", TOKENIZER, TEXT, depth, 1, **SIZES) for depth in (0, 0.5, 1)]
    assert [planted.asked for planted in asked] == [[0], [1], [3]]
    assert len({planted.facts[planted.asked[0]].answer for planted in asked}) == 1


def test_a_decoy_for_an_answer_is_told_apart():
    planted = plant("decoys", TOKENIZER, TEXT, 0.5, 3, **SIZES)
    (index,) = planted.asked
    answers = [fact.answer for fact in planted.facts]
    right = answers.pop(index)
    assert planted.verdict(index, f"It is {right}.") == "PASS"
    assert [planted.verdict(index, answer) for answer in answers] == [DECOY] * 3
    assert [planted.verdict(index, answer) for answer in ("", right[:-1], right + "1")] == ["FAIL"] * 3


@pytest.mark.parametrize(
    ("depths", "words"), [([0.5, 0.2], "do not ascend"), ([0.2, 1.2], "depth is 1.2"), ([0, 1], "no room for needles")]
)
def test_scenes_that_cannot_be_built(depths, words):
    facts = [Fact("The cat is red. " * 20, "?", "red"), Fact("The cat is blue.", "?", "blue")]
    tokens = 200 if depths == [0, 1] else 1000
    with pytest.raises(ConfigError, match=words):
        build_scene(TOKENIZER, TEXT, facts, depths, random.Random(0), tokens=tokens, sinks=32, window=64)
    with pytest.raises(ConfigError, match="valid are single, multi, paraphrased, decoys"):
        plant("double", TOKENIZER, TEXT, 0.5, 0, **SIZES)
