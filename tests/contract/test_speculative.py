"""Speculative decoding on compressed caches is plain greedy decoding, whatever the draft model guesses."""

from importlib import import_module

import mlx.core as mx
import pytest
from mlx_lm import stream_generate
from mlx_lm.models.cache import make_prompt_cache as mlx_lm_cache
from zoo import ARCHITECTURES

from mlx_tq.cache import CompressedKVCache
from mlx_tq.config import KVConfig
from mlx_tq.dispatch import attention, make_prompt_cache

TOKENS = 48
CONFIGS = [KVConfig(key=k, value=v, prefix=16, window=32) for k, v in (("q8", "tq4"), ("tq4", "tq4"), ("fp16", "fp16"))]
stored = pytest.mark.parametrize("config", CONFIGS[:2], ids=["q8-tq4", "tq4-tq4"])


def generate(model, tokenizer, prompt, **options):
    return list(stream_generate(model, tokenizer, prompt, max_tokens=TOKENS, **options))


def tokens(parts):
    return [part.token for part in parts]


@pytest.fixture(scope="module")
def guesser(needle):
    """A tiny random model with the vocabulary of the embedded one, and so with guesses that are mostly wrong."""
    module = import_module("mlx_lm.models.qwen3")
    mx.random.seed(0)
    config = {**ARCHITECTURES["qwen3"].config, "vocab_size": needle[0].args.vocab_size}
    model = module.Model(module.ModelArgs.from_dict(config))
    mx.eval(model.parameters())
    return model


@stored
@pytest.mark.parametrize("guesses", [1, 2, 7])
def test_the_model_as_its_own_draft(needle, prompts, config, guesses):
    model, tokenizer = needle
    with attention(model, config):
        plain = generate(model, tokenizer, prompts[1])
        assert type(mlx_lm_cache(model)[0]) is CompressedKVCache
        drafted = generate(model, tokenizer, prompts[1], draft_model=model, num_draft_tokens=guesses)
    assert tokens(drafted) == tokens(plain)
    assert sum(part.from_draft for part in drafted) > len(drafted) / 3


@stored
@pytest.mark.parametrize("guesses", [1, 3, 7])
def test_a_draft_that_is_mostly_wrong(needle, prompts, guesser, config, guesses):
    model, tokenizer = needle
    with attention(model, config):
        plain = generate(model, tokenizer, prompts[1])
        drafted = generate(model, tokenizer, prompts[1], draft_model=guesser, num_draft_tokens=guesses)
    assert tokens(drafted) == tokens(plain)
    assert sum(part.from_draft for part in drafted) < len(drafted) / 2


@stored
def test_both_models_on_compressed_caches_of_ones_own(needle, prompts, guesser, config):
    """The caches passed as mlx-lm wants them: the model's, then the draft's; every guess is trimmed again."""
    model, tokenizer = needle
    with attention(model):
        own = make_prompt_cache(model, config)
        plain = generate(model, tokenizer, prompts[2], prompt_cache=own)
        caches, guessing = make_prompt_cache(model, config), make_prompt_cache(guesser, config)
        both = [*caches, *guessing]
        drafted = generate(model, tokenizer, prompts[2], draft_model=guesser, prompt_cache=both, num_draft_tokens=3)
    assert tokens(drafted) == tokens(plain)
    for one, other in zip(own, caches, strict=True):
        assert other.body_tokens > 0
        assert abs(one.offset - other.offset) <= 1  # plain decoding runs one token ahead
