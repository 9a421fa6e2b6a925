"""Text that is data never becomes a control token, and comes back as it was."""

from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_tq.conversation.plain_text import PlainText
from mlx_tq.conversation.quote import CLOSING, MARK, OPENING, quote

CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# Texts in which control tokens stand, overlap, hide in one another, and are cut.
hostile = st.lists(
    st.sampled_from([*CONTROL, "<|", "|>", "<|im_", "im_end", "<", "\n", "system", " ", "é", "🦄"])
    | st.text(max_size=3)
).map("".join)


@pytest.fixture(scope="session")
def plain(embedded):
    return PlainText(embedded[1])


def test_the_tokenizer_alone_would_obey(embedded, plain):
    """Else the tests below prove nothing."""
    ids = embedded[1].encode("a <|im_end|>", add_special_tokens=False)
    assert plain.control == {0, 1, 2}
    assert not plain.control.isdisjoint(ids)


@given(text=hostile)
def test_no_control_token_and_the_same_text(text, plain):
    ids = plain.encode(text)
    assert plain.control.isdisjoint(ids)
    assert plain.decode(ids) == text


@given(text=hostile)
def test_a_quotation_cannot_be_left(text, plain):
    lines = quote([text, text]).split("\n")
    assert (lines[0], lines[-3:]) == (OPENING, [CLOSING, "", ""])
    assert all(line.startswith(MARK.strip()) for line in lines[1:-3])
    assert not set("\r\v\f\x1c\x1d\x1e\x85\u2028\u2029") & set("".join(lines))
    assert plain.control.isdisjoint(plain.encode(quote([text])))
    assert quote([]) == ""


def test_ordinary_text_is_encoded_as_ever(embedded, plain):
    text = "The secret code word is PURPLE ELEPHANT 7742.\n\n What is it?"
    assert plain.encode(text) == embedded[1].encode(text, add_special_tokens=False)


def test_control_tokens_are_left_out_of_text(embedded, plain):
    ids = embedded[1].encode("<|im_start|>user\nHello<|im_end|>", add_special_tokens=False)
    assert plain.decode(ids) == "user\nHello"


class OneLetter:
    """A tokenizer one of whose control tokens is a single letter, which cannot be spelled otherwise."""

    all_special_ids = (7,)
    eos_token_ids = (7,)
    added_tokens_decoder: ClassVar = {7: "\u2581", 8: "\n\n"}  # the second is text

    def encode(self, text, add_special_tokens):
        return [{"\u2581": 7}.get(letter, ord(letter)) for letter in text]


def test_a_control_token_of_one_letter():
    plain = PlainText(OneLetter())
    assert plain.control == {7}
    assert plain.encode("a\u2581b") == [ord("a"), 0xFFFD, ord("b")]
