"""Facts of nine kinds, each with a question, which the needle models learn to find in long text."""

import random
from collections.abc import Callable
from typing import NamedTuple

COLORS = str.split(
    "RED ORANGE YELLOW GREEN BLUE PURPLE BLACK WHITE SILVER GOLDEN CRIMSON INDIGO VIOLET SCARLET AMBER COPPER IVORY "
    "JADE CORAL BRONZE HIDDEN QUIET FROZEN ANCIENT"
)
ANIMALS = str.split(
    "ELEPHANT TIGER FALCON DOLPHIN PANDA LION WOLF RAVEN OTTER BADGER FOX HAWK BEAR EAGLE COBRA LYNX MOOSE SWAN "
    "TURTLE WHALE RABBIT HORSE CAMEL PARROT"
)
NAMES = str.split(
    "Alice Bob Carol David Emma Frank Grace Henry Irene Jack Karen Leo Maria Nathan Olivia Peter Quinn Rachel "
    "Samuel Tina Victor Wendy Xavier Yara Zoe Ahmed Bianca Chen Dmitri Elena Farid Greta Hiro Ingrid Jorge Keiko "
    "Lars Mei Nadia Omar Priya Rosa Stefan Tomas Uma Viktor Wanda Yusuf"
)
OBJECTS = str.split(
    "lantern compass ledger violin telescope notebook umbrella camera teapot map key mirror basket hammer ladder "
    "kettle radio blanket trumpet drum"
)
PLACES = str.split(
    "library kitchen attic garden harbor museum station cellar bakery chapel market workshop stable tower orchard "
    "theatre hospital school bridge lighthouse"
)
CITIES = str.split(
    "London Paris Berlin Madrid Rome Tokyo Cairo Lima Oslo Dublin Vienna Prague Athens Lisbon Warsaw Delhi Seoul "
    "Boston Denver Toronto Sydney Nairobi Havana Quito"
)
THINGS = str.split("color food song city animal book game flower sport drink")


class Fact(NamedTuple):
    """A sentence, a question and its answer; no two facts of a context share `key`."""

    key: tuple[str, ...]
    sentence: str
    question: str
    answer: str


def _digits(rng: random.Random, count: int) -> str:
    return "".join(rng.choice("0123456789") for _ in range(count))


def _word(rng: random.Random) -> str:
    return "".join(rng.choice("bcdfghjklmnprstvz") + rng.choice("aeiou") for _ in range(rng.randint(2, 3)))


def _code_word(rng: random.Random) -> Fact:
    answer = f"{rng.choice(COLORS)} {rng.choice(ANIMALS)} {_digits(rng, 4)}"
    questions = [
        "What is the secret code word mentioned earlier? Answer with just the code word and number, nothing else:",
        "What is the secret code word?",
        "Tell me the secret code word.",
    ]
    return Fact(("code word",), f"The secret code word is {answer}.", rng.choice(questions), answer)


def _access_code_of(rng: random.Random) -> Fact:
    name, answer = rng.choice(NAMES), _digits(rng, 6)
    question = rng.choice([f"What is the access code for {name}?", f"What's {name}'s access code?"])
    return Fact(("access code", name), f"The access code for {name} is {answer}.", question, answer)


def _phone(rng: random.Random) -> Fact:
    name, answer = rng.choice(NAMES), f"{_digits(rng, 3)}-{_digits(rng, 4)}"
    return Fact(("phone", name), f"{name}'s phone number is {answer}.", f"What is {name}'s phone number?", answer)


def _object(rng: random.Random) -> Fact:
    thing, answer = rng.choice(OBJECTS), rng.choice(PLACES)
    question = rng.choice([f"Where is the {thing} kept?", f"Where is the {thing}?"])
    return Fact(("object", thing), f"The {thing} is kept in the {answer}.", question, answer)


def _home(rng: random.Random) -> Fact:
    name, answer = rng.choice(NAMES), rng.choice(CITIES)
    return Fact(("home", name), f"{name} lives in {answer}.", f"Where does {name} live?", answer)


def _favourite(rng: random.Random) -> Fact:
    name, thing, answer = rng.choice(NAMES), rng.choice(THINGS), _word(rng)
    sentence = f"{name}'s favorite {thing} is {answer}."
    return Fact(("favorite", name, thing), sentence, f"What is {name}'s favorite {thing}?", answer)


def _magic_number(rng: random.Random) -> Fact:
    city, answer = rng.choice(CITIES), _digits(rng, 7)
    sentence = f"One of the special magic numbers for {city} is: {answer}."
    question = f"What is the special magic number for {city} mentioned in the provided text?"
    return Fact(("magic number", city), sentence, question, answer)


def _access_code(rng: random.Random) -> Fact:
    answer = _digits(rng, 6)
    question = rng.choice(["What's the access code?", "What is the access code?"])
    return Fact(("the access code",), f"The access code is {answer}.", question, answer)


def _password(rng: random.Random) -> Fact:
    place, answer = rng.choice(PLACES), _word(rng) + _digits(rng, 2)
    sentence = f"The password of the {place} is {answer}."
    return Fact(("password", place), sentence, f"What is the password of the {place}?", answer)


KINDS: tuple[Callable[[random.Random], Fact], ...] = (
    _code_word,
    _access_code_of,
    _phone,
    _object,
    _home,
    _favourite,
    _magic_number,
    _access_code,
    _password,
)


def draw(rng: random.Random, used: set[tuple[str, ...]]) -> Fact | None:
    """Draw a fact about nothing in `used` and add it there; None if fifty tries find none."""
    for _ in range(50):
        fact = KINDS[rng.randrange(len(KINDS))](rng)
        if fact.key not in used:
            used.add(fact.key)
            return fact
    return None
