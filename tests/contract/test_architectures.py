"""Every served architecture: mlx-lm's logits where nothing is lost, attention on packed rows, its own other caches.

Decoding a cache to plain arrays is not it: nothing is materialized on the way.
"""

import mlx.core as mx
import pytest
from mlx_lm.models import cache as native
from zoo import ARCHITECTURES, LETTERS, build

from contract import spies
from mlx_tq.cache.latent import LatentKVCache
from mlx_tq.cache.layer import CompressedKVCache, cache_parts
from mlx_tq.config import PROFILES, KVConfig
from mlx_tq.prompt_cache.build import build_caches
from mlx_tq.prompt_cache.compressed import compressed_attention, make_prompt_cache, plan_caches
from mlx_tq.prompt_cache.layer_group import compressed_caches

# Served with nothing decoded: these names are a promise.
SERVED = [
    "llama", "llama3_rope", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5", "mistral",
    "ministral3", "mixtral", "gemma", "gemma3_text", "gemma4_text", "phi3", "phi", "gpt_oss", "deepseek_v2", "minicpm3",
    "glm4", "olmo2", "cohere2", "stablelm", "starcoder2", "granite", "exaone4", "smollm3", "gpt_neox", "internlm3",
    "ernie4_5", "seed_oss", "helium", "nemotron", "minicpm", "hunyuan_v1_dense", "lfm2", "falcon_h1",
    "granitemoehybrid", "jamba", "afm7", "deepseek_v3", "deepseek_v32", "longcat_flash",
]  # fmt: skip
# The others that are; muse_spark computes in bfloat16, whatever the dtype.
# Those whose attention, heads and caches are as those of another.
SIMILAR = {
    "qwen2", "qwen2_moe", "mistral", "ministral3", "gemma", "phi3", "glm4", "olmo2", "stablelm", "starcoder2",
    "granite", "exaone4", "smollm3", "gpt_neox", "internlm3", "ernie4_5", "seed_oss", "helium", "minicpm",
    "hunyuan_v1_dense",
}  # fmt: skip
OTHERS = [name for name, arch in ARCHITECTURES.items() if arch.servable and name not in [*SERVED, "muse_spark"]]
CLASSES = {letter: getattr(native, name, None) for name, letter in LETTERS.items()}
CLASSES |= {"k": native.KVCache}  # of a part that stays uncompressed
CHUNKS = [166, 40, 1, 5, 8, 1]  # the first one packs as soon as attention has told what keys are weighted by
TOKENS = [(7 * i * i + 3 * i) % 160 for i in range(sum(CHUNKS))]


def sized(key, value):
    return KVConfig(key=key, value=value, sinks=4, window=24)


def run(model, caches):
    return spies.run(model, caches, TOKENS, CHUNKS)


def difference(a, b):
    return (mx.abs(a - b).max() / b.std()).item()


def test_the_promise_covers_the_zoo():
    assert set(SERVED) <= {name for name, arch in ARCHITECTURES.items() if arch.servable}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.full] * (name in {*SIMILAR, *OTHERS})) for name in (*SERVED, *OTHERS)],
)
def test_a_served_architecture(name, monkeypatch):
    arch, model = ARCHITECTURES[name], build(name)
    plain = run(model, native.make_prompt_cache(model))
    check_off(model, plain)
    plan = plan_caches(model, sized("fp16", "fp16"))
    assert plan.model_type == arch.config["model_type"]
    assert len(plan.classes) == len(arch.caches)
    places = [(i, part if len(x) > 1 else None) for i, x in enumerate(arch.caches) for part in find_plain(x)]
    assert [(layer.slot.index, layer.slot.part) for layer in plan.layers] == places
    assert {layer.slot.latent for layer in plan.layers} == {arch.latent}
    assert {(layer.slot.key_dim, layer.slot.value_dim) for layer in plan.layers} == {arch.dims}
    assert {layer.slot.dtype for layer in plan.layers} == {"float32"}
    assert any(layer.slot.shared for layer in plan.layers) == (arch.name in ("afm7", "gemma3n"))
    calls = spies.watch(monkeypatch)
    with compressed_attention(model):
        caches, again = build_caches(plan), make_prompt_cache(model, plan.config)
        logits = run(model, caches)
    # fp16 rows hold the model's own bits, so only the order of float32 sums differs: 1e-3 of the logits' spread.
    assert difference(logits, plain) < 1e-3
    # The first chunk sees only itself; of the others one is a prefill and four are short, of which a block divides one.
    layers = arch.plain_layers + arch.shared
    if arch.latent:  # only steps of one token attend to latents, or select some of them
        assert calls == ({} if arch.uncompressed_part else {"attend": 2 * layers})
    else:
        assert calls == {"prefill": layers, "attend": 5 * layers}
    assert all(cache.packed_tokens > 90 for cache in compressed_caches(caches))
    found = [[type(part) for part in cache_parts([cache])] for cache in caches]
    classes = CLASSES | {"K": LatentKVCache if arch.latent else CompressedKVCache}
    assert found == [[classes[letter] for letter in letters.strip("()")] for letters in arch.caches]
    for cache, other in zip(caches, again, strict=True):
        assert cache is not other


def find_plain(letters):
    return [i for i, letter in enumerate(letters.strip("()")) if letter == "K"]


def check_off(model, plain):
    """Profile `off`: mlx-lm's own caches, bit for bit, also while the seam is bound."""
    with compressed_attention(model):
        caches = make_prompt_cache(model, PROFILES["off"])
        assert [type(cache) for cache in caches] == [type(cache) for cache in native.make_prompt_cache(model)]
        assert not compressed_caches(caches)
        assert mx.array_equal(run(model, caches), plain)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("llama", mx.float16),
        ("stablelm", mx.bfloat16),
        pytest.param("gemma3_text", mx.bfloat16, marks=pytest.mark.full),
    ],
)
def test_fp16_bodies_in_half_precision(name, dtype):
    """Both runs round differently; each is as far from float32 as the other."""
    model, exact = build(name, dtype), build(name)
    exact.update(model.parameters())
    exact.set_dtype(mx.float32)
    wanted = run(exact, native.make_prompt_cache(exact))
    plain = run(model, native.make_prompt_cache(model))
    check_off(model, plain)
    own = difference(plain, wanted)
    with compressed_attention(model):
        logits = run(model, make_prompt_cache(model, sized("fp16", "fp16")))
    assert difference(logits, wanted) < 2 * own


def test_codes_are_felt():
    """Else the tests above could pass with nothing packed."""
    model = build("llama")
    with compressed_attention(model):
        packed = run(model, make_prompt_cache(model, sized("tq2", "tq2")))
    assert difference(packed, run(model, native.make_prompt_cache(model))) > 0.1
