"""The plan of a model's caches: which layers differ from the configuration and why, and the bytes that it forecasts."""

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache, CacheList, RotatingKVCache
from zoo import ARCHITECTURES, build

from mlx_tq.cache import CompressedKVCache
from mlx_tq.cache.factory import build_caches
from mlx_tq.config import KVConfig
from mlx_tq.dispatch import attention, make_prompt_cache, plan_caches
from mlx_tq.errors import ConfigError

SMALL = KVConfig(key="tq4", value="tq4", prefix=4, window=24)
SERVABLE = [name for name, arch in ARCHITECTURES.items() if arch.servable]
CLASSES = {"K": CompressedKVCache, "R": RotatingKVCache, "A": ArraysCache, "L": CacheList}


def formats(plan):
    return [(layer.spec.key, layer.spec.value) for layer in plan.layers]


def loud(model, layer, factor=10.0):
    """Keys of one layer that are `factor` times as long."""
    attn = model.layers[layer].self_attn
    attn.k_proj.weight = attn.k_proj.weight * factor
    return model


def test_an_outlier_layer_keeps_its_keys_at_q8():
    model = loud(build("smollm3"), 2)
    plan = plan_caches(model, SMALL)
    assert formats(plan) == [("tq4", "tq4"), ("tq4", "tq4"), ("q8", "tq4"), ("tq4", "tq4")]
    norms = [layer.slot.key_norm for layer in plan.layers]
    assert norms[2] > 5 * norms[1]
    assert [bool(layer.note) for layer in plan.layers] == [False, False, True, False]
    assert plan.layers[2].note.startswith(f"key norm {norms[2]:.1f} is ")
    assert plan.layers[2].note.endswith("x the median")
    assert [cache.spec for cache in build_caches(plan)] == [layer.spec for layer in plan.layers]


def test_q_norm_and_k_norm_count():
    model = build("qwen3")
    model.layers[1].self_attn.k_norm.weight = model.layers[1].self_attn.k_norm.weight * 100
    assert formats(plan_caches(model, KVConfig(key="tq3", value="tq2", outlier=1.5)))[1] == ("q8", "tq2")


@pytest.mark.parametrize(("outlier", "key"), [(0, "tq4"), (1e6, "tq4"), (3.0, "q8")])
def test_the_outlier_limit_is_the_users(outlier, key):
    plan = plan_caches(loud(build("smollm3"), 2), KVConfig(key="tq4", value="tq4", outlier=outlier))
    assert plan.layers[2].spec.key == key


def test_nothing_is_promoted_to_fewer_bits():
    plan = plan_caches(loud(build("smollm3"), 2), KVConfig(key="fp16", value="tq2", boundary=1))
    assert formats(plan) == [("fp16", "q8"), ("fp16", "tq2"), ("fp16", "tq2"), ("fp16", "q8")]
    assert [layer.note for layer in plan.layers] == ["boundary layer", "", "", "boundary layer"]
    assert all(not layer.note for layer in plan_caches(build("smollm3"), KVConfig("q8", "q8", boundary=2)).layers)


@pytest.mark.parametrize(("boundary", "promoted"), [(0, []), (1, [0, 3]), (2, [0, 1, 2, 3]), (9, [0, 1, 2, 3])])
def test_boundary_layers(boundary, promoted):
    plan = plan_caches(build("smollm3"), KVConfig(key="tq4", value="tq3", boundary=boundary))
    wanted = [("q8", "q8") if number in promoted else ("tq4", "tq3") for number in range(4)]
    assert formats(plan) == wanted
    assert [layer.note for layer in plan.layers] == ["boundary layer" if n in promoted else "" for n in range(4)]


def test_boundaries_are_counted_over_plain_layers():
    plan = plan_caches(build("gemma3_text"), KVConfig(key="tq4", value="tq4", boundary=1))
    assert [layer.slot.index for layer in plan.layers] == [1, 3]
    assert formats(plan) == [("q8", "q8")] * 2


@pytest.mark.parametrize("name", SERVABLE)
def test_other_caches_stay_the_models_own(name):
    arch = ARCHITECTURES[name]
    model = build(name)
    caches = make_prompt_cache(model, SMALL)
    assert [type(cache) for cache in caches] == [CLASSES[letter] for letter in arch.layers]
    for cache in caches:
        if isinstance(cache, CacheList):
            assert [type(part) for part in cache.caches] == [ArraysCache, CompressedKVCache]
    again = make_prompt_cache(model, SMALL)
    assert all(one is not other for one, other in zip(caches, again, strict=True))


@pytest.mark.parametrize("name", SERVABLE)
def test_facts_are_those_of_the_zoo(name):
    arch, plan = ARCHITECTURES[name], plan_caches(build(name), SMALL)
    assert plan.model_type == arch.config["model_type"]
    assert len(plan.classes) == len(arch.layers)
    assert [layer.slot.index for layer in plan.layers] == [i for i, x in enumerate(arch.layers) if x in "KL"]
    assert {(layer.slot.key_dim, layer.slot.value_dim) for layer in plan.layers} == {arch.dims}
    assert {layer.slot.part for layer in plan.layers} == ({1} if "L" in arch.layers else {None})
    assert {layer.slot.dtype for layer in plan.layers} == {"float32"}
    assert any(layer.slot.shared for layer in plan.layers) == (name == "afm7")


def test_seeds_differ_by_layer_and_by_kind():
    specs = [layer.spec for layer in plan_caches(build("gemma3_text"), SMALL).layers]
    seeds = [options.seed for spec in specs for options in (spec.key_options, spec.value_options)]
    assert seeds == [1042, 1043, 3042, 3043]


@pytest.mark.parametrize("name", ["qwen3", "gemma3_text", "qwen3_next", "falcon_h1", "deepseek_v2", "afm7"])
@pytest.mark.parametrize("tokens", [1, 60, 100, 400])
@pytest.mark.parametrize("config", [SMALL, KVConfig(key="q8", value="tq2", prefix=0, window=8)], ids=["small", "tiny"])
def test_forecast_is_what_the_caches_take(name, tokens, config):
    model = build(name)
    with attention(model):
        plan = plan_caches(model, config)
        caches = build_caches(plan)
        mx.eval(model(mx.array([[i % 160 for i in range(tokens)]]), cache=caches))
    ours = [part for cache in caches for part in getattr(cache, "caches", [cache])]
    assert plan.nbytes(tokens) == sum(cache.nbytes for cache in ours if isinstance(cache, CompressedKVCache))
    assert plan.nbytes(tokens) == sum(layer.nbytes(tokens) for layer in plan.layers)


def test_forecast_of_a_batch_and_of_the_models_own_caches():
    model = build("deepseek_v2")
    with attention(model):
        plan = plan_caches(model, SMALL)
        rows = [build_caches(plan) for _ in range(3)]
        batch = [layer[0].merge(list(layer)) for layer in zip(*rows, strict=True)]
        mx.eval(model(mx.zeros((3, 200), mx.int32), cache=batch))
    assert plan.nbytes(200, batch=3) == sum(cache.nbytes for cache in batch)
    assert plan.native_nbytes(200, batch=3) == 2 * 3 * 4 * 200 * (192 + 128) * 4


def test_a_head_size_that_a_format_cannot_take_is_refused_with_the_layer():
    model = build("llama")
    with pytest.raises(ConfigError, match="format 'tq5' is unknown"):
        KVConfig(key="tq5")
    for layer in model.layers:  # 2 KV heads of 64 read as 4 heads of 40
        attn = layer.self_attn
        attn.n_heads = attn.n_kv_heads = 2
        for proj in (attn.q_proj, attn.k_proj, attn.v_proj):
            proj.weight = mx.random.normal((80, 128))
        attn.o_proj.weight = mx.random.normal((128, 80))
        attn.rope.dims = 40
    with pytest.raises(ConfigError, match="layer 0 of llama: head_dim 40 cannot be stored as tq4; valid are multiples"):
        plan_caches(model, SMALL)
