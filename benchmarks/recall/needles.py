"""Needles in five kinds, and their questions.

plain: one sentence, asked for in its own words. paraphrased: question and sentence share no content word. several: two
sentences at once. decoys: other sentences have the same words but not the answer. two-hop: one sentence names the thing
that another one tells about.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.models.facts import NAMES

COLORS = ("amber", "copper", "violet", "silver", "indigo", "crimson", "ivory", "scarlet", "golden", "emerald")
ONLY = " Answer with the number only."
# Fact and question, which share no content word.
PARAPHRASES = (
    ("The password of the cellar is {}.", "Which digits open the basement?"),
    ("The physician earns {} dollars every year.", "How much money does the doctor make annually?"),
    ("The vessel carries {} barrels of petroleum.", "How much oil is aboard the ship?"),
    ("The kid was given {} candies.", "How many sweets did the child receive?"),
    ("The automobile has been driven {} miles.", "What distance does the car show?"),
    ("The footwear was sold for {} francs.", "What is the price of the shoes?"),
    ("The attorney's telephone has the number {}.", "Under which digits is the lawyer called?"),
    ("The infant weighs {} grams.", "How heavy is the baby?"),
)


@dataclass(frozen=True)
class Needle:
    """A question and what answers it."""

    evidence: tuple[str, ...]  # sentences of the text, all of which the answer needs
    question: str  # for a base model the beginning of a sentence
    answers: tuple[str, ...]  # all of which a right answer holds


@dataclass(frozen=True)
class Hidden:
    """What one text holds."""

    needles: list[Needle]
    others: tuple[str, ...] = ()

    @property
    def sentences(self) -> list[str]:
        return list(dict.fromkeys([*(s for needle in self.needles for s in needle.evidence), *self.others]))


def _codes(rng: random.Random, count: int, digits: int = 5) -> list[str]:
    return [str(code) for code in rng.sample(range(10 ** (digits - 1), 10**digits), count)]


def _gate(color: str, code: str, place: str = "gate") -> str:
    return f"The access code of the {color} {place} is {code}."


def plain(rng: random.Random, count: int) -> Hidden:
    pairs = zip(rng.sample(COLORS, count), _codes(rng, count), strict=True)
    return Hidden([Needle((_gate(c, x),), f"What is the access code of the {c} gate?{ONLY}", (x,)) for c, x in pairs])


def continued(rng: random.Random, count: int) -> Hidden:
    """Plant as `plain` does, for a base model: the question begins the sentence again."""
    pairs = zip(rng.sample(COLORS, count), _codes(rng, count), strict=True)
    return Hidden([Needle((_gate(c, x),), f"The access code of the {c} gate is", (x,)) for c, x in pairs])


def trained(rng: random.Random, count: int) -> Hidden:
    """Plant as `plain` does, in the words that the embedded model was trained on."""
    pairs = zip(rng.sample(NAMES, count), _codes(rng, count, 6), strict=True)
    return Hidden(
        [Needle((f"The access code for {n} is {x}.",), f"What is the access code for {n}?", (x,)) for n, x in pairs]
    )


def paraphrased(rng: random.Random, count: int) -> Hidden:
    pairs = zip(rng.sample(PARAPHRASES, count), _codes(rng, count), strict=True)
    return Hidden([Needle((fact.format(x),), question + ONLY, (x,)) for (fact, question), x in pairs])


def several(rng: random.Random, count: int) -> Hidden:
    facts = list(zip(rng.sample(COLORS, count), _codes(rng, count), strict=True))
    pairs = zip(facts, facts[1:] + facts[:1], strict=True)
    return Hidden(
        [
            Needle(
                (_gate(c, x), _gate(d, y)),
                f"What are the access codes of the {c} gate and the {d} gate? Answer with the two numbers only.",
                (x, y),
            )
            for (c, x), (d, y) in pairs
        ]
    )


def decoys(rng: random.Random, count: int) -> Hidden:
    made = plain(rng, count)
    colors = [needle.question.split()[7] for needle in made.needles]
    others = [_gate(c, x, "bridge") for c, x in zip(colors, _codes(rng, count), strict=True)]
    others += [f"Nobody at the {c} gate could say what its access code had been." for c in colors]
    return Hidden(made.needles, tuple(others))


def two_hop(rng: random.Random, count: int) -> Hidden:
    facts = zip(rng.sample(NAMES, count), rng.sample(COLORS, count), _codes(rng, count), strict=True)
    return Hidden(
        [
            Needle(
                (f"{n} keeps all letters in the {c} room.", _gate(c, x, "room")),
                f"What is the access code of the room where {n} keeps all letters?{ONLY}",
                (x,),
            )
            for n, c, x in facts
        ]
    )


KINDS: dict[str, Callable[[random.Random, int], Hidden]] = {
    "plain": plain,
    "paraphrased": paraphrased,
    "several": several,
    "decoys": decoys,
    "two-hop": two_hop,
    "continued": continued,
    "trained": trained,
}
