"""Conversations with SmolLM2 that repeat much of their own text, some of it, or none."""

from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_tq.cli.inputs import load_text
from mlx_tq.speculative import ngram_index

_CODE = Path(ngram_index.__file__).read_text(encoding="utf-8").partition("    def longest_match")[0]
_CALLS = """\
You are an agent. Answer each request with one line of JSON, such as {"name": "read_file", "arguments": {"path": "a"}}.
"""
_FILES = "\n".join(f'{{"path": "src/module_{n}/handler_{n}.py", "lines": {n * 37 % 91 + 20}}}' for n in range(6))


def tasks(tokenizer: Any) -> dict[str, list[int]]:
    """Return the tokens of a prompt by the name of its task."""
    text = load_text()
    edit = f"```python\n{_CODE}```\n\nWrite the whole file again, with `NgramIndex` renamed to `GramIndex`. Only code."
    listing = f"List the files.\nResult of list_files:\n{_FILES}\nRead each of the files, one call per line."
    messages = {
        "edit": [("user", edit)],
        "chat": [
            ("user", f"What do you know about this?\n{text[4000:4900]}"),
            ("assistant", "It is about the topic of the text."),
            ("user", "Tell me what a beginner should know about such topics in general."),
        ],
        "summary": [("user", f"Summarize this text in your own words:\n\n{text[:1800]}")],
        "code": [("user", f"```python\n{_CODE}```\n\nWrite a Python function that counts the vowels of a text.")],
        "tool loop": [("system", _CALLS), ("user", listing)],
    }
    prompts = {
        name: tokenizer.apply_chat_template(
            [{"role": role, "content": content} for role, content in turns], add_generation_prompt=True
        )
        for name, turns in messages.items()
    }
    random: Any = mx.random.randint(0, tokenizer.vocab_size, (400,), key=mx.random.key(0)).tolist()
    return {**prompts, "random": random}
