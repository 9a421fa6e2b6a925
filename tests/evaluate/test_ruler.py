import re
from collections import Counter

import pytest

from mlx_tq.cli.inputs import load_text
from mlx_tq.errors import ConfigError
from mlx_tq.evaluate.ruler import TASKS, judge_words, ruler_samples

LENGTH = 600


@pytest.fixture(scope="module")
def made(embedded):
    _, tokenizer = embedded
    samples = ruler_samples(tokenizer, load_text(), list(TASKS), [LENGTH], 2)
    assert all(LENGTH * 0.9 < len(sample.ids) <= LENGTH for sample in samples)
    assert len({tuple(sample.ids) for sample in samples}) == len(samples) == 8
    return {sample.key: (tokenizer.decode(sample.ids), sample.expected.split(), sample.judge) for sample in samples}


def of(made, task):
    return [value for key, value in made.items() if key.startswith(task)]


def test_the_text_contains_all_facts(made):
    for text, codes, judge in of(made, "needles"):
        assert re.findall(r"The access code of \w+ is (\d+)\.", text) == codes
        assert judge(f"{codes[0]}, {codes[2]}")[1] == 0.5


def test_variables_are_a_chain_from_the_number(made):
    for text, names, judge in of(made, "variables"):
        values = dict(re.findall(r"Set (\w+) = (\w+)\.", text))
        number = re.search(r"have the value (\d+)", text)[1]
        followed = []
        for name in values:
            value = name
            while value in values:
                value = values[value]
            followed += [name] if value == number else []
        assert followed == names
        assert judge(" ".join(reversed(names)))[1] == 1


@pytest.mark.parametrize("task", ["common", "frequent"])
def test_the_expected_words_are_the_most_frequent_ones(made, task):
    for text, words, _ in of(made, task):
        counts = Counter(re.findall(r"[a-z]+", text.partition("Which")[0])).most_common()
        assert {word for word, _ in counts[: len(words)]} == set(words)
        assert counts[len(words) - 1][1] > counts[len(words)][1]


def test_only_whole_words_count():
    assert judge_words(["red", "blue", "green", "pink"], "Red, BLUE and greenish.") == ("red blue", 0.5)


def test_unknown_tasks_and_short_lengths_are_refused(embedded):
    with pytest.raises(ConfigError, match="valid are needles, variables, common, frequent"):
        ruler_samples(embedded[1], load_text(), ["qa"], [LENGTH], 1)
    with pytest.raises(ConfigError, match="too few for this task"):
        ruler_samples(embedded[1], load_text(), ["common"], [60], 1)
    with pytest.raises(ConfigError, match=r"words for \d+ tokens of this task, not for 1000"):
        ruler_samples(embedded[1], load_text()[:1500], ["common"], [1000], 1)
    with pytest.raises(ConfigError, match="only 0 words of 4 to 8 letters"):
        ruler_samples(embedded[1], "Это русский текст.", ["common"], [1000], 1)
