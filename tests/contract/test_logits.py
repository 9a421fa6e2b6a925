"""Logits on compressed caches: those of mlx-lm where nothing is lost, and those of the decoded cache elsewhere."""

import mlx.core as mx
import pytest
from mlx_lm.models import cache as native
from zoo import ARCHITECTURES, build

from contract.spies import DecodedCache
from mlx_tq.cache.factory import build_caches
from mlx_tq.config import KVConfig
from mlx_tq.dispatch import attention, plan_caches

SERVABLE = [name for name, arch in ARCHITECTURES.items() if arch.servable]
NAMED = ["llama", "qwen2", "qwen3_next", "gemma3_text", "gemma4_text", "gpt_oss", "deepseek_v2", "falcon_h1", "afm7"]
CHUNKS = [70, 33, 40, 1, 1, 5, 1, 8, 1]
TOKENS = [(7 * i * i + 3 * i) % 160 for i in range(sum(CHUNKS))]
SIZES = {"prefix": 4, "window": 24}


def run(model, caches, chunks=CHUNKS):
    start, logits = 0, []
    for chunk in chunks:
        logits.append(model(mx.array([TOKENS[start : start + chunk]]), cache=caches))
        mx.eval(logits)
        start += chunk
    return mx.concatenate(logits, axis=1).astype(mx.float32)


def compressed(model, key, value):
    return build_caches(plan_caches(model, KVConfig(key=key, value=value, **SIZES)))


def as_decoded(caches):
    """The same storage, attended to as plain arrays."""

    def swap(cache):
        return DecodedCache(cache.spec) if hasattr(cache, "spec") else cache

    return [
        native.CacheList(*map(swap, cache.caches)) if isinstance(cache, native.CacheList) else swap(cache)
        for cache in caches
    ]


def difference(a, b):
    return (mx.abs(a - b).max() / b.std()).item()


@pytest.mark.parametrize("name", SERVABLE)
def test_fp16_bodies_lose_nothing(name):
    """fp16 rows hold the model's own bits, so only the order of float32 sums differs: 1e-3 of the logits' spread."""
    model = build(name)
    plain = run(model, native.make_prompt_cache(model))
    with attention(model):
        caches = compressed(model, "fp16", "fp16")
        logits = run(model, caches)
    assert difference(logits, plain) < 1e-3
    slots = [part for cache in caches for part in getattr(cache, "caches", [cache])]
    assert all(cache.body_tokens > 90 for cache in slots if hasattr(cache, "spec"))


@pytest.mark.parametrize("name", ["llama", "qwen2", "phi3", "gemma3_text", "olmo2"])
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=["float16", "bfloat16"])
def test_fp16_bodies_in_half_precision(name, dtype):
    """Both runs round differently; each is as far from float32 as the other."""
    exact = build(name)
    exact.update(build(name, dtype).parameters())
    exact.set_dtype(mx.float32)
    wanted = run(exact, native.make_prompt_cache(exact))
    model = build(name, dtype)
    own = difference(run(model, native.make_prompt_cache(model)), wanted)
    with attention(model):
        assert difference(run(model, compressed(model, "fp16", "fp16")), wanted) < 2 * own


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize(("key", "value"), [("q8", "tq4"), ("tq2", "tq2")])
def test_logits_are_those_of_the_decoded_cache(name, key, value):
    """Float32 differences of 1e-6 may move a value across a code's boundary; a few such codes move a logit by less."""
    model = build(name)
    steps = [70, 33, 40, *[1] * 17]  # no steps of a few tokens: such a step is several states of the cache
    with attention(model):
        logits = run(model, compressed(model, key, value), steps)
        reference = run(model, as_decoded(compressed(model, key, value)), steps)
    assert difference(logits, reference) < 2e-3
    plain = run(model, native.make_prompt_cache(model), steps)
    if key == "tq2":  # the codes are felt, or nothing was tested
        assert difference(plain, reference) > 0.1
