"""Spectral keys in caches: pairs of the model's own RoPE, a schedule by layer, refusals."""

import mlx.core as mx
import pytest
from zoo import build

from cache.tools import same_bits
from mlx_tq.cache.persist import load_prompt_cache, save_prompt_cache
from mlx_tq.config import KVConfig, profile
from mlx_tq.dispatch import attention, make_prompt_cache, plan_caches
from mlx_tq.errors import ConfigError, UnsupportedModelError
from mlx_tq.memory import memory_report

TOKENS = [(7 * i * i + 3 * i) % 160 for i in range(120)]
REGIONS = {"prefix": 4, "window": 24}


def pairs_of(name: str) -> list[tuple[tuple[int, int], ...]]:
    return [layer.spec.key_options.pairs for layer in plan_caches(build(name), KVConfig(key="spectral8")).layers]


def test_pairs_are_those_of_the_models_rope():
    """Half of the dims apart, or neighbours, and only those that RoPE turns."""
    for pairs in pairs_of("llama"):
        assert pairs == tuple((i, i + len(pairs)) for i in range(len(pairs)))
    assert all(second == first + 1 for pairs in pairs_of("glm4") for first, second in pairs)
    dims = [layer.slot.key_dim for layer in plan_caches(build("gpt_neox"), KVConfig()).layers]
    assert all(2 * len(pairs) < dim for pairs, dim in zip(pairs_of("gpt_neox"), dims, strict=True))


@pytest.mark.parametrize("name", ["llama", "glm4", "gpt_neox"])
def test_a_model_runs_on_spectral_keys_and_from_a_file(name, tmp_path):
    model, config = build(name), KVConfig(key="spectral8", value="q8", **REGIONS)
    with attention(model):
        caches = make_prompt_cache(model, config)
        model(mx.array([TOKENS[:90]]), cache=caches)
        save_prompt_cache(tmp_path / "x.safetensors", caches, model=name, config=config)
        loaded = load_prompt_cache(tmp_path / "x.safetensors", model=name, config=config).caches
        logits = [model(mx.array([TOKENS[90:95]]), cache=each) for each in (caches, loaded)]
        logits += [model(mx.array([TOKENS[95:]]), cache=each) for each in (caches, loaded)]
    assert mx.array_equal(logits[0], logits[1])
    assert mx.array_equal(logits[2], logits[3])
    assert mx.isfinite(logits[2]).all()
    assert same_bits([cache.state for cache in caches], [cache.state for cache in loaded])


def test_a_schedule_gives_each_layer_its_format():
    model = build("smollm3")
    config = KVConfig(key="spectral16+turbo4+spectral8+q8", value="tq4", **REGIONS)
    assert config.key == "spectral16+tq4+spectral8+q8"
    plan = plan_caches(model, config)
    assert [layer.spec.key for layer in plan.layers] == ["spectral16", "tq4", "spectral8", "q8"]
    assert all(not layer.note for layer in plan.layers)
    with attention(model):
        caches = make_prompt_cache(model, config)
        mx.eval(model(mx.array([TOKENS]), cache=caches))
    assert plan.nbytes(len(TOKENS)) == sum(cache.nbytes for cache in caches)
    report = memory_report(5000, 4, 2, 128, config)
    single = [
        memory_report(5000, 1, 2, 128, KVConfig(key=key, value="tq4", **REGIONS)) for key in config.key.split("+")
    ]
    assert report.body == sum(each.body for each in single)


def test_a_schedule_of_another_length_is_refused():
    with pytest.raises(ConfigError, match="key names 2 formats, and the model has 4 layers to store"):
        plan_caches(build("smollm3"), KVConfig(key="spectral8+tq4"))
    with pytest.raises(ConfigError, match="format 'tq9' is unknown"):
        KVConfig(key="q8+tq9")


@pytest.mark.parametrize("name", ["spectral8", "spectral16_int8"])
def test_values_are_refused(name):
    with pytest.raises(ConfigError, match=f"value is '{name}', which is for keys only: it keeps .* RoPE pairs"):
        KVConfig(value=name)
    with pytest.raises(ConfigError, match="for keys only"):
        profile("small", value=name)


def test_keys_whose_rope_is_not_found_are_refused():
    with pytest.raises(
        UnsupportedModelError, match="keys of stablelm cannot be stored by their RoPE pairs: in layer 0"
    ):
        plan_caches(build("stablelm"), KVConfig(key="spectral8"))
