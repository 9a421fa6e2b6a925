"""Tasks over long texts like those of RULER (Hsieh et al. 2024), made here from the text that is read anyway.

Several facts to name at once; a chain of variables to follow; the words that a long list has most often; and the most
frequent of words that mean nothing. Each is as long as asked, and scored by the share of the expected words named.
"""

import random
import re
from collections.abc import Callable, Sequence
from typing import Any

from mlx_tq.cli.needles.haystack import Fact, build_scene
from mlx_tq.errors import ConfigError
from mlx_tq.evaluate.paired import Judged, Sample

_NAMES = ("Alice", "Bob", "Carol", "David", "Emma", "Frank", "Grace", "Henry")
_FACTS, _HOPS = 4, 4
_COMMON, _OFTEN, _SELDOM = 5, 10, 2  # words to find, and how often they and the others stand in the list
_FREQUENT, _DECAY = 3, 2.0  # words to find; the n-th word is as frequent as n to the minus second
_SYLLABLES = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]


def ruler_samples(tokenizer: Any, text: str, tasks: Sequence[str], lengths: Sequence[int], count: int) -> list[Sample]:
    """`count` samples of every task at every length, in tokens.

    Raises:
        ConfigError: an unknown task, or a length that has no room for it.
    """
    unknown = [task for task in tasks if task not in TASKS]
    if unknown:
        raise ConfigError(f"task {unknown[0]!r} is unknown; valid are {', '.join(TASKS)}.")
    samples = []
    for length in lengths:
        for task in tasks:
            for seed in range(count):
                ids, expected = TASKS[task](tokenizer, text, length, random.Random(f"{task} {length} {seed}"))
                key, group = f"{task} {length} {seed}", f"{task} {length:,}"
                samples.append(Sample(key, group, ids, 0, " ".join(expected), _judge(expected)))
    return samples


def share_named(answer: str, expected: Sequence[str]) -> float:
    """Of the expected words, the share that an answer names, whatever their case."""
    said = set(re.findall(r"\w+", answer.lower()))
    return sum(word.lower() in said for word in expected) / len(expected)


def _judge(expected: Sequence[str]) -> Callable[[str], Judged]:
    def judge(answer: str) -> Judged:
        named = [word for word in expected if share_named(answer, [word])]
        return Judged(" ".join(named), len(named) / len(expected))

    return judge


Made = tuple[list[int], list[str]]


def _needles(tokenizer: Any, text: str, length: int, rng: random.Random) -> Made:
    """Facts all over the text, all of them asked for at once."""
    names = rng.sample(_NAMES, _FACTS)
    codes = [str(rng.randrange(10_000, 100_000)) for _ in names]
    question = f"What are the access codes of {', '.join(names[:-1])} and {names[-1]}? Name all of them."
    facts = [
        Fact(f"The access code of {name} is {code}.", question, code) for name, code in zip(names, codes, strict=True)
    ]
    return _planted(tokenizer, text, length, rng, facts), codes


def _variables(tokenizer: Any, text: str, length: int, rng: random.Random) -> Made:
    """One variable gets a number, each of the next gets the one before it: which of them have that number."""
    names = rng.sample([a + b + c for a in "ABCDE" for b in "KLMNP" for c in "RSTVX"], 1 + _HOPS)
    number = str(rng.randrange(10_000, 100_000))
    question = f"Which variables have the value {number}, at first or second hand? Name all of them."
    values = [number, *names]
    facts = [Fact(f"Set {name} = {value}.", question, name) for name, value in zip(names, values, strict=False)]
    return _planted(tokenizer, text, length, rng, facts), names


def _planted(tokenizer: Any, text: str, length: int, rng: random.Random, facts: list[Fact]) -> list[int]:
    depths = [(place + 0.5) / len(facts) for place in range(len(facts))]
    scene = build_scene(tokenizer, text, facts, depths, rng, tokens=length, sinks=0, window=0)
    return [*scene.ids, *scene.questions[0]]


def _common(tokenizer: Any, text: str, length: int, rng: random.Random) -> Made:
    """A list of words of which a few stand in it five times as often as the others."""
    known = sorted(set(re.findall(r"\b[a-z]{4,8}\b", text)))
    rng.shuffle(known)
    common, others = known[:_COMMON], known[_COMMON:]

    def words(count: int) -> list[str]:
        return common * _OFTEN + others[:count] * _SELDOM

    question = f"Which {_COMMON} words are most common in the list above? Name all of them."
    return _listed(tokenizer, words, len(others), length, question, rng), common


def _frequent(tokenizer: Any, text: str, length: int, rng: random.Random) -> Made:
    """Words that mean nothing, each less frequent than the one before it."""
    made = ["".join(rng.sample(_SYLLABLES, 3)) for _ in range(200)]
    weights = [(place + 1) ** -_DECAY for place in range(len(made))]

    def words(count: int) -> list[str]:
        return [word for word, weight in zip(made, weights, strict=True) for _ in range(round(weight * count))]

    question = f"Which {_FREQUENT} words are most frequent in the text above? Name all of them."
    return _listed(tokenizer, words, length, length, question, rng), made[:_FREQUENT]


def _listed(
    tokenizer: Any, words: Callable[[int], list[str]], most: int, length: int, question: str, rng: random.Random
) -> list[int]:
    """As many shuffled words as `length` tokens hold, and a question behind them."""

    def prompt(count: int) -> list[int]:
        listed = words(count)
        random.Random(order).shuffle(listed)
        return _asked(tokenizer, " ".join(listed), question)

    order = rng.random()
    low, high = 0, most
    while low < high:  # the largest count whose prompt is no longer than asked
        middle = (low + high + 1) // 2
        low, high = (middle, high) if len(prompt(middle)) <= length else (low, middle - 1)
    if len(prompt(low)) > length:
        raise ConfigError(
            f"{length} tokens are too few for this task; it needs {len(prompt(low))}. Take longer --lengths."
        )
    return prompt(low)


def _asked(tokenizer: Any, text: str, question: str) -> list[int]:
    if not tokenizer.has_chat_template:
        return list(tokenizer.encode(f"{text}\n\n{question}"))
    turn = [{"role": "user", "content": f"{text}\n\n{question}"}]
    rendered = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    return list(tokenizer.encode(rendered, add_special_tokens=False))


TASKS: dict[str, Callable[[Any, str, int, random.Random], Made]] = {
    "needles": _needles,
    "variables": _variables,
    "common": _common,
    "frequent": _frequent,
}
