"""Plant a fact in a long text, ask for it, and judge the answer.

A case is built from tokens, not characters, so that it is known exactly which cached tokens hold the fact, and that the
cache has packed every one of them before the question is read.
"""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib.resources import files
from typing import Any

from mlx_tq.cache.spec import CacheSpec
from mlx_tq.config import KVConfig
from mlx_tq.errors import ConfigError

NEEDLE = "The secret code word is {answer}."
# The published question of this test.
QUESTION = "What is the secret code word mentioned earlier? Answer with just the code word and number, nothing else:"
COLOURS = ("PURPLE", "CRIMSON", "SILVER", "GREEN", "AMBER", "INDIGO", "WHITE", "COPPER", "SCARLET", "BLUE")
ANIMALS = ("ELEPHANT", "FALCON", "DOLPHIN", "TIGER", "BADGER", "OTTER", "RAVEN", "TURTLE", "WOLF", "EAGLE")

_SENTENCE_END = re.compile(r"(?<=[.!?])(?=\s)")


def load_text() -> str:
    """The text inside the package: the beginning of WikiText-2's test split, 80,000 tokens of the embedded model."""
    return (files("mlx_tq") / "assets" / "text" / "wikitext-2-test.txt").read_text(encoding="utf-8")


@dataclass(frozen=True)
class Fact:
    """What is planted and asked for."""

    sentence: str
    question: str
    answer: str


@dataclass(frozen=True)
class Scene:
    """A text with facts planted in it, and the questions for them.

    Attributes:
        ids: tokens of the text.
        needles: first token of each planted sentence, and the one after its last.
        questions: what follows the text to ask for each, in tokens.
        depths: where the needles came to lie, 0 to 1.
    """

    ids: list[int]
    needles: list[tuple[int, int]]
    questions: list[list[int]]
    depths: list[float]


@dataclass(frozen=True)
class Case:
    """A prompt with a fact planted in it.

    Attributes:
        ids: tokens of the prompt.
        answer: what the model should say.
        needle: first token of the planted sentence, and the one after its last.
        question: first token after the text. Read `ids[:question]` first and the rest in a step of its own; the whole
            needle is packed by then.
        depth: where the needle came to lie in the text, 0 to 1.
    """

    ids: list[int]
    answer: str
    needle: tuple[int, int]
    question: int
    depth: float


class Verdict(StrEnum):
    """How an answer compares with the expected one; only PASS counts as found."""

    PASS = "PASS"  # noqa: S105  the exact string
    TITLE_CASE = "TITLE_CASE"  # the same, in title case
    PARTIAL_WORD = "PARTIAL_WORD"  # the words without the number
    PARTIAL_NUMBER = "PARTIAL_NUMBER"  # the number without the words
    FAIL = "FAIL"


def verdict(answer: str, expected: str) -> Verdict:
    """Judge what the model generated; `answer` must not contain the prompt."""
    words, _, number = expected.rpartition(" ")
    if _holds(answer, expected):
        return Verdict.PASS
    if _holds(answer, expected.title()):
        return Verdict.TITLE_CASE
    if words and _holds(answer.upper(), words):
        return Verdict.PARTIAL_WORD
    return Verdict.PARTIAL_NUMBER if _holds(answer, number) else Verdict.FAIL


def _holds(text: str, part: str) -> bool:
    """`part` stands in `text` as whole words: 7742 is not in 77421."""
    return re.search(rf"(?<!\w){re.escape(part)}(?!\w)", text) is not None


def code_word(rng: random.Random) -> Fact:
    """The published needle with words and a number of its own."""
    number = "".join(rng.choices("0123456789", k=4))
    answer = f"{rng.choice(COLOURS)} {rng.choice(ANIMALS)} {number}"
    return Fact(NEEDLE.format(answer=answer), QUESTION, answer)


def build_case(
    tokenizer: Any,
    text: str,
    *,
    tokens: int,
    depth: float,
    seed: int,
    sinks: int = KVConfig.sinks,
    window: int = KVConfig.window,
    chat: bool | None = None,
) -> Case:
    """Plant a code word in `text` and ask for it.

    Args:
        tokenizer: of the model.
        text: what surrounds the needle; each seed starts at another sentence of it.
        tokens: length of the prompt, question included.
        depth: 0 the start of the text, 1 its end; moved as far as needed for the needle to be packed wholly.
        seed: of the words, the number and the place in the text.
        sinks: of the cache, in tokens.
        window: of the cache, in tokens.
        chat: ask inside the tokenizer's chat template; by default, where it has one.

    Raises:
        ConfigError: a depth outside 0 to 1, a text too short, or a prompt too short for a packed needle.
    """
    rng = random.Random(seed)
    fact = code_word(rng)
    scene = build_scene(tokenizer, text, [fact], [depth], rng, tokens=tokens, sinks=sinks, window=window, chat=chat)
    return Case(
        ids=[*scene.ids, *scene.questions[0]],
        answer=fact.answer,
        needle=scene.needles[0],
        question=len(scene.ids),
        depth=scene.depths[0],
    )


def build_scene(
    tokenizer: Any,
    text: str,
    facts: Sequence[Fact],
    depths: Sequence[float],
    rng: random.Random,
    *,
    tokens: int,
    sinks: int = KVConfig.sinks,
    window: int = KVConfig.window,
    chat: bool | None = None,
) -> Scene:
    """Plant facts in `text`, each at its depth, so that every one of them is packed before a question is read.

    Args:
        tokenizer: of the model.
        text: what surrounds the needles.
        facts: to plant, in the order of their depths.
        depths: ascending, 0 the start of the text and 1 its end; moved as far as needed.
        rng: chooses the place in the text.
        tokens: length of the text with the longest of the questions.
        sinks: of the cache, in tokens.
        window: of the cache, in tokens.
        chat: ask inside the tokenizer's chat template; by default, where it has one.

    Raises:
        ConfigError: depths outside 0 to 1 or not ascending, a text too short, or no room for packed needles.
    """
    for depth in depths:
        if not 0 <= depth <= 1:
            raise ConfigError(f"depth is {depth}; it must be from 0 (start) to 1 (end).")
    if list(depths) != sorted(depths):
        raise ConfigError(f"the depths {list(depths)} of the needles do not ascend. Sort them.")
    needles = [_encode(tokenizer, " " + fact.sentence) for fact in facts]
    planted = sum(map(len, needles))
    frames = [_frame(tokenizer, chat, fact.question) for fact in facts]
    head, tail = frames[0][0], max((tail for _, tail in frames), key=len)
    space = tokens - len(head) - len(tail) - planted
    spec = CacheSpec.for_layer(KVConfig(sinks=sinks, window=window), 0, "q8", "q8")
    first, last = max(sinks, len(head)), spec.packed_until(tokens - len(tail)) - planted
    if space <= 0 or last < first:
        least = len(head) + sinks + window + planted + len(tail) + 64
        kept = f" with sinks {sinks} and window {window}" if sinks or window else ""
        smaller = ", or a smaller --kv-sinks and --kv-window" if kept else ""
        raise ConfigError(
            f"a prompt of {tokens} tokens{kept} has no room for needles of {planted} packed tokens; take at least "
            f"{least} tokens{smaller}."
        )
    filler, ends = _filler(tokenizer, text, space, rng)
    places = [_place(ends, round(depth * space), first - len(head), last - len(head)) for depth in depths]
    ids, spans = list(head), []
    for needle, start, stop in zip(needles, [0, *places], places, strict=False):
        ids += filler[start:stop]
        spans.append((len(ids), len(ids) + len(needle)))
        ids += needle
    return Scene(
        ids=[*ids, *filler[places[-1] :]],
        needles=spans,
        questions=[tail for _, tail in frames],
        depths=[place / space for place in places],
    )


def _encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))


def _frame(tokenizer: Any, chat: bool | None, question: str) -> tuple[list[int], list[int]]:
    """The tokens before the text, and those after it: question and end of the turn."""
    if chat is None:
        chat = tokenizer.has_chat_template
    if not chat:
        empty = list(tokenizer.encode(""))  # such as a start token
        return empty, _encode(tokenizer, "\n\n" + question)
    turn = [{"role": "user", "content": question}]
    rendered = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    before, _, after = rendered.partition(question)
    return _encode(tokenizer, before), _encode(tokenizer, "\n\n" + question + after)


def _filler(tokenizer: Any, text: str, count: int, rng: random.Random) -> tuple[list[int], list[int]]:
    """Exactly `count` tokens from a sentence of `text` on, and where their sentences end."""
    sentences = [piece for piece in _SENTENCE_END.split(text) if piece.strip()]
    start = rng.randrange(len(sentences)) if sentences else 0
    ids: list[int] = []
    ends = [0]
    for sentence in sentences[start:] + sentences[:start]:
        ids += _encode(tokenizer, sentence)
        ends.append(len(ids))
        if len(ids) >= count:
            return ids[:count], [end for end in ends if end <= count]
    raise ConfigError(
        f"the text has {len(ids)} tokens; {count} are needed around the needle. Give a longer text or a shorter length."
    )


def _place(ends: list[int], wanted: int, first: int, last: int) -> int:
    """The sentence end nearest to `wanted` within [first, last]; where there is none, the nearest token."""
    wanted = min(max(wanted, first), last)
    return min((end for end in ends if first <= end <= last), key=lambda end: abs(end - wanted), default=wanted)
