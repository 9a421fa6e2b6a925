"""Harder needles: several at once, a question in other words, and decoys of the same kind."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from mlx_tq.cli.haystack import Fact, Scene, Verdict, build_scene, code_word, judge_answer
from mlx_tq.errors import ConfigError

DECOY = "DECOY"
_NAMES = ("Alice", "Bob", "Carol", "David", "Emma", "Frank", "Grace", "Henry")
_COUNT = 4
Kind = tuple[list[Fact], list[float], list[int]]  # facts, their depths, and the indices of those that are asked for


@dataclass(frozen=True)
class Planted:
    """A scene; `facts` are in the order of its needles, and those that are not in `asked` are decoys."""

    scene: Scene
    facts: list[Fact]
    asked: list[int]

    def verdict(self, index: int, answer: str) -> str:
        """Return the verdict on the answer for a fact, or DECOY if it names another fact instead."""
        verdict = judge_answer(answer, self.facts[index].answer)
        others = (fact for place, fact in enumerate(self.facts) if place != index)
        if verdict is Verdict.FAIL and any(judge_answer(answer, fact.answer) is Verdict.PASS for fact in others):
            return DECOY
        return verdict.value


def plant(kind: str, tokenizer: Any, text: str, depth: float, seed: int, **sizes: Any) -> Planted:
    """Build the scene of a kind; `sizes` are those of `build_scene`."""
    if kind not in KINDS:
        raise ConfigError(f"needle kind {kind!r} is unknown; valid are {', '.join(KINDS)}.")
    rng = random.Random(seed)
    facts, depths, asked = KINDS[kind](rng, depth)
    return Planted(build_scene(tokenizer, text, facts, depths, rng, **sizes), facts, asked)


def _single(rng: random.Random, depth: float) -> Kind:
    return [code_word(rng)], [depth], [0]


def _paraphrased(rng: random.Random, depth: float) -> Kind:
    return [replace(code_word(rng), question="Tell me the secret code word.")], [depth], [0]


def _multi(rng: random.Random, depth: float) -> Kind:
    return _access_codes(rng), [(place + 0.5) / _COUNT for place in range(_COUNT)], list(range(_COUNT))


def _decoys(rng: random.Random, depth: float) -> Kind:
    target, *others = _access_codes(rng)
    spread = [((place + 0.5) / (_COUNT - 1), other) for place, other in enumerate(others)]
    placed = sorted([(depth, target), *spread], key=lambda pair: pair[0])
    facts = [fact for _, fact in placed]
    return facts, [place for place, _ in placed], [facts.index(target)]


def _access_codes(rng: random.Random) -> list[Fact]:
    codes = {name: "".join(rng.choices("0123456789", k=6)) for name in rng.sample(_NAMES, _COUNT)}
    return [
        Fact(f"The access code for {name} is {code}.", f"What is the access code for {name}?", code)
        for name, code in codes.items()
    ]


KINDS: dict[str, Callable[[random.Random, float], Kind]] = {
    "single": _single,
    "multi": _multi,
    "paraphrased": _paraphrased,
    "decoys": _decoys,
}
SPREAD = ("multi",)  # kinds whose needles spread over the text, whatever the depth
