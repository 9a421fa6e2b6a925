"""Profile `off`: mlx-lm's own caches, token for token and bit for bit, also while the seam is bound."""

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models import cache as native
from zoo import ARCHITECTURES, build

from mlx_tq.config import PROFILES
from mlx_tq.dispatch import attention, make_prompt_cache

SERVABLE = [name for name, arch in ARCHITECTURES.items() if arch.servable]
# In every run; the others in the full one.
NAMED = [
    "llama", "llama3_rope", "qwen2", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5", "mistral", "gemma3_text",
    "gemma4_text", "phi3", "gpt_oss", "deepseek_v2", "glm4", "olmo2", "cohere2", "stablelm", "afm7", "falcon_h1",
]  # fmt: skip
PROMPT = [(7 * i * i + 3 * i) % 160 for i in range(40)]
TOKENS = 256


def greedy(model, cache, prompt=PROMPT):
    """The tokens that mlx-lm generates, and the raw logits of each."""
    logits = []

    def note(_, raw):
        logits.append(raw)
        return raw

    steps = generate_step(
        mx.array(prompt), model, max_tokens=TOKENS, prompt_cache=cache, prefill_step_size=16, logits_processors=[note]
    )
    tokens = [token for token, _ in steps]
    return tokens, mx.concatenate(logits[:TOKENS])


def check(name):
    model = build(name)
    tokens, logits = greedy(model, native.make_prompt_cache(model))
    assert len(tokens) == TOKENS
    with attention(model):
        cache = make_prompt_cache(model, PROFILES["off"])
        assert [type(c) for c in cache] == [type(c) for c in native.make_prompt_cache(model)]
        assert all(type(c).__module__ == native.__name__ and "Compressed" not in type(c).__name__ for c in cache)
        off_tokens, off_logits = greedy(model, cache)
    assert off_tokens == tokens
    assert mx.array_equal(off_logits, logits)


@pytest.mark.parametrize("name", NAMED)
def test_off_is_mlx_lm(name):
    check(name)


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in SERVABLE if name not in NAMED])
def test_off_is_mlx_lm_on_every_other(name):
    check(name)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "phi"])
def test_off_in_half_precision(name, dtype):
    model, tokens = build(name, dtype), mx.array([PROMPT])
    plain = model(tokens, cache=native.make_prompt_cache(model))
    with attention(model):
        assert mx.array_equal(model(tokens, cache=make_prompt_cache(model, PROFILES["off"])), plain)
