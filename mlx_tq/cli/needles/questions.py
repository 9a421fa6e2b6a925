"""Everyday facts, and scenes that ask for them: text on which a model's queries look for something.

They share no wording with what `mlx_tq.evaluate` plants: a model calibrated on these was not told what it is tested on.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from mlx_tq.cli.needles.haystack import Fact, Scene, build_scene

_NAMES = ("Ivan", "Julia", "Kevin", "Laura", "Martin", "Nora", "Oscar", "Paula")
_CITIES = ("London", "Paris", "Berlin", "Madrid", "Tokyo", "Cairo", "Oslo", "Vienna", "Prague", "Lisbon")
_THINGS = ("lantern", "compass", "violin", "telescope", "umbrella", "camera", "teapot", "mirror", "ladder", "radio")
_PLACES = ("library", "kitchen", "attic", "garden", "harbor", "museum", "station", "cellar", "bakery", "market")
_COLOURS = ("red", "orange", "yellow", "brown", "pink", "grey", "black", "gold")


@dataclass(frozen=True)
class Asked:
    """A text with facts in it.

    Attributes:
        text: its tokens.
        turns: a question and its answer in tokens, each to be read after the text.
    """

    text: list[int]
    turns: list[list[int]]


def scenes(tokenizer: Any, text: str, count: int, length: int, seed: int = 0) -> Iterator[Asked]:
    """Scenes with a fact of every kind, `length` tokens each with a question; raises as `haystack.build_scene`."""
    rng = random.Random(seed)
    for _ in range(count):
        facts = [make(rng) for make in rng.sample(KINDS, len(KINDS))]
        depths = sorted(rng.random() for _ in facts)
        scene: Scene = build_scene(tokenizer, text, facts, depths, rng, tokens=length, sinks=0, window=0)
        answers = [tokenizer.encode(fact.answer, add_special_tokens=False) for fact in facts]
        yield Asked(scene.ids, [[*q, *a] for q, a in zip(scene.questions, answers, strict=True)])


def _place(rng: random.Random) -> Fact:
    name, city = rng.choice(_NAMES), rng.choice(_CITIES)
    return Fact(f"{name} lives in {city}.", f"Where does {name} live?", city)


def _colour(rng: random.Random) -> Fact:
    name, colour = rng.choice(_NAMES), rng.choice(_COLOURS)
    return Fact(f"{name} likes {colour} best of all colours.", f"Which colour does {name} like best?", colour)


def _price(rng: random.Random) -> Fact:
    thing, price = rng.choice(_THINGS), str(rng.randint(11, 999))
    return Fact(f"The {thing} costs {price} dollars.", f"How much does the {thing} cost?", f"{price} dollars")


def _thing(rng: random.Random) -> Fact:
    thing, place = rng.choice(_THINGS), rng.choice(_PLACES)
    return Fact(f"The {thing} is kept in the {place}.", f"Where can the {thing} be found?", f"in the {place}")


def _meeting(rng: random.Random) -> Fact:
    place, time = rng.choice(_PLACES), f"{rng.randint(8, 18)}:{rng.choice(('00', '15', '30', '45'))}"
    return Fact(f"The meeting in the {place} begins at {time}.", f"When does the meeting in the {place} begin?", time)


KINDS: tuple[Callable[[random.Random], Fact], ...] = (_place, _colour, _price, _thing, _meeting)
