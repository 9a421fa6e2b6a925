"""Set tasks over long texts like those of RULER (Hsieh et al. 2024), made from a text of your own.

The tasks: name several facts at once; follow a chain of variables; name the most common words of a long list, and the
most frequent of made-up words. Each has the length that you choose. The score is the share of the expected words.
"""

import random
import re
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any

from mlx_tq.cli.haystack import Fact, build_scene
from mlx_tq.errors import ConfigError, unknown_name
from mlx_tq.evaluate.asking import Sample
from mlx_tq.session.text import render_messages

_NAMES = ("Alice", "Bob", "Carol", "David", "Emma", "Frank", "Grace", "Henry")
_FACTS, _HOPS = 4, 4
_COMMON, _OFTEN, _SELDOM = 5, 10, 2  # words to name, and the counts of these and of the other words in the list
_FREQUENT, _DECAY = 3, 2.0  # words to name; the frequency of the n-th word is n to the power of minus two
_SYLLABLES = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]


def ruler_samples(tokenizer: Any, text: str, tasks: Sequence[str], lengths: Sequence[int], count: int) -> list[Sample]:
    for task in tasks:
        if task not in TASKS:
            raise unknown_name("task", task, TASKS)
    samples = []
    for length, task, seed in product(lengths, tasks, range(count)):
        key = f"{task} {length} {seed}"
        ids, expected = TASKS[task](tokenizer, text, length, random.Random(key))
        fields = {"group": f"{task} {length:,}"}
        samples.append(Sample(key, ids, " ".join(expected), partial(judge_words, expected), fields))
    return samples


def judge_words(expected: Sequence[str], answer: str) -> tuple[str, float]:
    """Find the expected words in an answer, whatever their case; the score is their share."""
    words = set(re.findall(r"\w+", answer.lower()))
    named = [word for word in expected if word.lower() in words]
    return " ".join(named), len(named) / len(expected)


Task = tuple[list[int], list[str]]  # the prompt, and the expected words


def _needles(tokenizer: Any, text: str, length: int, rng: random.Random) -> Task:
    names = rng.sample(_NAMES, _FACTS)
    codes = [str(rng.randrange(10_000, 100_000)) for _ in names]
    question = f"What are the access codes of {', '.join(names[:-1])} and {names[-1]}? Name all of them."
    sentences = [f"The access code of {name} is {code}." for name, code in zip(names, codes, strict=True)]
    return _planted(tokenizer, text, length, rng, question, sentences), codes


def _variables(tokenizer: Any, text: str, length: int, rng: random.Random) -> Task:
    """Set a variable to a number, and each further one to the previous; ask which of them have that number."""
    names = rng.sample([a + b + c for a in "ABCDE" for b in "KLMNP" for c in "RSTVX"], 1 + _HOPS)
    number = str(rng.randrange(10_000, 100_000))
    question = f"Which variables have the value {number}, at first or second hand? Name all of them."
    sentences = [f"Set {name} = {value}." for name, value in zip(names, [number, *names], strict=False)]
    return _planted(tokenizer, text, length, rng, question, sentences), names


def _planted(
    tokenizer: Any, text: str, length: int, rng: random.Random, question: str, sentences: list[str]
) -> list[int]:
    facts = [Fact(sentence, question, "") for sentence in sentences]
    depths = [(place + 0.5) / len(facts) for place in range(len(facts))]
    scene = build_scene(tokenizer, text, facts, depths, rng, tokens=length, sinks=0, window=0)
    return [*scene.ids, *scene.questions[0]]


def _common(tokenizer: Any, text: str, length: int, rng: random.Random) -> Task:
    """List words, a few of them five times as often as the others."""
    vocabulary = sorted(set(re.findall(r"\b[a-z]{4,8}\b", text)))
    if len(vocabulary) <= _COMMON:
        raise ConfigError(f"the text has only {len(vocabulary)} words of 4 to 8 letters a-z. Give another --text.")
    rng.shuffle(vocabulary)
    common, others = vocabulary[:_COMMON], vocabulary[_COMMON:]
    question = f"Which {_COMMON} words are most common in the list above? Name all of them."

    def words(count: int) -> list[str]:
        return common * _OFTEN + others[:count] * _SELDOM

    return _listed(tokenizer, words, len(others), length, question, rng), common


def _frequent(tokenizer: Any, text: str, length: int, rng: random.Random) -> Task:
    """List made-up words, each less frequent than the previous one."""
    vocabulary = ["".join(rng.sample(_SYLLABLES, 3)) for _ in range(200)]
    weights = [(place + 1) ** -_DECAY for place in range(len(vocabulary))]

    def words(count: int) -> list[str]:
        return [word for word, weight in zip(vocabulary, weights, strict=True) for _ in range(round(weight * count))]

    question = f"Which {_FREQUENT} words are most frequent in the text above? Name all of them."
    return _listed(tokenizer, words, length, length, question, rng), vocabulary[:_FREQUENT]


def _listed(
    tokenizer: Any, words: Callable[[int], list[str]], limit: int, length: int, question: str, rng: random.Random
) -> list[int]:
    """Return a prompt of as many shuffled words as `length` tokens hold, with the question after them."""
    order = rng.random()

    def prompt(count: int) -> list[int]:
        shuffled = words(count)
        random.Random(order).shuffle(shuffled)
        content = f"{' '.join(shuffled)}\n\n{question}"
        if not tokenizer.has_chat_template:
            return list(tokenizer.encode(content))
        turn = [{"role": "user", "content": content}]
        rendered = render_messages(tokenizer, turn, add_generation_prompt=True)
        return list(tokenizer.encode(rendered, add_special_tokens=False))

    if (least := len(prompt(0))) > length:
        raise ConfigError(f"{length} tokens are too few for this task; it needs {least}. Use longer --lengths.")
    low, high = 0, limit
    while low < high:  # find the largest count whose prompt fits into the length
        middle = (low + high + 1) // 2
        low, high = (middle, high) if len(prompt(middle)) <= length else (low, middle - 1)
    if low == limit:
        raise ConfigError(
            f"the text has words for {len(prompt(low))} tokens of this task, not for {length}. Give a longer --text, "
            "or shorter --lengths."
        )
    return prompt(low)


TASKS: dict[str, Callable[[Any, str, int, random.Random], Task]] = {
    "needles": _needles,
    "variables": _variables,
    "common": _common,
    "frequent": _frequent,
}
