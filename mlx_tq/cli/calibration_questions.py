"""Everyday facts and questions for them, on which a model's queries search the text: the input of calibration.

They share no wording with the needles of `mlx_tq.evaluate`, so calibration does not train on the test.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from mlx_tq.cli.haystack import Fact, build_scene

_NAMES = ("Ivan", "Julia", "Kevin", "Laura", "Martin", "Nora", "Oscar", "Paula")
_CITIES = ("London", "Paris", "Berlin", "Madrid", "Tokyo", "Cairo", "Oslo", "Vienna", "Prague", "Lisbon")
_THINGS = ("lantern", "compass", "violin", "telescope", "umbrella", "camera", "teapot", "mirror", "ladder", "radio")
_PLACES = ("library", "kitchen", "attic", "garden", "harbor", "museum", "station", "cellar", "bakery", "market")
_COLORS = ("red", "orange", "yellow", "brown", "pink", "grey", "black", "gold")  # codespell:ignore grey


@dataclass(frozen=True)
class QuestionScene:
    text: list[int]  # tokens of a text with facts in it
    turns: list[list[int]]  # tokens of a question and its answer, each to be prefilled after the text


def build_question_scenes(tokenizer: Any, text: str, count: int, length: int, seed: int = 0) -> Iterator[QuestionScene]:
    """Yield scenes with a fact of every kind; each takes `length` tokens with a question."""
    rng = random.Random(seed)
    for _ in range(count):
        facts = [make(rng) for make in rng.sample(KINDS, len(KINDS))]
        depths = sorted(rng.random() for _ in facts)
        scene = build_scene(tokenizer, text, facts, depths, rng, tokens=length, sinks=0, window=0)
        answers = [tokenizer.encode(fact.answer, add_special_tokens=False) for fact in facts]
        yield QuestionScene(scene.ids, [[*q, *a] for q, a in zip(scene.questions, answers, strict=True)])


def _home(rng: random.Random) -> Fact:
    name, city = rng.choice(_NAMES), rng.choice(_CITIES)
    return Fact(f"{name} lives in {city}.", f"Where does {name} live?", city)


def _color(rng: random.Random) -> Fact:
    name, color = rng.choice(_NAMES), rng.choice(_COLORS)
    sentence = f"{name} likes {color} best of all colours."  # codespell:ignore colours
    return Fact(sentence, f"Which colour does {name} like best?", color)  # codespell:ignore colour


def _price(rng: random.Random) -> Fact:
    thing, price = rng.choice(_THINGS), str(rng.randint(11, 999))
    return Fact(f"The {thing} costs {price} dollars.", f"How much does the {thing} cost?", f"{price} dollars")


def _thing(rng: random.Random) -> Fact:
    thing, place = rng.choice(_THINGS), rng.choice(_PLACES)
    return Fact(f"The {thing} is kept in the {place}.", f"Where can the {thing} be found?", f"in the {place}")


def _meeting(rng: random.Random) -> Fact:
    place, time = rng.choice(_PLACES), f"{rng.randint(8, 18)}:{rng.choice(('00', '15', '30', '45'))}"
    return Fact(f"The meeting in the {place} begins at {time}.", f"When does the meeting in the {place} begin?", time)


KINDS: tuple[Callable[[random.Random], Fact], ...] = (_home, _color, _price, _thing, _meeting)
