"""Models with random weights in the shapes of published ones, and caches that are filled directly."""

from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.cache import KVCache, QuantizedKVCache

from benchmarks.gpu.setting import Setting
from mlx_tq.cache.layer import CompressedKVCache
from mlx_tq.config import PROFILES, KVConfig
from mlx_tq.prompt_cache.compressed import make_prompt_cache

COMMON = {"hidden_size": 4096, "intermediate_size": 12288, "rms_norm_eps": 1e-6, "max_position_embeddings": 262144}
COMMON |= {"tie_word_embeddings": False, "rope_theta": 1e6}
QWEN3 = {"model_type": "qwen3", "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
QWEN35 = {"model_type": "qwen3_5", "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256}
QWEN35 |= {"linear_num_value_heads": 32, "linear_num_key_heads": 16, "linear_key_head_dim": 128}
SHAPES: dict[str, dict[str, Any]] = {
    "Qwen3.5-9B": {**COMMON, **QWEN35, "num_hidden_layers": 32, "vocab_size": 248320},
    "Qwen3-8B": {**COMMON, **QWEN3, "num_hidden_layers": 36, "vocab_size": 151936},
}
DRY = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
DRY |= {"linear_num_value_heads": 2, "linear_num_key_heads": 1, "linear_key_head_dim": 32, "linear_value_head_dim": 32}
INTERVAL = {"qwen3": 1, "qwen3_5": 4}  # layers of which the last attends; the others keep a state of fixed size
GROUP_SIZE, BITS = 64, 4  # of weights
FILL_STEP = 4096  # tokens that are appended at a time
FIRST_TOKENS = 8  # that the model itself reads
# Caches of one layer of all arms together, in bytes of a layer's fp16 cache, and one that a write copies.
ALL_ARMS = 4.5

Caches = list[Any]


class ModelArm(NamedTuple):
    name: str
    config: KVConfig | None = None
    kv_bits: int | None = None


QUANTIZED = [ModelArm(f"kv-bits {bits}", kv_bits=bits) for bits in (8, 4)]
PROFILE_ARMS = [ModelArm(name, PROFILES[name]) for name in ("safe", "balanced", "small", "tiny")]


class ShapedModel(NamedTuple):
    model: Any
    config: dict[str, Any]
    layers: int
    attending_layers: int
    nbytes: int  # of the weights


def make_model(name: str, setting: Setting, tokens: int, most_layers: int | None = None) -> ShapedModel | None:
    """Make as many layers as fit next to the caches of all arms; None if not even the fewest do."""
    config = SHAPES[name] | (DRY if setting.dry else {})
    interval = INTERVAL[config["model_type"]]
    one, two = (_count_nbytes(_lazy_model(config, layers, setting)) for layers in (interval, 2 * interval))
    cache_nbytes = ALL_ARMS * 4 * config["num_key_value_heads"] * config["head_dim"] * tokens
    room = 1e9 if setting.dry else setting.memory - (2 * one - two)
    wanted = max(interval, 2) if setting.dry else most_layers or config["num_hidden_layers"]
    layers = interval * min(wanted // interval, int(room // (two - one + cache_nbytes)))
    if layers < interval:
        return None
    model = _lazy_model(config, layers, setting)
    for layer in model.layers:  # one by one, so that only one is ever there in full precision
        mx.eval(layer.parameters())
    mx.eval(model.parameters())
    return ShapedModel(model, config, layers, layers // interval, _count_nbytes(model))


def _lazy_model(config: dict[str, Any], layers: int, setting: Setting) -> Any:
    mx.random.seed(0)
    module = import_module(f"mlx_lm.models.{config['model_type']}")
    model = module.Model(module.ModelArgs.from_dict({**config, "num_hidden_layers": layers}))
    model.set_dtype(mx.float32 if setting.dry else mx.float16)
    if not setting.dry:  # a CPU multiplies packed weights one by one
        nn.quantize(model, GROUP_SIZE, BITS)
    model.eval()
    return model


def _count_nbytes(model: Any) -> int:
    return sum(array.nbytes for _, array in tree_flatten(model.parameters()))


def make_caches(shaped: ShapedModel, arm: ModelArm) -> Caches:
    caches = make_prompt_cache(shaped.model, arm.config or PROFILES["off"])
    if arm.kv_bits is None:
        return caches
    quantized = {"group_size": GROUP_SIZE, "bits": arm.kv_bits}
    return [QuantizedKVCache(**quantized) if isinstance(cache, KVCache) else cache for cache in caches]


def fill_caches(shaped: ShapedModel, caches: Caches, tokens: int) -> None:
    """Let the model read a few tokens, then append random keys and values to one layer, and copy it to the others."""
    mx.eval(shaped.model(mx.arange(FIRST_TOKENS)[None], cache=caches))
    source = None
    for index, cache in enumerate(caches):
        if is_growing(cache):
            if source is None:
                append_random(shaped, cache, tokens - FIRST_TOKENS)
                source = cache
            else:
                caches[index] = type(cache).from_state(tree_map(_copy, source.state))
            mx.eval(caches[index].state)


def append_random(shaped: ShapedModel, cache: Any, tokens: int, step: int = FILL_STEP) -> None:
    """Append random keys and values as prefill does."""
    heads, dim = shaped.config["num_key_value_heads"], shaped.config["head_dim"]
    dtype = shaped.model.layers[0].input_layernorm.weight.dtype
    append: Callable[..., Any] = cache.append if isinstance(cache, CompressedKVCache) else cache.update_and_fetch
    for start in range(0, tokens, step):
        shape = (1, heads, min(step, tokens - start), dim)
        append(*(mx.random.normal(shape).astype(dtype) for _ in range(2)))
        if isinstance(cache, CompressedKVCache):
            cache.stop_learning()
        mx.eval(cache.state)


def is_growing(cache: Any) -> bool:
    """Return whether a cache grows with the tokens."""
    return isinstance(cache, (KVCache, QuantizedKVCache, CompressedKVCache))


def _copy(value: Any) -> Any:
    return value + 0 if isinstance(value, mx.array) else value
