"""What a model that thinks says when it has thought."""

from typing import Any


def without_thoughts(tokenizer: Any, prompt: str, text: str) -> str | None:
    """The answer in a generated text; None where its thoughts, perhaps begun by the prompt, did not end."""
    if not tokenizer.has_thinking:
        return text
    if tokenizer.think_end in text:
        return text.rpartition(tokenizer.think_end)[2]
    begun = prompt.rstrip().endswith(tokenizer.think_start) or tokenizer.think_start in text
    return None if begun else text
