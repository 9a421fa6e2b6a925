"""Plant a fact in a long text, ask for it, and judge the answer.

Cases are built from tokens, not characters, so that it is certain which cached tokens hold the fact, and that the cache
has packed all of them before the question is prefilled.
"""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from mlx_tq.cache.spec import CacheSpec
from mlx_tq.config import KVConfig
from mlx_tq.errors import ConfigError
from mlx_tq.session.text import render_messages

NEEDLE = "The secret code word is {answer}."
QUESTION = "What is the secret code word mentioned earlier? Answer with just the code word and number, nothing else:"
COLORS = ("PURPLE", "CRIMSON", "SILVER", "GREEN", "AMBER", "INDIGO", "WHITE", "COPPER", "SCARLET", "BLUE")
ANIMALS = ("ELEPHANT", "FALCON", "DOLPHIN", "TIGER", "BADGER", "OTTER", "RAVEN", "TURTLE", "WOLF", "EAGLE")

_SENTENCE_END = re.compile(r"(?<=[.!?])(?=\s)")


@dataclass(frozen=True)
class Fact:
    sentence: str
    question: str
    answer: str


@dataclass(frozen=True)
class Scene:
    """A text with facts planted in it, and the questions for them."""

    ids: list[int]
    needles: list[tuple[int, int]]  # positions of each planted sentence, [start, stop)
    questions: list[list[int]]  # tokens that follow the text to ask for each fact
    depths: list[float]  # of the needles, 0 to 1


@dataclass(frozen=True)
class Case:
    """A prompt with one planted fact, whose needle is packed if the question is prefilled in a step of its own."""

    ids: list[int]
    answer: str
    needle: tuple[int, int]  # positions [start, stop)
    question: int  # its first position
    depth: float


class Verdict(StrEnum):
    """Rates an answer; only PASS counts as found."""

    PASS = "PASS"  # noqa: S105  the exact string
    TITLE_CASE = "TITLE_CASE"  # the same, in title case
    PARTIAL_WORD = "PARTIAL_WORD"  # the words without the number
    PARTIAL_NUMBER = "PARTIAL_NUMBER"  # the number without the words
    FAIL = "FAIL"


def judge_answer(answer: str, expected: str) -> Verdict:
    """Compare a generated answer, without the prompt, with the expected words and number."""
    words, _, number = expected.rpartition(" ")
    if _contains(answer, expected):
        return Verdict.PASS
    if _contains(answer, expected.title()):
        return Verdict.TITLE_CASE
    if words and _contains(answer.upper(), words):
        return Verdict.PARTIAL_WORD
    return Verdict.PARTIAL_NUMBER if _contains(answer, number) else Verdict.FAIL


def _contains(text: str, part: str) -> bool:
    # whole words only: 7742 is not in 77421
    return re.search(rf"(?<!\w){re.escape(part)}(?!\w)", text) is not None


def code_word(rng: random.Random) -> Fact:
    number = "".join(rng.choices("0123456789", k=4))
    answer = f"{rng.choice(COLORS)} {rng.choice(ANIMALS)} {number}"
    return Fact(NEEDLE.format(answer=answer), QUESTION, answer)


def build_case(tokenizer: Any, text: str, *, depth: float, seed: int, **sizes: Any) -> Case:
    """Plant a code word in `text`, both chosen by `seed`, and ask for it; `sizes` are those of `build_scene`."""
    fact = code_word(rng := random.Random(seed))
    scene = build_scene(tokenizer, text, [fact], [depth], rng, **sizes)
    ids = [*scene.ids, *scene.questions[0]]
    return Case(ids, fact.answer, scene.needles[0], len(scene.ids), scene.depths[0])


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
    """Plant facts in `text`, which `rng` starts at a random sentence, so that all are packed before a question comes.

    The depths ascend from 0 (start) to 1 (end), and are moved as far as needed for the needles to be packed. The scene
    takes `tokens` with the longest question, which is asked inside the chat template if `chat`, or by default if the
    tokenizer has one.
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
        regions = f" with sinks {sinks} and window {window}" if sinks or window else ""
        remedy = f"take at least {least} tokens" + (", or a smaller --kv-sinks and --kv-window" if regions else "")
        room = f"no room for needles of {planted} packed tokens"
        raise ConfigError(f"a prompt of {tokens} tokens{regions} has {room}; {remedy}.")
    filler, ends = _filler(tokenizer, text, space, rng)
    places = [_place(ends, round(depth * space), first - len(head), last - len(head)) for depth in depths]
    ids, spans = list(head), []
    for needle, start, stop in zip(needles, [0, *places], places, strict=False):
        ids += filler[start:stop]
        spans.append((len(ids), len(ids) + len(needle)))
        ids += needle
    questions = [tail for _, tail in frames]
    return Scene([*ids, *filler[places[-1] :]], spans, questions, [place / space for place in places])


def _encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))


def _frame(tokenizer: Any, chat: bool | None, question: str) -> tuple[list[int], list[int]]:
    """Return the tokens before the text, and those after it: the question and the end of the turn."""
    if chat is None:
        chat = tokenizer.has_chat_template
    if not chat:
        return list(tokenizer.encode("")), _encode(tokenizer, "\n\n" + question)  # with a start token, if any
    turn = [{"role": "user", "content": question}]
    rendered = render_messages(tokenizer, turn, add_generation_prompt=True)
    before, _, after = rendered.partition(question)
    return _encode(tokenizer, before), _encode(tokenizer, "\n\n" + question + after)


def _filler(tokenizer: Any, text: str, count: int, rng: random.Random) -> tuple[list[int], list[int]]:
    """Return `count` tokens from a random sentence of `text` on, and where their sentences end."""
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


def _place(ends: list[int], target: int, first: int, last: int) -> int:
    """Return the sentence end in [first, last] nearest to `target`, or the nearest token if there is none."""
    target = min(max(target, first), last)
    return min((end for end in ends if first <= end <= last), key=lambda end: abs(end - target), default=target)
