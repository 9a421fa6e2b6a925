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
from contract.spies import rounds_of
from contract.test_batch_generate import PACKS
from mlx_tq.cache.layer import CompressedKVCache
from mlx_tq.config import KVConfig
from mlx_tq.prompt_cache.compressed import compressed, compressed_attention, make_prompt_cache
from mlx_tq.prompt_cache.layer_group import layer_group_of

TOKENS = 32
CONFIGS = [KVConfig(key=k, value="tq4", sinks=16, window=32) for k in ("q8", "tq4")]


def generate(model, tokenizer, prompt, **options):
    return list(stream_generate(model, tokenizer, prompt, max_tokens=TOKENS // 2, **options))


def tokens(parts):
    return [part.token for part in parts]


@pytest.fixture(scope="module")
def guesser(exact):
    """A tiny random model with the vocabulary of the embedded one, and so with guesses that are mostly wrong."""
    module = import_module("mlx_lm.models.qwen3")
    mx.random.seed(0)
    config = {**ARCHITECTURES["qwen3"].config, "vocab_size": exact[0].args.vocab_size}
    model = module.Model(module.ModelArgs.from_dict(config))
    mx.eval(model.parameters())
    return model


@pytest.mark.parametrize("own", [True, False], ids=["its own draft", "a draft that is mostly wrong"])
@pytest.mark.parametrize(
    ("config", "guesses"),
    [(CONFIGS[0], 7), pytest.param(CONFIGS[1], 2, marks=pytest.mark.full)],
    ids=["q8-tq4 7", "tq4-tq4 2"],
)
def test_drafts_change_nothing(exact, prompts, guesser, config, guesses, own):
    model, tokenizer = exact
    with compressed(model, config):
        plain = generate(model, tokenizer, prompts[3])  # a block is packed while it generates
        assert len(prompts[3]) < PACKS < len(prompts[3]) + len(plain)
        assert type(mlx_lm_cache(model)[0]) is CompressedKVCache
        draft = model if own else guesser
        drafted = generate(model, tokenizer, prompts[3], draft_model=draft, num_draft_tokens=guesses)
    assert tokens(drafted) == tokens(plain)
    accepted = sum(part.from_draft for part in drafted) / len(drafted)
    assert accepted > 1 / 3 if own else accepted < 1 / 2


@pytest.mark.parametrize(
    ("guesses", "seed"),
    [(1, 1), pytest.param(4, 1, marks=pytest.mark.full), (4, 0)],
    ids=["1 wrong", "4 wrong", "4 right"],
)
def test_drafts_on_caches_that_evict(guesses, seed):
    """Each token is that of full attention in which what had left by then is invisible; what left stays away."""
    model, draft = build("llama"), build("llama", seed=seed)
    prompt, config = test_eviction.TOKENS[:150], test_eviction.config()
    with rounds_of(model) as rounds, compressed_attention(model), compressed_attention(draft):
        caches, guessing = make_prompt_cache(model, config), make_prompt_cache(draft, config)
        options = {"num_draft_tokens": guesses, "max_tokens": TOKENS, "prefill_step_size": 64}
        both = [*caches, *guessing]
        found = list(speculative_generate_step(mx.array(prompt), model, draft, prompt_cache=both, **options))
    said = [token for token, _, _ in found]
    assert layer_group_of(guessing).stats.rounds > 2
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
