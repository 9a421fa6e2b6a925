"""What a constraint lets through, token by token, on logits that allow everything."""

import asyncio
import math
from types import SimpleNamespace

import mlx.core as mx
import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_tq.grammar.constraint import Grammars
from mlx_tq.grammar.grammar_source import GrammarError, GrammarSource
from mlx_tq.models import load

CODE = {"type": "object", "properties": {"code": {"enum": [7]}}, "required": ["code"], "additionalProperties": False}


@pytest.fixture(scope="module")
def tokenizer():
    inner = load()[1]._tokenizer
    inner.add_tokens(["<think>", "</think>"])
    return TokenizerWrapper(inner)


@pytest.fixture(scope="module")
def grammars(tokenizer):
    made = Grammars(tokenizer)
    yield made
    made.close()


def constrained(grammars, schema, **options):
    return grammars.constraint(asyncio.run(grammars.compile(GrammarSource.of_schema(schema))), **options)


def allowed(constraint, *tokens, width=4200):
    """Ids that may follow the tokens of an answer."""
    logits = constraint(mx.array([5, *tokens]), mx.zeros((1, width)))
    return {token for token, logit in enumerate(logits[0].tolist()) if logit > -math.inf}


def test_only_what_can_still_become_an_answer(tokenizer, grammars):
    """The prompt's last token is not part of it; rows of logits that no token has are closed; the end opens all."""
    (vocabulary,) = {len(tokenizer)}
    constraint = constrained(grammars, CODE)
    other = constraint.copy()
    first = allowed(constraint)
    assert {tokenizer.decode([token])[0] for token in first} == {"{"}
    ids = tokenizer.encode('{"code": 7}', add_special_tokens=False)
    found = [allowed(constraint, *ids[:count]) for count in range(len(ids))]
    assert all(token in tokens and len(tokens) < vocabulary / 2 for token, tokens in zip(ids, found, strict=True))
    assert allowed(constraint, *ids) == set(tokenizer.eos_token_ids)
    assert len(allowed(constraint, *ids, max(tokenizer.eos_token_ids))) == 4200, "a batch computes one token more"
    assert allowed(constraint, *ids[:3]) == found[3], "an answer that continues after a memory error"
    assert allowed(other) == first, "a copy has a place of its own"
    constraint.check()


def test_thoughts_come_before_the_form(tokenizer, grammars):
    constraint = constrained(grammars, CODE, thinks=True)
    (thought,) = set(tokenizer.encode("I", add_special_tokens=False))
    assert len(allowed(constraint)) == len(allowed(constraint, thought)) == 4200
    (end,) = tokenizer.think_end_tokens
    assert {tokenizer.decode([token])[0] for token in allowed(constraint, thought, end)} == {"{"}


def test_a_token_that_was_not_allowed_is_an_error(tokenizer, grammars):
    """Other processors cannot put one back; if a sampler did, the answer would end."""
    constraint = constrained(grammars, CODE)
    allowed(constraint)
    (wrong,) = tokenizer.encode("7", add_special_tokens=False)
    assert len(allowed(constraint, wrong)) == 4200
    with pytest.raises(GrammarError, match="any further"):
        constraint.check()


def test_copies_share_the_time_for_masks(grammars):
    grammar = asyncio.run(grammars.compile(GrammarSource.of_schema(CODE)))
    constraint = grammars.constraint(grammar)
    copy = constraint.copy()
    assert len(allowed(constraint)) < 4200
    grammar.mask_seconds = 10.0
    assert len(allowed(copy)) == 4200
    with pytest.raises(GrammarError, match=r"masks took 10\.0 s, over the limit of 0\.25 s plus 5 ms per token"):
        copy.check()


def test_tokenizers_that_no_mask_can_be_made_for(tokenizer):
    """One that is written in Python, and one whose answers have channels."""
    fields = (
        "eos_token_ids",
        "think_start",
        "think_end",
        "decode",
        "response_transitions",
        "structural_markers",
        "_tokenizer",
    )
    plain = {name: getattr(tokenizer, name) for name in fields}
    for change in ({"_tokenizer": object()}, {"structural_markers": ["<|channel|>"]}):
        with pytest.raises(GrammarError, match="ask for plain text"):
            constrained(Grammars(SimpleNamespace(**{**plain, **change})), CODE)


def test_what_a_mark_opens(tokenizer, grammars):
    """Text is free until the mark and after the end of the grammar; marks in reasoning open nothing."""
    grammar = asyncio.run(grammars.compile(GrammarSource("regex", "[0-9]{2}!")))

    def count_allowed(text, **options):
        constraint = grammars.constraint(grammar, call_start="[call]", **options)
        ids = [token for part in text.split("|") for token in tokenizer.encode(part, add_special_tokens=False)]
        for count in range(len(ids) + 1):
            found = allowed(constraint, *ids[:count])
        constraint.check()
        return len(found)

    digits = count_allowed("[call]|1")
    assert 0 < digits < 50
    for text in (
        "Hi [|call]|1",
        "<think>[call]</think>[call]|1",
        "[call]12! and [call]|1",
        "x<think>[call]|1",
        "[call]|[call]|1",
    ):
        assert count_allowed(text) == digits, text
    for text in (
        "Hi",
        "<think>[call]",
        "[call",
        "[call]",
        "[call]12!",
        "[call]12! and",
        "[call]| or so",
        "[call]|x",
        "[call]|`",
    ):
        assert count_allowed(text) == 4200, text
    assert count_allowed("[call]|1", thinks=True) == 4200
    assert count_allowed("Hm. [call]</think>[call]|1", thinks=True) == digits


def test_a_mark_that_is_a_token(tokenizer, grammars):
    """It opens a call at once; other tokens that spell it do not. (`</think>` is a token of this tokenizer.)"""
    grammar = asyncio.run(grammars.compile(GrammarSource("regex", "[0-9]{2}!")))
    mark = tokenizer.convert_tokens_to_ids("</think>")
    spelled = [*tokenizer.encode("<"), *tokenizer.encode("/think>")]
    digit = tokenizer.encode("1")[-1]
    constraint = grammars.constraint(grammar, call_start="</think>")
    assert tokenizer.decode(spelled) == "</think>"
    for count in range(len(spelled) + 1):
        assert len(allowed(constraint, *spelled[:count])) == 4200
    assert len(allowed(constraint, *spelled, digit)) == 4200
    assert 0 < len(allowed(constraint, *spelled, digit, mark)) < 50
