"""Greedy answers with the CPU kernels are those of the reference implementation."""

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from smollm2 import needs_smollm2

import mlx_tq
from mlx_tq.cli.inputs import load_text
from mlx_tq.kernels import backend

LENGTHS = (40, 150, 300, 450, 700)


def prompts(tokenizer, count):
    """Return parts of a text, each before a question."""
    ids = tokenizer.encode(load_text())
    question = tokenizer.encode("\n\nQuestion: What is this about?\nAnswer:", add_special_tokens=False)
    for number in range(count):
        start, length = 97 * number, LENGTHS[number % len(LENGTHS)]
        yield mx.array([*ids[start : start + length], *question])


def answer(model, prompt, profile, name):
    with backend.using(name), mlx_tq.compressed(model, profile=profile):
        cache = mlx_tq.make_prompt_cache(model, profile=profile)
        return [token for token, _ in generate_step(prompt, model, max_tokens=16, prompt_cache=cache)]


LONG = [
    pytest.param(source, profile, 20, marks=[pytest.mark.full, *marks])
    for source, marks in ((None, ()), ("smollm2", (needs_smollm2,)))
    for profile in ("balanced", "tiny")
]


@pytest.mark.parametrize(("source", "profile", "count"), [(None, "balanced", 2), *LONG])
def test_greedy_answers(source, profile, count):
    model, tokenizer = mlx_tq.load(source, dtype="float32", dequantize=True)
    for prompt in prompts(tokenizer, count):
        assert answer(model, prompt, profile, "cpu") == answer(model, prompt, profile, "reference")
