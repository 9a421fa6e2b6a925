"""Models that cannot run on a compressed cache are refused by name, with the reason and the remedy, and stay usable."""

import mlx.core as mx
import pytest
from mlx_lm.models import cache as native
from zoo import build

from mlx_tq.config import PROFILES, KVConfig
from mlx_tq.errors import UnsupportedModelError
from mlx_tq.prompt_cache.compressed import compressed, make_prompt_cache, plan_caches

COMPUTES = (
    r"^{} cannot run on a compressed cache: it computes with the keys and values that it fetched, instead of "
    r"handing them to mlx-lm's scaled_dot_product_attention \(.+\)\. Use --kv-profile off\.$"
)
NOTHING = r"^{} keeps no plain KV cache \(its caches are ArraysCache\), so there is nothing to compress\. Use --kv-pro"
REASONS = {
    "gemma2": COMPUTES,
    "deepseek_v3": COMPUTES,
    "glm4_moe_lite": COMPUTES,
    "plamo": COMPUTES,
    "plamo2": COMPUTES,
    "mamba2": NOTHING,
    "rwkv7": NOTHING,
}


@pytest.mark.parametrize("name", REASONS)
def test_refused_by_name(name):
    model = build(name)
    for refuse in (plan_caches, make_prompt_cache):
        with pytest.raises(UnsupportedModelError, match=REASONS[name].format(name)):
            refuse(model, KVConfig())
    with pytest.raises(UnsupportedModelError, match=REASONS[name].format(name)), compressed(model, KVConfig()):
        raise AssertionError
    tokens = mx.array([[3, 1, 4, 1, 5]])
    plain = model(tokens, cache=native.make_prompt_cache(model))
    with compressed(model, PROFILES["off"]):  # which serves them
        assert mx.array_equal(model(tokens, cache=make_prompt_cache(model, PROFILES["off"])), plain)


def test_a_model_that_fails_by_itself_raises_its_own_error():
    model = build("llama")
    model.layers[0].self_attn.o_proj.weight = mx.zeros((3, 3))
    with pytest.raises(ValueError, match="matmul"):
        plan_caches(model, KVConfig())


def test_attention_that_never_sees_the_keys():
    """A layer that stores keys and then does not attend to them would lose its context without a word."""
    model = build("llama")

    def deaf(x, mask=None, cache=None):
        cache.update_and_fetch(*(mx.zeros((1, 2, x.shape[1], 64)) for _ in range(2)))
        return x

    model.layers[1].self_attn = deaf
    with pytest.raises(UnsupportedModelError, match=r"llama .*layers \[1\] fetch keys and values, but attention never"):
        plan_caches(model, KVConfig())


def test_a_model_that_reads_the_fetched_keys():
    """Of a handle only shape, ndim and dtype can be read; anything else is refused by the name of what was read."""
    model = build("llama")
    with compressed(model):
        caches = make_prompt_cache(model, KVConfig())
        key, _ = caches[0].update_and_fetch(*(mx.zeros((1, 2, 3, 64)) for _ in range(2)))
    with pytest.raises(UnsupportedModelError, match=r"the model reads \.transpose of the keys or values .*profile off"):
        key.transpose(0, 2, 1, 3)
    assert not hasattr(key, "__array__")
