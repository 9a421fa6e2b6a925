"""Speculative decoding on compressed caches is plain greedy decoding, whatever the draft model guesses."""

from importlib import import_module

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm import stream_generate
from mlx_lm.generate import speculative_generate_step
from mlx_lm.models.cache import KVCache
from mlx_lm.models.cache import make_prompt_cache as mlx_lm_cache
from zoo import ARCHITECTURES, build

from contract import test_eviction
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


@pytest.mark.parametrize(("guesses", "seed"), [(1, 1), (4, 1), (4, 0)], ids=["1 wrong", "4 wrong", "4 right"])
def test_drafts_on_caches_that_evict(guesses, seed):
    """Each token is that of full attention in which what had left by then is invisible; what left stays away."""
    model, draft = build("llama"), build("llama", seed=seed)
    prompt, config = test_eviction.TOKENS[:150], test_eviction.config()
    rounds = []
    with attention(model), attention(draft):
        caches, guessing = make_prompt_cache(model, config), make_prompt_cache(draft, config)
        caches[0].subscribe(lambda positions: rounds.append((caches[0].offset, positions)))
        steps = speculative_generate_step(
            mx.array(prompt),
            model,
            draft,
            num_draft_tokens=guesses,
            max_tokens=TOKENS,
            prompt_cache=[*caches, *guessing],
            prefill_step_size=64,
        )
        found = list(steps)
    said = [token for token, _, _ in found]
    assert guessing[0].eviction.rounds > 2
    assert len({at for at, _ in rounds if at > len(prompt)}) > 2  # while it generates
    assert (sum(drafted for _, _, drafted in found) > TOKENS / 2) == (seed == 0)
    ids = [*prompt, *said[:-1]]
    visible = np.tri(len(ids), dtype=bool)
    causal = _greedy(model, ids, visible)[len(prompt) - 1 :]
    for at, positions in rounds:
        visible[at:, positions] = False
    masked = _greedy(model, ids, visible)[len(prompt) - 1 :]
    assert masked == said
    assert causal != said  # eviction is felt, or nothing was tested


def _greedy(model, ids, visible):
    """The next token after each of `ids`, each of which sees those that its row says."""
    kind = type("MaskedCache", (KVCache,), {"make_mask": lambda self, *_, **__: mx.array(visible)})
    return model(mx.array([ids]), cache=[kind() for _ in model.layers])[0].argmax(axis=-1).tolist()
