"""The probe runs once a model, and again where the model is another one by now."""

import gc
import weakref

import mlx.core as mx
import pytest
from mlx_lm.models.llama import Model as Llama
from zoo import build

from mlx_tq import KVConfig, compressed, make_prompt_cache
from mlx_tq.config import EvictConfig
from mlx_tq.errors import UnsupportedModelError
from mlx_tq.integration.known_models import model_facts

CONFIGS = [KVConfig(), KVConfig(key="tq4"), KVConfig(sinks=4, evict=EvictConfig("knorm", 512))]


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


def test_once_whatever_is_made():
    model, other = counting(), counting(seed=1)
    for config in CONFIGS:
        make_prompt_cache(model, config)
        with compressed(model, config):
            pass
    assert model.passes == 1
    assert model_facts(model) is model_facts(model) is not model_facts(other)
    assert other.passes == 1
    refused = build("gemma2")
    for _ in range(2):  # a refusal is not remembered
        with pytest.raises(UnsupportedModelError, match="gemma2 cannot run"):
            model_facts(refused)


def test_again_where_weights_have_another_shape_or_type():
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


def test_a_model_that_is_gone_is_forgotten():
    """Its facts go when the next model is met, and whoever gets its place in memory is asked anew."""
    model = counting()
    facts, gone = weakref.ref(model_facts(model)), weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None, "what is known of a model must not keep it"
    model_facts(counting(seed=2))
    gc.collect()
    assert facts() is None
