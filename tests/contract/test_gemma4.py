"""All that a cache does, with Gemma 4: its layers share caches, slide, and have heads of two sizes."""

import copy
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from cache.tools import same_bits
from mlx_lm import batch_generate
from mlx_lm.generate import generate_step
from mlx_lm.models import cache as native
from prefix_cache.runs import random_tokens, run_prompt
from zoo import build

from mlx_tq.config import EvictConfig, KVConfig
from mlx_tq.prompt_cache.build import build_caches
from mlx_tq.prompt_cache.cache_file import load_prompt_cache, save_prompt_cache
from mlx_tq.prompt_cache.compressed import compressed, compressed_attention, make_prompt_cache, plan_caches
from mlx_tq.prompt_cache.layer_group import compressed_caches
from mlx_tq.session.restore import prefill, recall_rows, release

PROMPT, QUESTION = random_tokens(500), random_tokens(12, seed=4)
FORMATS = [("tq4", "tcq3"), *(pytest.param(name, name, marks=pytest.mark.full) for name in ("q8", "fp16"))]


def config_of(key, value, **changes):
    return KVConfig(key=key, value=value, sinks=8, window=32, **changes)


def greedy(model, ids, caches, count=6):
    return [token for token, _ in generate_step(mx.array(ids), model, max_tokens=count, prompt_cache=caches)]


def logits_of(model, caches, ids):
    with compressed_attention(model):
        return np.array(model(mx.array([ids]), cache=caches).astype(mx.float32))


def rows_of(cache, positions):
    """Return the keys and values of a cache at positions, as attention reads them."""
    index = np.searchsorted(np.asarray(cache.positions), positions)
    return [np.array(rows.materialize().astype(mx.float32))[:, :, index] for rows in cache.keys_and_values()]


@pytest.fixture(scope="module", params=["gemma4_text", pytest.param("gemma4", marks=pytest.mark.full)])
def model(request):
    return build(request.param)


@pytest.mark.full
@pytest.mark.parametrize(("key", "value"), FORMATS)
def test_formats_batches_and_the_prefix_cache(model, key, value, tmp_path):
    config = config_of(key, value)
    rows = [PROMPT[:300], PROMPT[7:40], PROMPT[100:310]]
    with compressed(model, config):
        alone = [greedy(model, ids, make_prompt_cache(model, config)) for ids in rows]
        tokenizer = SimpleNamespace(eos_token_ids=[], decode=str)
        together = batch_generate(model, tokenizer, rows, max_tokens=6, return_token_ids=True)
    assert together.token_ids == alone
    if key == "fp16":
        assert alone == [greedy(model, ids, native.make_prompt_cache(model)) for ids in rows]
    first, again = (run_prompt(model, config, PROMPT, tmp_path) for _ in range(2))
    assert (first["restored"], again["restored"] > 400) == (0, True)
    assert [first[name] for name in ("answer", "before", "after")] == [
        again[name] for name in ("answer", "before", "after")
    ]


@pytest.mark.parametrize(("key", "value"), FORMATS[:2])
def test_eviction_recall_and_files(model, key, value, tmp_path):
    """Evicted rows are archived; recalled ones are those of a cache that evicts nothing, also after a file."""
    config = config_of(key, value, evict=EvictConfig("recency", budget=160))
    plan, full = plan_caches(model, config), make_prompt_cache(model, config_of(key, value))
    caches = build_caches(plan)
    for each in (caches, full):
        with compressed_attention(model):
            prefill(model, each, PROMPT, 128)
    layers = compressed_caches(caches)
    held = [len(layer.positions) for layer in layers]
    assert len(held) == 2, "of six layers, two slide, and two attend to earlier ones"
    assert max(held) <= 160 + 128
    save_prompt_cache(tmp_path / "cache.safetensors", caches, config=config, model=model)
    loaded = load_prompt_cache(tmp_path / "cache.safetensors", model=model).caches
    assert all(same_bits(a.state, b.state) for a, b in zip(caches, loaded, strict=True))
    for each in (caches, loaded):
        result = recall_rows(model, each, QUESTION, 128)
        assert result.positions
    said = [logits_of(model, copy.deepcopy(each), QUESTION) for each in (caches, loaded)]
    assert (said[0] == said[1]).all()
    early = np.asarray(layers[0].positions)
    early = early[early < 256]  # before the first eviction, after which later layers compute with fewer tokens
    assert len(early) > 100
    for mine, other in zip(layers, compressed_caches(full), strict=True):
        for got, want in zip(rows_of(mine, early), rows_of(other, early), strict=True):
            assert (got == want).all()
    release(caches)
    assert [len(layer.positions) for layer in layers] == held
