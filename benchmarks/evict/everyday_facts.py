"""Facts of everyday life in ordinary words, eight kinds, planted in WikiText-2 with others of the same kind.

Unlike an access code, no token of them stands out. A question names a person or a thing; several facts of a text differ
in nothing but that name and the answer.
"""

import random
from dataclasses import dataclass
from typing import Any

from benchmarks.recall.scenes import encode, frame

NAMES = (
    *("Alice", "Martin", "Sofia", "George", "Hannah", "Oscar", "Julia", "Walter", "Diana", "Felix", "Clara", "Hugo"),
    *("Nora", "Simon", "Laura", "Victor", "Emily", "Daniel", "Rachel", "Thomas", "Irene", "Peter", "Anna", "Louis"),
)


@dataclass(frozen=True)
class Kind:
    """A sentence about a subject, which asks for one of several answers."""

    sentence: str
    question: str
    opening: str  # of the answer
    subjects: tuple[str, ...]
    answers: tuple[str, ...]


KINDS = {
    "home": Kind(
        "{subject} grew up in {answer} before moving away.",
        "Where did {subject} grow up?",
        "{subject} grew up in",
        NAMES,
        ("Berlin", "Madrid", "Boston", "Vienna", "Dublin", "Lisbon", "Chicago", "Warsaw", "Toronto", "Athens"),
    ),
    "pet": Kind(
        "At home, {subject} keeps a {answer} as a pet.",
        "Which pet does {subject} keep?",
        "{subject} keeps a",
        NAMES,
        ("rabbit", "parrot", "turtle", "cat", "dog", "goat", "snake", "horse", "lizard", "mouse"),
    ),
    "job": Kind(
        "For many years {subject} has worked as a {answer}.",
        "What is the job of {subject}?",
        "{subject} has worked as a",
        NAMES,
        ("teacher", "lawyer", "doctor", "farmer", "nurse", "carpenter", "painter", "chemist", "sailor", "baker"),
    ),
    "food": Kind(
        "Nothing tastes better to {subject} than {answer}.",
        "What does {subject} like to eat most?",
        "Nothing tastes better to {subject} than",
        NAMES,
        ("soup", "cheese", "fish", "pasta", "bread", "rice", "honey", "salad", "chocolate", "mushrooms"),
    ),
    "instrument": Kind(
        "Every evening {subject} plays the {answer} for an hour.",
        "Which instrument does {subject} play?",
        "{subject} plays the",
        NAMES,
        ("violin", "piano", "guitar", "flute", "trumpet", "harp", "drums", "cello", "organ", "banjo"),
    ),
    "place": Kind(
        "Somebody left the {subject} in the {answer}.",
        "Where is the {subject}?",
        "Somebody left the {subject} in the",
        ("umbrella", "camera", "ladder", "basket", "lamp", "hammer", "suitcase", "radio", "blanket", "mirror"),
        ("kitchen", "garden", "garage", "attic", "library", "office", "basement", "hall", "bathroom", "barn"),
    ),
    "weekday": Kind(
        "The meeting with {subject} takes place on {answer}.",
        "On which day does the meeting with {subject} take place?",
        "The meeting with {subject} takes place on",
        NAMES,
        ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"),
    ),
    "color": Kind(
        "The front door of {subject}'s house is painted {answer}.",
        "What color is the front door of {subject}'s house?",
        "The front door of {subject}'s house is painted",
        NAMES,
        ("blue", "green", "red", "yellow", "white", "black", "orange", "purple", "brown", "pink"),
    ),
}


@dataclass(frozen=True)
class Question:
    kind: str
    ids: list[int]  # that follow the text, up to the answer
    answer: list[int]


@dataclass(frozen=True)
class Scene:
    ids: list[int]  # of the text, from the start of the prompt on
    questions: list[Question]


def plant_facts(tokenizer: Any, text: list[int], tokens: int, kinds: list[str], each: int, seed: int) -> Scene:
    """Plant `each` facts of each of some kinds at random depths in about `tokens` tokens of `text`, and ask for all.

    Subjects and answers of one kind differ within a text. With a chat template the text is the user's message.
    """
    rng = random.Random(seed)
    sentences, questions = [], []
    chat = frame(tokenizer, "")
    before, after = chat.head, chat.after or "\n"
    for name in kinds:
        kind = KINDS[name]
        for subject, answer in zip(rng.sample(kind.subjects, each), rng.sample(kind.answers, each), strict=True):
            sentences.append(encode(tokenizer, " " + kind.sentence.format(subject=subject, answer=answer)))
            asked = f"\n\n{kind.question.format(subject=subject)}{after}{kind.opening.format(subject=subject)}"
            questions.append(Question(name, encode(tokenizer, asked), encode(tokenizer, " " + answer)))
    rng.shuffle(sentences)
    space = tokens - len(before) - sum(map(len, sentences))
    start = rng.randrange(len(text) - space)
    filler = text[start : start + space]
    cuts = sorted(rng.sample(range(space // 20, space - space // 20), len(sentences)))
    ids, done = list(before), 0
    for cut, sentence in zip(cuts, sentences, strict=True):
        ids += filler[done:cut] + sentence
        done = cut
    return Scene(ids + filler[done:], questions)
