"""Caches with two formats of keys: recent tokens, and older ones that are stored again, smaller."""

import mlx.core as mx
import numpy as np
import pytest
from zoo import build

from cache.tools import DIM, HEADS, copies, error, exact_attention, feed, make_spec, random, random_pair, same_bits
from mlx_tq.cache import MixedKVCache
from mlx_tq.cache.factory import build_caches
from mlx_tq.cache.persist import load_prompt_cache, save_prompt_cache
from mlx_tq.config import BLOCK, EvictConfig, KVConfig
from mlx_tq.dispatch import attention, make_prompt_cache, plan_caches
from mlx_tq.errors import ConfigError
from mlx_tq.memory import memory_report
from mlx_tq.ui import show_plan

PREFIX, WINDOW, RECENT = 4, 24, 64
LENGTH = 360
KEYS, VALUES = random_pair(LENGTH)
WRONG = random_pair(100, seed=9)
SPEC = make_spec("tq4~spectral8", "tq3", recent=RECENT)
SCALE = DIM**-0.5


def filled(length, chunks=None, spec=SPEC):
    cache = MixedKVCache(spec)
    feed(cache, KEYS[:, :, :length], VALUES[:, :, :length], chunks or [length])
    return cache


def contents(cache):
    return [handle.materialize() for handle in cache.keys_and_values()]


def expected(tokens, cold, packed, spec=SPEC):
    """Keys and values of a list of tokens, of which those before `cold` and before `packed` are stored so."""
    layout = spec.layout(DIM, DIM, mx.float16)
    small = spec.cold_layout(layout, mx.float16).key
    keys, values = (np.array(mx.take(x, mx.array(tokens), axis=2)) for x in (KEYS, VALUES))
    recent = layout.key.decode(layout.key.encode(mx.array(keys)))
    cold_keys = np.array(small.decode(small.encode(recent)).astype(mx.float16))
    decoded = np.array(layout.value.decode(layout.value.encode(mx.array(values))).astype(mx.float16))
    keys[:, :, PREFIX:packed] = np.array(recent.astype(mx.float16))[:, :, PREFIX:packed]
    keys[:, :, PREFIX:cold] = cold_keys[:, :, PREFIX:cold]
    values[:, :, PREFIX:packed] = decoded[:, :, PREFIX:packed]
    return keys, values


def by_rule(length):
    packed = max(PREFIX, (length - WINDOW) // BLOCK * BLOCK)
    return max(PREFIX, packed - RECENT), packed


@pytest.mark.parametrize("length", [50, 119, 120, 151, 152, 300])
def test_where_a_token_is_depends_on_the_length_alone(length):
    caches = [filled(length, chunks) for chunks in ([length], [1] * length, [length - 37, 30, 7], [17] * 3 + [length])]
    cold, packed = by_rule(length)
    for found, wanted in zip(contents(caches[0]), expected(list(range(length)), cold, packed), strict=True):
        assert np.array_equal(np.array(found), wanted)
    assert caches[0].body_tokens == packed - PREFIX
    assert all(same_bits(each.state, caches[0].state) for each in caches)


@pytest.mark.parametrize("count", [1, 5, 40])
def test_attention_is_that_over_the_decoded_cache(count):
    cache = filled(LENGTH - count)
    view = cache.append(KEYS[:, :, -count:], VALUES[:, :, -count:])
    assert view.key_shape() == (1, HEADS, LENGTH, DIM)
    queries = random(count, heads=4, seed=5)
    out = view.attend(queries, SCALE, None if count == 1 else "causal", None)
    keys, values = view.materialize()
    wanted = exact_attention(queries, *(np.array(x, np.float64) for x in (keys, values)), SCALE)
    own = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=SCALE, mask="causal")
    assert error(out, wanted) <= 2 * error(own, wanted)


def test_each_token_of_a_step_sees_what_it_would_have_seen_alone():
    """Also where the step lets a block go cold in its middle: at 152 tokens."""
    queries = random(8, heads=4, seed=5)
    together = filled(148)
    alone = together.fork()
    view = together.append(KEYS[:, :, 148:156], VALUES[:, :, 148:156])
    out = view.attend(queries, SCALE, "causal", None)
    for i in range(8):
        one = alone.append(KEYS[:, :, 148 + i : 149 + i], VALUES[:, :, 148 + i : 149 + i])
        single = one.attend(queries[:, :, i : i + 1], SCALE, None, None)
        assert mx.allclose(out[:, :, i : i + 1], single, rtol=1e-3, atol=1e-3)
    assert same_bits(together.state, alone.state)


@pytest.mark.parametrize("length", [119, 120, 121, 150, 151, 152, 153, 200])
def test_up_to_32_trimmed_tokens_were_never_there(length):
    never = filled(length)
    for count in (1, 8, 31, 32):
        cache = filled(length)
        feed_wrong(cache, count)
        assert cache.trim(count) == count
        assert all(mx.array_equal(*pair) for pair in zip(contents(cache), contents(never), strict=True))
        for each in (cache, again := never.fork()):
            feed(each, KEYS, VALUES, [1] * 3 + [90])
        assert same_bits(cache.state, again.state)
        assert cache.nbytes == again.nbytes


def feed_wrong(cache, count):
    for i in range(count):
        cache.append(*(x[:, :, i : i + 1] for x in WRONG))


@pytest.mark.parametrize("seed", range(5))
def test_any_history_equals_a_list_of_tokens(seed):
    """Appends, trims of any depth, forks and states, against the rule and what was lost."""
    rng = np.random.default_rng(seed)
    cache, tokens, originals, recents = MixedKVCache(SPEC), [], PREFIX, PREFIX  # those before have none left
    for _ in range(30):
        action = rng.integers(5)
        if action == 0:
            count = int(rng.choice([1, 20, 32, 33, 100, 400]))
            assert cache.trim(count) == min(count, len(tokens))
            del tokens[max(0, len(tokens) - count) :]
            originals, recents = (max(PREFIX, min(lost, len(tokens))) for lost in (originals, recents))
        elif action == 1:
            fork = cache.fork()
            feed_wrong(cache, 40)
            cache = fork
        elif action == 2:
            cache = MixedKVCache.from_state(cache.state)
        else:
            new = rng.integers(0, LENGTH, int(rng.choice([1, 7, 33, 90]))).tolist()
            index = mx.array(new)
            cache.append(mx.take(KEYS, index, axis=2), mx.take(VALUES, index, axis=2))
            tokens += new
            packed = max((len(tokens) - WINDOW) // BLOCK * BLOCK, originals)
            originals = max(originals, packed - BLOCK)
            recents = max(recents, packed - RECENT - BLOCK)
        if not tokens:
            continue
        packed = max((len(tokens) - WINDOW) // BLOCK * BLOCK, originals)
        wanted = expected(tokens, max(packed - RECENT, recents), packed)
        assert all(np.array_equal(np.array(a), b) for a, b in zip(contents(cache), wanted, strict=True))


@pytest.mark.parametrize("key", ["q8~tq3", "tq35~tq4", "fp16~q8_0"])
def test_other_formats_through_state_fork_file_and_batch(key, tmp_path):
    config = KVConfig(key=key, value="tq25", prefix=PREFIX, window=WINDOW, recent=RECENT)
    cache = filled(200, spec=make_spec(key, "tq25", recent=RECENT))
    twins = copies(cache, config, tmp_path / "x.safetensors")
    for each in (cache, *twins):
        feed(each, KEYS, VALUES, [7, 40, 53])
    assert all(isinstance(twin, MixedKVCache) for twin in twins)
    assert all(same_bits(twin.state, cache.state) for twin in twins)


@pytest.mark.parametrize("length", [3, 60, 150, 328, 700])
def test_bytes_are_those_of_the_plan_and_of_the_report(length):
    config = KVConfig(key="tq4~spectral8", value="tq4", prefix=4, window=24, recent=256)
    plan = plan_caches(build("llama"), config)
    caches = build_caches(plan)
    for cache, layer in zip(caches, plan.layers, strict=True):
        slot = layer.slot
        keys, values = (mx.zeros((1, slot.heads, length, dim)) for dim in (slot.key_dim, slot.value_dim))
        feed(cache, keys, values, [100] * (length // 100 + 1))
        assert cache.nbytes == layer.nbytes(length)
    dim = plan.layers[0].slot.key_dim
    report = memory_report(length, len(plan.layers), plan.layers[0].slot.heads, dim, config)
    assert report.body == sum(cache.body_nbytes for cache in caches)


def test_a_model_runs_on_it_and_each_layer_has_its_own(tmp_path, capsys):
    model = build("smollm3")
    config = KVConfig(key="q8~spectral8+tq4+tq4~tq2+fp16~tq4", value="tq4", prefix=4, window=24, recent=32)
    plan = plan_caches(model, config)
    assert [layer.spec.keys for layer in plan.layers] == config.key.split("+")
    assert [layer.has_kernels for layer in plan.layers] == [False, True, False, False]
    show_plan(plan, 190)
    shown = capsys.readouterr().err
    assert "tq4~tq2" in shown
    assert "of two key formats, 32 packed tokens have the first" in shown
    tokens = [(7 * i * i + 3 * i) % 160 for i in range(200)]
    with attention(model):
        caches = make_prompt_cache(model, config)
        mx.eval(model(mx.array([tokens[:190]]), cache=caches))
        assert plan.nbytes(190) == sum(cache.nbytes for cache in caches)
        save_prompt_cache(tmp_path / "x.safetensors", caches, model="m", config=config)
        loaded = load_prompt_cache(tmp_path / "x.safetensors", model="m", config=config).caches
        logits = [model(mx.array([tokens[190:]]), cache=each) for each in (caches, loaded)]
    assert mx.array_equal(*logits)
    assert mx.isfinite(logits[0]).all()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"key": "tq4~tq3~tq2"}, "names 3 formats; write one, or RECENT~COLD"),
        ({"key": "tq4~tq9"}, "format 'tq9' is unknown"),
        ({"key": "tq4~tq3", "recent": 40}, "recent is 40; it must be a multiple of 32"),
        ({"key": "tq4~tq3", "recent": 0}, "recent is 0"),
        ({"value": "tq4~tq3"}, "format 'tq4~tq3' is unknown"),
        ({"key": "tq4~tq3", "evict": EvictConfig()}, "tokens of two key formats cannot be evicted"),
    ],
)
def test_refusals(fields, message):
    with pytest.raises(ConfigError, match=message):
        KVConfig(**fields)


def test_a_cold_format_that_learns_is_refused(embedded):
    with pytest.raises(ConfigError, match="layer 0 of qwen3: tq35 learns from keys as they first came"):
        plan_caches(embedded[0], KVConfig(key="tq4~tq35"))


def test_layers_that_need_bits_are_promoted_whole():
    plan = plan_caches(build("smollm3"), KVConfig(key="tq4~spectral8", boundary=1))
    assert [layer.spec.keys for layer in plan.layers] == ["q8", "tq4~spectral8", "tq4~spectral8", "q8"]
    plan = plan_caches(build("smollm3"), KVConfig(key="fp16~q8", boundary=1))
    assert {layer.spec.keys for layer in plan.layers} == {"fp16~q8"}


def test_alias_and_equal_formats_are_one():
    assert KVConfig(key="turbo4~turbo3").key == "tq4~tq3"
    assert KVConfig(key="tq4~turbo4").key == "tq4"
