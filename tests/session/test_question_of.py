"""What of a prompt is its question, by the text itself."""

import pytest

from mlx_tq import load
from mlx_tq.session.recall import SHORTEST_QUESTION, question_of

DOCUMENT = "".join(f"House number {n} on Lime Street has a gate, a tree and {n} windows.\n" for n in range(60))
QUESTION = "Which of the four answers is right for the house that stands beside the river and has the largest gate?"
CHOICES = "\n".join(
    f"{letter}) the house with the {nth} gate" for letter, nth in zip("ABCDEFGH", range(8), strict=True)
)


@pytest.fixture(scope="module")
def tokenizer():
    return load()[1]


@pytest.mark.parametrize(
    ("before", "question"),
    [
        (DOCUMENT + "\n", f"{QUESTION}\n{CHOICES}"),
        (DOCUMENT + "\r\n", f"{QUESTION}\r\n{CHOICES}"),
        (DOCUMENT + "  \n", f"{QUESTION}\n{CHOICES}"),
        ("A paragraph.\n\n" + DOCUMENT, f"{QUESTION} {QUESTION}"),
    ],
    ids=["behind an empty line", "lines of Windows", "a line of blanks", "no empty line so near"],
)
def test_a_question_begins_behind_an_empty_line_or_else_the_last_line(tokenizer, before, question):
    ids = tokenizer.encode(before + question)
    document, found = question_of(tokenizer, ids)
    assert document + found == ids
    assert tokenizer.decode(found).lstrip() == question.replace("\r\n", tokenizer.decode(tokenizer.encode("\r\n")))


def test_a_short_question_takes_what_stands_before_it(tokenizer):
    ids = tokenizer.encode(f"{DOCUMENT}\nWhich one?")
    assert len(question_of(tokenizer, ids)[1]) >= SHORTEST_QUESTION


def test_of_a_prompt_without_lines_the_last_tokens_ask(tokenizer):
    ids = tokenizer.encode(DOCUMENT.replace("\n", " "))
    assert len(question_of(tokenizer, ids)[1]) == SHORTEST_QUESTION
    assert question_of(tokenizer, ids[:3]) == (ids[:1], ids[1:3])
