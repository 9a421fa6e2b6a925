"""Every eligible layer of the served architectures attends to packed rows; decoding them to plain arrays is not it."""

import mlx.core as mx
import pytest
from cache.tools import check_attention
from zoo import ARCHITECTURES, build

from contract.spies import watch
from mlx_tq.config import KVConfig
from mlx_tq.dispatch import attention, make_prompt_cache

CONFIG = KVConfig(key="q8", value="tq4", prefix=4, window=24)
# Served with nothing decoded: these names are a promise.
PACKED = [
    "llama", "llama3_rope", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5", "mistral",
    "ministral3", "mixtral", "gemma", "gemma3_text", "gemma4_text", "phi3", "phi", "gpt_oss", "deepseek_v2", "minicpm3",
    "glm4", "olmo2", "cohere2", "stablelm", "starcoder2", "granite", "exaone4", "smollm3", "gpt_neox", "internlm3",
    "ernie4_5", "seed_oss", "helium", "nemotron", "minicpm", "hunyuan_v1_dense", "lfm2", "falcon_h1",
    "granitemoehybrid", "jamba", "afm7",
]  # fmt: skip
CHUNKS = [100, 40, 1, 1, 3]
TOKENS = [(7 * i * i + 3 * i) % 160 for i in range(sum(CHUNKS))]


def run(model, caches):
    start, logits = 0, []
    for chunk in CHUNKS:
        logits.append(model(mx.array([TOKENS[start : start + chunk]]), cache=caches))
        mx.eval(logits)
        start += chunk
    return mx.concatenate(logits, axis=1)


def test_the_promise_covers_the_zoo():
    assert sorted(PACKED) == sorted(name for name, arch in ARCHITECTURES.items() if arch.servable)
    assert len(PACKED) >= 24


@pytest.mark.parametrize("name", PACKED)
def test_every_eligible_layer_attends_to_packed_rows(name, monkeypatch):
    arch, model = ARCHITECTURES[name], build(name)
    with attention(model):
        caches = make_prompt_cache(model, CONFIG)
        seen = watch(monkeypatch)
        assert mx.isfinite(run(model, caches)).all()
    layers = arch.plain_layers + arch.shared
    # The first chunk sees only itself; of the others, one is a prefill and three are steps.
    assert (seen.many, seen.few) == (layers, 3 * layers)
    assert seen.materialized == 0


@pytest.mark.parametrize("name", PACKED)
def test_every_call_equals_attention_over_the_decoded_cache(name, monkeypatch):
    """With the model's own queries, scales, masks and sinks, each output is within twice mlx's own error."""
    arch, model = ARCHITECTURES[name], build(name)
    with attention(model):
        caches = make_prompt_cache(model, CONFIG)
        seen = watch(monkeypatch)
        run(model, caches)
    calls = [call for call in seen.calls if call[0].body]
    assert len(calls) == 4 * (arch.plain_layers + arch.shared)
    for view, queries, scale, mask, sinks, out in calls:
        check_attention(view, queries, out, scale, mask, sinks)
    assert (calls[0][4] is not None) == arch.sinks


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma3_text", "cohere2", "phi", "stablelm"])
def test_half_precision_within_twice_the_error_of_mlx(name, dtype, monkeypatch):
    model = build(name, dtype)
    with attention(model):
        caches = make_prompt_cache(model, CONFIG)
        seen = watch(monkeypatch)
        run(model, caches)
    for view, queries, scale, mask, sinks, out in seen.calls:
        check_attention(view, queries, out, scale, mask, sinks)
