"""Prompts for the embedded model."""

import pytest


@pytest.fixture(scope="session")
def prompts(exact):
    """Prompts of different lengths, the longer ones with a fact that the answer needs."""
    _, tokenizer = exact
    lines = [f"Item {n} weighs {n * 37 % 91} grams and costs {n * 13 % 29} coins." for n in range(24)]
    made = []
    for count, place in ((1, 0), (9, 3), (10, 8), (7, 4)):
        text = "\n".join([*lines[:place], f"The secret code word is velvet{count}.", *lines[place:count]])
        messages = [{"role": "user", "content": f"{text}\nWhat is the secret code word?"}]
        made.append(tokenizer.apply_chat_template(messages, add_generation_prompt=True))
    return made
