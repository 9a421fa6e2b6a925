"""The embedded model, loaded once, in float32: greedy choices then do not hang on rounding."""

import mlx.core as mx
import pytest

import mlx_tq


@pytest.fixture(scope="session")
def needle():
    """The model and its tokenizer."""
    model, tokenizer = mlx_tq.load()
    model.set_dtype(mx.float32)
    mx.eval(model.parameters())
    return model, tokenizer


@pytest.fixture(scope="session")
def prompts(needle):
    """Prompts of different lengths, the longer ones with a fact that the answer needs."""
    _, tokenizer = needle
    lines = [f"Item {n} weighs {n * 37 % 91} grams and costs {n * 13 % 29} coins." for n in range(24)]
    made = []
    for count, place in ((1, 0), (9, 3), (20, 11), (5, 4)):
        text = "\n".join([*lines[:place], f"The secret code word is velvet{count}.", *lines[place:count]])
        messages = [{"role": "user", "content": f"{text}\nWhat is the secret code word?"}]
        made.append(tokenizer.apply_chat_template(messages, add_generation_prompt=True))
    return made
