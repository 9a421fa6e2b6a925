"""RoPE that a model computes in a kernel with more is found by its effect, and policies see the queries before it."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models import muse_spark
from mlx_lm.models.llama import Attention
from zoo import build

from mlx_tq.config import EvictConfig, KVConfig
from mlx_tq.integration.probe import model_facts
from mlx_tq.policies.rope import learn_rope
from mlx_tq.prompt_cache.compressed import compressed_attention, make_prompt_cache
from mlx_tq.prompt_cache.layer_group import layer_group_of
from mlx_tq.prompt_cache.plan import learn_ropes

TOKENS = [(7 * i * i + 3 * i) % 160 for i in range(320)]
ALL_LAYERS = [10000.0] * 4  # RoPE in layers with and without a window


def evicted(model):
    """Return the evicted positions, the last logits, and the mean query of each head of the first layer."""
    policy = "triattention:warmup=32:trigger=32:granularity=1"
    config = KVConfig(sinks=4, window=24, evict=EvictConfig(policy, 96, recall="off"))
    with compressed_attention(model):
        caches = make_prompt_cache(model, config)
        for start in range(0, len(TOKENS), 40):
            logits = model(mx.array([TOKENS[start : start + 40]]), cache=caches)
            mx.eval(logits)
    group = layer_group_of(caches)
    assert group.stats.rounds > 2
    return group.evicted, logits, group.calibrators[0].stats.center


def test_fused_rope_evicts_like_a_rope_module():
    model, fused = build("llama"), build("llama")
    for layer in fused.layers:
        fuse_rope(layer)
    assert [slot.is_rope_fused for slot in model_facts(model).slots] == [False] * 2
    assert [slot.is_rope_fused for slot in model_facts(fused).slots] == [True] * 2
    (positions, *arrays), (found, *found_arrays) = evicted(model), evicted(fused)
    assert np.array_equal(positions, found)
    assert all(mx.allclose(a, b, atol=1e-4) for a, b in zip(arrays, found_arrays, strict=True))


def fuse_rope(layer):
    """Let a layer of a llama call a function in place of its RoPE module."""
    rope = layer.self_attn.pop("rope")
    layer.self_attn.tables = rope  # where it is not called
    call = staticmethod(lambda x, offset=0, rope=rope: rope(x, offset=offset))
    layer.self_attn.__class__ = type("FusedAttention", (Attention,), {"rope": call})


def test_a_module_that_one_layer_calls_and_another_fuses():
    model = build("llama")
    model.layers[1].self_attn.rope = model.layers[0].self_attn.rope
    fuse_rope(model.layers[1])
    facts = model_facts(model)
    assert facts.slots[0].rope is facts.slots[1].rope
    assert [rope.is_fused for rope in learn_ropes(facts)] == [False, True]


def test_zero_keys_show_no_rope():
    """The embedding of token 0, often a padding token, may be zero: then every RoPE, undone, leaves keys equal."""
    model = build("llama")
    for layer in model.layers:
        rope = layer.self_attn.pop("rope")
        layer.self_attn.tables = rope
        layer.self_attn.__class__ = type("NoRope", (Attention,), {"rope": staticmethod(lambda x, offset=0: x)})
    weight = model.model.embed_tokens.weight
    model.model.embed_tokens.weight = mx.concatenate([mx.zeros_like(weight[:1]), weight[1:]])
    assert [slot.rope for slot in model_facts(model).slots] == [None] * 2


def test_the_kernel_of_muse_spark():
    model = build("muse_spark", layer_rope_theta=ALL_LAYERS)
    slots = model_facts(model).slots
    assert [slot.is_rope_fused for slot in slots] == [True] * 2
    assert [slot.is_rope_fused for slot in model_facts(build("muse_spark")).slots] == [False, True]
    attention = model.layers[1].self_attn
    heads = {"n_heads": attention.n_heads, "n_kv_heads": attention.n_kv_heads, "head_dim": attention.head_dim}
    options = {**heads, "eps": attention.eps, "query_scale": attention.query_scale}
    qkvg = attention.qkvg_proj(mx.random.normal((1, 40, 128), key=mx.random.key(1)))
    before, _ = muse_spark.qk_norm(qkvg, **options)
    after, _ = muse_spark.qk_norm_rope(qkvg, **options, rope_base=attention.rope.base, offset=100)
    rope = learn_rope(slots[0].rope, attention.head_dim)
    found = rope.unrotate(after.swapaxes(1, 2), 100)
    assert mx.allclose(found, before.swapaxes(1, 2).astype(mx.float32), atol=0.05)
    assert not mx.allclose(rope.unrotate(after.swapaxes(1, 2), 101), found, atol=0.05)
    assert len(evicted(model)[0])


@pytest.mark.parametrize(
    "module",
    [nn.RoPE(64), nn.RoPE(32), nn.RoPE(64, traditional=True, scale=0.5)],
    ids=["all dims", "half of them", "neighbors"],
)
def test_unrotate_inverts_rope(module):
    x = mx.random.normal((1, 2, 7, 64), key=mx.random.key(0))
    assert mx.allclose(learn_rope(module, 64).unrotate(module(x, offset=500), 500), x, atol=1e-4)
