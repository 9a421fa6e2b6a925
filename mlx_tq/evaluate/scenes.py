"""Harder needles: several at once, a question in other words, and decoys of the same kind."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mlx_tq.cli.needles.haystack import Fact, Scene, Verdict, build_scene, code_word, verdict
from mlx_tq.errors import ConfigError

DECOY = "DECOY"
_NAMES = ("Alice", "Bob", "Carol", "David", "Emma", "Frank", "Grace", "Henry")
_MANY = 4


@dataclass(frozen=True)
class Planted:
    """A scene and what is asked in it.

    Attributes:
        scene: the text.
        facts: planted, in the order of the scene's needles.
        asked: indices of the facts that are asked for; the others are decoys.
    """

    scene: Scene
    facts: list[Fact]
    asked: list[int]

    def verdict(self, index: int, answer: str) -> str:
        """A `haystack.Verdict` of the answer for a fact, or DECOY where it names another fact instead."""
        found = verdict(answer, self.facts[index].answer)
        others = (fact for place, fact in enumerate(self.facts) if place != index)
        if found is Verdict.FAIL and any(verdict(answer, fact.answer) is Verdict.PASS for fact in others):
            return DECOY
        return found.value


def plant(kind: str, tokenizer: Any, text: str, depth: float, seed: int, **sizes: Any) -> Planted:
    """Build the case of a kind, a depth and a seed.

    Args:
        kind: one of `KINDS`.
        tokenizer: of the model.
        text: what surrounds the needles.
        depth: of the needle that is asked for; several needles spread over the text whatever it is.
        seed: of names, words, numbers and the place in the text.
        sizes: tokens, sinks, window and chat of `haystack.build_scene`.

    Raises:
        ConfigError: an unknown kind, or a scene that cannot be built.
    """
    if kind not in KINDS:
        raise ConfigError(f"needle kind {kind!r} is unknown; valid are {', '.join(KINDS)}.")
    rng = random.Random(seed)
    facts, depths, asked = KINDS[kind](rng, depth)
    return Planted(build_scene(tokenizer, text, facts, depths, rng, **sizes), facts, asked)


def _single(rng: random.Random, depth: float) -> tuple[list[Fact], list[float], list[int]]:
    return [code_word(rng)], [depth], [0]


def _paraphrased(rng: random.Random, depth: float) -> tuple[list[Fact], list[float], list[int]]:
    return [replace(code_word(rng), question="Tell me the secret code word.")], [depth], [0]


def _multi(rng: random.Random, depth: float) -> tuple[list[Fact], list[float], list[int]]:
    return _access_codes(rng), [(place + 0.5) / _MANY for place in range(_MANY)], list(range(_MANY))


def _decoys(rng: random.Random, depth: float) -> tuple[list[Fact], list[float], list[int]]:
    target, *others = _access_codes(rng)
    spread = [((place + 0.5) / (_MANY - 1), other) for place, other in enumerate(others)]
    placed = sorted([(depth, target), *spread], key=lambda pair: pair[0])
    facts = [fact for _, fact in placed]
    return facts, [place for place, _ in placed], [facts.index(target)]


def _access_codes(rng: random.Random) -> list[Fact]:
    """Facts of one kind about different people."""
    return [_access_code(name, "".join(rng.choices("0123456789", k=6))) for name in rng.sample(_NAMES, _MANY)]


def _access_code(name: str, code: str) -> Fact:
    return Fact(f"The access code for {name} is {code}.", f"What is the access code for {name}?", code)


KINDS: dict[str, Callable[[random.Random, float], tuple[list[Fact], list[float], list[int]]]] = {
    "single": _single,
    "multi": _multi,
    "paraphrased": _paraphrased,
    "decoys": _decoys,
}
# Kinds whose needles spread over the text, whatever the depth.
SPREAD = ("multi",)


def questions(kinds: Sequence[str], depths: int) -> int:
    """How many questions the scenes of these kinds ask at one length and seed."""
    return sum(_MANY if kind in SPREAD else depths for kind in kinds)
