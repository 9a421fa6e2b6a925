"""What eviction cannot do: models by name, positions that end, files that do not fit, trims past a round."""

import mlx.core as mx
import numpy as np
import pytest
from zoo import build

from contract.test_eviction import TOKENS, config, run
from mlx_tq.cache.factory import build_caches, compressed_caches
from mlx_tq.cache.persist import load_prompt_cache, save_prompt_cache
from mlx_tq.calibrate import calibrate
from mlx_tq.config import EvictConfig
from mlx_tq.dispatch import attention, make_prompt_cache, plan_caches
from mlx_tq.errors import CacheFormatError, ConfigError, UnsupportedModelError

REFUSED = {
    "deepseek_v2": "in layer 0, RoPE turns a part of each query that is joined to the rest afterwards, as in MLA",
    "minicpm3": "as in MLA",
    "jamba": "in layer 1, its attention has no RoPE",
    "cohere2": "in layer 1, queries are not what RoPE returned: they skip it",
    "ministral3": "in layer 1, .* or are scaled, normed or cast afterwards",
    "hunyuan_v1_dense": "scaled, normed or cast",
    "phi": "scaled, normed or cast",
    "internlm3": r"changes its frequencies with the position \(dynamic NTK\)",
    "afm7": "takes positions from the number of keys",
}


@pytest.mark.parametrize("name", REFUSED)
def test_models_are_refused_by_name(name):
    model = build(name)
    with pytest.raises(UnsupportedModelError, match=f"{name}.*{REFUSED[name]}.*(Use|another policy)"):
        plan_caches(model, config())
    plan_caches(model, config(evict=None))


@pytest.mark.parametrize("name", [name for name in REFUSED if name != "afm7"])
def test_policies_without_queries_take_them(name):
    model = build(name)
    with attention(model):
        caches = make_prompt_cache(model, config(evict=EvictConfig(policy="knorm", budget=80, trigger=8)))
        run(model, caches, [70, 33, 40, 1])
    assert compressed_caches(caches)[0].eviction.rounds > 0


def test_a_refusal_leaves_the_model_as_it_was():
    model = build("jamba")
    layers = [dict(module) for module in model.modules()]
    with pytest.raises(UnsupportedModelError):
        plan_caches(model, config())
    assert [dict(module) for module in model.modules()] == layers


def test_ropes_are_given_back():
    model = build("llama")
    ropes = [layer.self_attn.rope for layer in model.layers]
    with pytest.raises(ConfigError), attention(model, config()), attention(model):
        _tapped_and_broken(model, ropes)
    assert all(layer.self_attn.rope is rope for layer, rope in zip(model.layers, ropes, strict=True))
    assert all("rope" not in vars(layer.self_attn) for layer in model.layers)


def _tapped_and_broken(model, ropes):
    assert all(layer.self_attn.rope is not rope for layer, rope in zip(model.layers, ropes, strict=True))
    raise ConfigError


def test_the_last_position():
    model = build("llama")
    model.args.max_position_embeddings = 150
    with attention(model):
        caches = make_prompt_cache(model, config())
        run(model, caches, [70, 33, 40])
        mx.eval(model(mx.array([TOKENS[:7]]), cache=caches))
        with pytest.raises(ConfigError, match=r"has 150 tokens and 1 more would exceed the model's 150 positions"):
            model(mx.array([[1]]), cache=caches)


def test_a_trim_past_an_eviction():
    model = build("llama")
    with attention(model):
        caches = make_prompt_cache(model, config("q8", "tq4"))
        run(model, caches, [70, 33, 40, 1])
        (cache, _), before = caches, [cache.positions.tolist() for cache in caches]
        assert cache.eviction.rounds
        room = cache.offset - cache._floor
        with pytest.raises(CacheFormatError, match=rf"back past an eviction.* Trim at most {room}"):
            cache.trim(room + 1)
        assert [cache.positions.tolist() for cache in caches] == before
        logits = model(mx.array([TOKENS[:5]]), cache=caches)
        mx.eval(logits)
        for cache in caches:
            assert cache.trim(5) == 5
        assert [cache.positions.tolist() for cache in caches] == before
        assert mx.array_equal(model(mx.array([TOKENS[:5]]), cache=caches), logits)


def test_a_trim_back_to_an_eviction():
    """As far as it may go, what is left is what was there: nothing packed comes back from the slack."""
    model = build("llama")
    with attention(model):
        caches = make_prompt_cache(model, config("q8", "tq4"))
        run(model, caches, [70, 33, 40, 1])
    for cache in caches:
        keys, positions = cache.keys_and_values()[0].materialize(), cache.positions
        assert np.any(np.diff(positions[positions < cache._floor][-33:]) > 1)  # gaps where the slack would be
        cache.trim(cache.offset - cache._floor)
        left = positions[positions < cache._floor]
        assert np.array_equal(cache.positions, left)
        assert mx.array_equal(cache.keys_and_values()[0].materialize(), keys[:, :, : len(left)])


def test_no_round_in_the_middle_of_a_pass():
    """A model that asks each layer for its mask does so after earlier layers saw their keys."""
    model = build("llama")
    with attention(model):
        first, second = make_prompt_cache(model, config())
        run(model, [first, second], [70, 9])
        more = mx.zeros((1, 2, 60, 64))
        first.append(more, more)
        second.make_mask(60)
        assert first.eviction.rounds == 0
        second.append(more, more)
        second.make_mask(1)
        assert first.eviction.rounds == 1


def test_a_layer_that_is_gone():
    model = build("llama")
    with attention(model):
        caches = make_prompt_cache(model, config())
        run(model, caches, [70, 33])
        del caches[1]
        caches[0].append(mx.zeros((1, 2, 60, 64)), mx.zeros((1, 2, 60, 64)))
        with pytest.raises(CacheFormatError, match="1 of the 2 caches of a sequence are left"):
            caches[0].make_mask(1)


def test_files_go_on(tmp_path):
    model, path = build("llama"), tmp_path / "cache.safetensors"
    with attention(model):
        caches = make_prompt_cache(model, config("q8", "tq4"))
        run(model, caches, [70, 33, 40, 1])
        save_prompt_cache(path, caches, model="llama", config=config("q8", "tq4"))
        loaded = load_prompt_cache(path, model="llama", config=config("q8", "tq4"))
        assert loaded.config == config("q8", "tq4")
        for step in range(6):
            ids = mx.array([TOKENS[step * 20 : step * 20 + 20]])
            logits = [model(ids, cache=these) for these in (caches, loaded.caches)]
            mx.eval(logits)
            assert mx.array_equal(*logits)
    assert [cache.positions.tolist() for cache in loaded.caches] == [cache.positions.tolist() for cache in caches]
    assert loaded.caches[0].eviction.rounds == caches[0].eviction.rounds > 2
    with pytest.raises(CacheFormatError, match="another configuration: evict is"):
        load_prompt_cache(path, model="llama", config=config("q8", "tq4", evict=None))


def test_statistics_replace_the_warm_up(tmp_path):
    model, path = build("qwen3_next"), str(tmp_path / "stats.safetensors")
    calibrate(model, TOKENS[:104], path)
    evict = EvictConfig(budget=80, trigger=8, stats=path)
    with attention(model):
        plan = plan_caches(model, config(evict=evict))
        assert plan.eviction.source == path
        caches = build_caches(plan)
        run(model, caches, [70, 33, 40])
        online = make_prompt_cache(model, config(evict=EvictConfig(budget=80, warmup=100, trigger=8)))
        run(model, online, [70, 34, 39])
    (cache,), (other,) = compressed_caches(caches), compressed_caches(online)
    assert cache.eviction.rounds > 0
    for ours, theirs in zip(cache.calibrator.stats.arrays(), other.calibrator.stats.arrays(), strict=True):
        assert mx.allclose(ours, theirs, atol=1e-5)
    with pytest.raises(CacheFormatError, match="made with another model"):
        plan_caches(build("qwen3_next", seed=1), config(evict=evict))
    changed = build("qwen3_next")
    for layer in changed.layers:
        if not layer.is_linear:
            layer.self_attn.rope.base = 500.0
    with pytest.raises(CacheFormatError, match="another RoPE than layer 0"):
        plan_caches(changed, config(evict=evict))


@pytest.mark.parametrize("aggregation", ["v3", "expected_attention"])
def test_other_aggregations_run(aggregation):
    model = build("glm4")
    with attention(model):
        evict = EvictConfig(budget=80, warmup=64, trigger=8, aggregation=aggregation)
        caches = make_prompt_cache(model, config("q8", "tq4", evict=evict))
        run(model, caches, [70, 33, 40, 1])
    assert caches[0].eviction.rounds > 0


def test_a_budget_of_bytes():
    model = build("llama")
    evict = EvictConfig(budget="700KB", warmup=64, trigger=8)
    with attention(model):
        plan = plan_caches(model, config("q8", "tq4", evict=evict))
        assert plan.nbytes(plan.eviction.budget.tokens + 8 + 32) <= 700_000
        with pytest.raises(ConfigError, match=r"a budget of 1,000 bytes is below the .* Raise the budget"):
            plan_caches(model, config("q8", "tq4", evict=EvictConfig(budget="1KB")))
    assert plan.nbytes(100_000) <= 700_000


def test_masks_of_a_window():
    """A layer that asks its evicting cache for a sliding window sees positions, not places."""
    model = build("llama")
    with attention(model):
        caches = make_prompt_cache(model, config())
        run(model, caches, [70, 33, 40, 1])
    cache = caches[0]
    mask = cache.make_mask(3, window_size=100)
    keys = [*cache.positions.tolist(), *range(cache.offset, cache.offset + 3)]
    wanted = [[key <= q and key > q - 100 for key in keys] for q in range(cache.offset, cache.offset + 3)]
    assert mask.tolist() == wanted
    assert cache.make_mask(1) is None
    assert cache.make_mask(2) == "causal"
    assert cache.make_mask(2, return_array=True).shape == (2, cache.size() + 2)
