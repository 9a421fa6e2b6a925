"""Prompts that share a prefix with earlier ones are prefilled from there on; the usage says how much was cached."""

import pytest

from .conftest import PACKED, question
from .harness import running


@pytest.fixture(scope="module")
def fresh(folder, tmp_path_factory):
    with running(folder, tmp_path_factory.mktemp("fresh") / "log", *PACKED) as server:
        yield server


def counts(answer):
    return answer.usage.prompt_tokens, answer.usage.prompt_tokens_details.cached_tokens


def test_a_conversation_continues_from_its_cache(fresh):
    text = question(12, 593_847)
    first = fresh.chat(text)
    length, cached = counts(first)
    assert cached == 0
    assert length > 200
    reply = first.choices[0].message.content
    assert reply == "593847"
    turn = ({"role": "user", "content": text}, {"role": "assistant", "content": reply})
    second = fresh.chat(*turn, {"role": "user", "content": "What is the access code?"})
    longer, cached = counts(second)
    assert cached == length + len(reply) + 1  # a digit is a token, and so is the end of the turn
    assert longer > cached
    assert second.choices[0].message.content == reply


def test_a_repeated_prompt(fresh):
    text = question(10, 274_650)
    answers = [fresh.chat(text) for _ in range(2)]
    assert {answer.choices[0].message.content for answer in answers} == {"274650"}
    (length, before), (_, after) = map(counts, answers)
    assert before < after == length - 1
    usage = list(fresh.chat(text, stream=True, stream_options={"include_usage": True}))[-1].usage
    assert usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens - 1
    metrics = fresh.metrics()
    assert 0 < metrics["mlx_tq_prompt_cache_entries"] <= 10
    assert metrics["mlx_tq_prompt_cache_bytes"] > 0
    assert metrics["mlx_tq_cached_tokens_total"] > 0


def test_a_generated_prompt_is_cached_except_for_its_last_token(fresh, loaded):
    """The cache holds exactly the prompt, but its last token must be prefilled."""
    _, tokenizer = loaded
    ids, (nine,) = tokenizer.encode("The river"), tokenizer.encode("9")
    nines = {"model": "needle32", "prompt": ids, "max_tokens": 6, "logit_bias": {str(nine): 100}}
    assert fresh.openai.completions.create(**nines).choices[0].text == "9" * 6
    prompt = ids + [nine] * 6
    again = fresh.openai.completions.create(model="needle32", prompt=prompt, max_tokens=2)
    assert counts(again) == (len(prompt), len(prompt) - 1)


def test_two_prompts_share_a_prefix(fresh):
    text = question(14, 118_822)
    fresh.chat(text)
    other = fresh.chat(text.replace("What is the access code?", "Which is the access code?"))
    length, cached = counts(other)
    assert length - 20 < cached < length
    assert other.choices[0].message.content == "118822"
