"""The probe refuses unsupported models by name and runs once per model."""

import gc
import json
import weakref

import mlx.core as mx
import pytest
from cli.tools import zoo_model
from mlx_lm.models import cache as native
from mlx_lm.models import llama, llama4
from mlx_lm.models.llama import Model as Llama
from zoo import ARCHITECTURES, build

from mlx_tq import compressed, compressed_attention, load_prompt_cache, make_prompt_cache, save_prompt_cache
from mlx_tq.config import PROFILES, EvictConfig, KVConfig
from mlx_tq.errors import ConfigError, UnsupportedModelError
from mlx_tq.integration.probe import check_token_ids, model_facts, position_limit
from mlx_tq.models import load
from mlx_tq.prompt_cache.compressed import plan_caches

COMPUTES = (
    r"^{} cannot run on a compressed cache: it computes with the keys and values that it fetched, instead of "
    r"handing them to mlx-lm's scaled_dot_product_attention \(.+\)\. Use --kv-profile off\.$"
)
NOTHING = r"^{} keeps no plain KV cache \(its caches are ArraysCache\), so there is nothing to compress\. Use --kv-pro"
REASONS = dict.fromkeys(("gemma2", "plamo", "plamo2"), COMPUTES)
REASONS |= dict.fromkeys(("mamba2", "rwkv7"), NOTHING)


@pytest.mark.parametrize("name", REASONS)
def test_an_unsupported_model_is_refused_and_stays_usable(name):
    model = build(name)
    for refuse in (plan_caches, make_prompt_cache):
        with pytest.raises(UnsupportedModelError, match=REASONS[name].format(name)):
            refuse(model, KVConfig())
    with pytest.raises(UnsupportedModelError, match=REASONS[name].format(name)), compressed(model, KVConfig()):
        raise AssertionError
    tokens = mx.array([[3, 1, 4, 1, 5]])
    plain = model(tokens, cache=native.make_prompt_cache(model))
    with compressed(model, PROFILES["off"]):
        assert mx.array_equal(model(tokens, cache=make_prompt_cache(model, PROFILES["off"])), plain)


def test_a_model_that_fails_on_its_own_caches_raises_its_own_error():
    model = build("llama")
    model.layers[0].self_attn.o_proj.weight = mx.zeros((3, 3))
    with pytest.raises(ValueError, match="matmul"):
        plan_caches(model, KVConfig())


def test_a_layer_that_stores_keys_but_does_not_attend_to_them_is_refused():
    model = build("llama")

    def ignores_keys(x, mask=None, cache=None):
        cache.update_and_fetch(*(mx.zeros((1, 2, x.shape[1], 64)) for _ in range(2)))
        return x

    model.layers[1].self_attn = ignores_keys
    with pytest.raises(UnsupportedModelError, match=r"llama .*layers \[1\] fetch keys and values, but attention never"):
        plan_caches(model, KVConfig())


class OwnAttention(llama.Attention):
    """Attends by itself to several tokens, as a model of MLA does, and by mlx-lm's function to one."""

    def __call__(self, x, mask=None, cache=None):
        attend = llama.scaled_dot_product_attention
        if x.shape[1] > 1:
            attend = attend_with_mlx
        queries, keys, values = heads_of(self, x, cache)
        out = attend(queries, *cache.update_and_fetch(keys, values), cache=cache, scale=self.scale, mask=mask)
        return self.o_proj(out.swapaxes(1, 2).flatten(2))


class GatheringAttention(llama.Attention):
    """Selects keys and values before attention."""

    def __call__(self, x, mask=None, cache=None):
        queries, keys, values = heads_of(self, x, cache)
        keys, values = cache.update_and_fetch(keys, values)
        index = mx.arange(cache.offset)[None, None, :, None]
        keys, values = (mx.take_along_axis(array, index, axis=2) for array in (keys, values))
        out = attend_with_mlx(queries, keys, values, None, self.scale, mask)
        return self.o_proj(out.swapaxes(1, 2).flatten(2))


def attend_with_mlx(queries, keys, values, cache, scale, mask):
    return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask)


def heads_of(attention, x, cache):
    projections = attention.q_proj, attention.k_proj, attention.v_proj
    queries, keys, values = (
        project(x).reshape(*x.shape[:2], -1, attention.head_dim).swapaxes(1, 2) for project in projections
    )
    return attention.rope(queries, offset=cache.offset), attention.rope(keys, offset=cache.offset), values


@pytest.mark.parametrize(("attention", "heads"), [(OwnAttention, 1), (GatheringAttention, 2)])
def test_a_model_that_only_resembles_mla_is_refused(attention, heads):
    model = build("llama", num_key_value_heads=heads)
    for layer in model.layers:
        layer.self_attn.__class__ = attention
    with pytest.raises(UnsupportedModelError, match=r"^llama cannot run on a compressed cache: it computes with the"):
        plan_caches(model, KVConfig())


def test_reading_fetched_keys_is_refused_with_the_attribute():
    """A handle has shape, ndim and dtype, nothing else."""
    model = build("llama")
    with compressed_attention(model):
        caches = make_prompt_cache(model, KVConfig())
        key, _ = caches[0].update_and_fetch(*(mx.zeros((1, 2, 3, 64)) for _ in range(2)))
    with pytest.raises(UnsupportedModelError, match=r"the model reads \.transpose of the keys or values .*profile off"):
        key.transpose(0, 2, 1, 3)
    assert not hasattr(key, "__array__")


@pytest.mark.parametrize(
    ("name", "length"),
    [
        ("gpt2", {"n_positions": 512}),  # positions beyond these have no embeddings
        ("plamo3", {"max_position_embeddings": 512}),  # has `config` in place of `args`
        ("gpt_oss", {"max_position_embeddings": 512}),  # does not read it
        ("cohere", {"max_position_embeddings": 256, "model_max_length": 512}),
    ],
)
def test_the_context_length_is_that_of_the_files(tmp_path, name, length):
    folder = zoo_model(tmp_path / "model", name, **length)
    if name == "gpt2":
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": None}))
    model = load(str(folder))[0]
    assert position_limit(model) == 512
    with pytest.raises(ConfigError, match="has the token 9,999,999"):
        check_token_ids(model, [5, 9_999_999])


def test_a_configuration_of_text_that_is_a_class(tmp_path):
    """Llama 4 has a dataclass where other models have a dictionary; three of four layers attend within a chunk."""
    wide = ARCHITECTURES["llama"].config
    sizes = {"attention_chunk_size": 16, "intermediate_size_mlp": 64, "num_hidden_layers": 4, "use_qk_norm": False}
    experts = {"interleave_moe_layer_step": 2, "num_experts_per_tok": 1, "num_local_experts": 2}
    text = {**wide, "model_type": "llama4_text", "rope_scaling": None, **sizes, **experts}
    mx.random.seed(0)
    model = llama4.Model(llama4.ModelArgs.from_dict({"model_type": "llama4", "text_config": text}))
    assert position_limit(model) == wide["max_position_embeddings"]
    tokens, path = mx.arange(100)[None], tmp_path / "cache.safetensors"
    config = KVConfig(key="q8", value="q8", sinks=0, window=32, normalize=False)
    plain, caches = native.make_prompt_cache(model), make_prompt_cache(model, config)
    with compressed(model):
        for start in range(0, 60, 20):
            expected, packed = (model(tokens[:, start : start + 20], cache=cache) for cache in (plain, caches))
        assert [type(cache).__name__ for cache in caches] == ["ChunkedKVCache"] * 3 + ["CompressedKVCache"]
        assert mx.allclose(packed, expected, atol=0.05)
        save_prompt_cache(path, caches, model=model, config=config)
        loaded = load_prompt_cache(path, model=model).caches
        assert mx.array_equal(*(model(tokens[:, 60:80], cache=cache) for cache in (caches, loaded)))


class Counting(Llama):
    """Counts its forward passes."""

    passes = 0

    def __call__(self, *args, **kwargs):
        self.passes += 1
        return super().__call__(*args, **kwargs)


def counting(seed=0):
    model = build("llama", seed=seed)
    model.__class__ = Counting
    return model


def test_a_model_is_probed_once():
    model, other = counting(), counting(seed=1)
    for config in (KVConfig(), KVConfig(key="tq4"), KVConfig(sinks=4, evict=EvictConfig("knorm", 512))):
        make_prompt_cache(model, config)
        with compressed(model, config):
            pass
    assert model.passes == 1
    assert model_facts(model) is model_facts(model) is not model_facts(other)
    assert other.passes == 1


def test_a_model_is_probed_again_when_its_weights_change_shape_or_type():
    model = counting()
    assert model_facts(model).slots[0].dtype == "float32"
    model.layers[0].self_attn.q_proj.weight = model.layers[0].self_attn.q_proj.weight * 2  # the same shape
    model_facts(model)
    assert model.passes == 1
    model.set_dtype(mx.float16)
    assert model_facts(model).slots[0].dtype == "float16"
    assert model.passes == 2
    for layer in model.layers:  # each pair of KV heads becomes one
        attention = layer.self_attn
        attention.n_kv_heads = 1
        attention.k_proj.weight, attention.v_proj.weight = (p.weight[:64] for p in (attention.k_proj, attention.v_proj))
    assert {slot.heads for slot in model_facts(model).slots} == {1}
    assert model.passes == 3


def test_facts_do_not_outlive_their_model():
    model = counting()
    facts, model_reference = weakref.ref(model_facts(model)), weakref.ref(model)
    del model
    gc.collect()
    assert model_reference() is None, "facts must not keep their model alive"
    model_facts(counting(seed=2))
    gc.collect()
    assert facts() is None
