"""Packed latents of MLA: attention in place, passes of several tokens, batches, trims, files, and what is refused."""

import copy
import gc
import importlib
import weakref
from functools import partial

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import cache as native
from mlx_lm.models.base import create_causal_mask
from zoo import build

from mlx_tq.cache.latent import LatentKVCache
from mlx_tq.cache.spec import CacheSpec
from mlx_tq.cache.view import Handle
from mlx_tq.config import EvictConfig, KVConfig
from mlx_tq.errors import ConfigError, UnsupportedModelError
from mlx_tq.integration.patches import patch_attention
from mlx_tq.kernels import backend
from mlx_tq.prompt_cache.build import build_caches
from mlx_tq.prompt_cache.cache_file import load_prompt_cache, save_prompt_cache
from mlx_tq.prompt_cache.compressed import compressed_attention, make_prompt_cache, plan_caches
from mlx_tq.prompt_cache.layer_group import compressed_caches, layer_group_of
from mlx_tq.prompt_cache.recall import score_by_specificity
from mlx_tq.prompt_cache.recording import record_attention
from mlx_tq.session.compaction import compact_prompt_cache

REGIONS = {"sinks": 4, "window": 24}
TQ2 = KVConfig(key="tq2", value="tq2", outlier=0, **REGIONS)
TOKENS = [(7 * i * i + 3 * i) % 160 for i in range(400)]
MODEL = build("deepseek_v3")


def run(model, caches, *chunks, start=0):
    logits = []
    for chunk in chunks:
        logits.append(model(mx.array([TOKENS[start : start + chunk]]), cache=caches))
        mx.eval(logits)
        start += chunk
    return mx.concatenate(logits, axis=1)


def make_latents(config, latents, rotated, dtype=mx.float32):
    """A cache of latents [B, 1, L, R] and rotated parts [B, 1, L, P], and what a step of one more token gets."""
    cache = LatentKVCache(CacheSpec.for_layer(config, 0, config.key, config.value, latent=True))
    with patch_attention():
        for start, stop in ((0, -1), (-1, None)):
            step = cache.update_and_fetch(*(x[:, :, start:stop].astype(dtype) for x in (latents, rotated)))
    return cache, *step


def normal(seed, *shape):
    return mx.array(np.random.default_rng(seed).standard_normal(shape, np.float32))


# Attention of one token.


@pytest.mark.parametrize("name", ["cpu", "reference"])
@pytest.mark.parametrize(("key", "value", "dtype"), [
    ("tq4", "q8", mx.float32), ("q8", "fp16", mx.float16), ("tq3", "q8", mx.bfloat16), ("tcq3", "q8", mx.float32),
    ("fp16", "fp16", mx.float16), ("fp16", "q8", mx.float32),
])  # fmt: skip
@pytest.mark.parametrize(("rank", "rotated_dim", "tokens"), [(512, 64, 300), (64, 32, 97)])
def test_attention_in_place_is_attention_to_the_decoded_rows(name, key, value, dtype, rank, rotated_dim, tokens):
    latents, rotated = normal(1, 1, 1, tokens, rank), normal(2, 1, 1, tokens, rotated_dim)
    config = KVConfig(key=key, value=value, **REGIONS)
    cache, handle, _ = make_latents(config, latents, rotated, dtype)
    assert isinstance(handle, Handle)
    assert handle.shape == (1, 1, tokens, rank)
    assert cache.packed_tokens >= 60
    queries, bias = normal(3, 1, 20, 1, rank).astype(dtype), normal(4, 1, 20, 1, tokens)
    bias = mx.where(mx.arange(tokens) % 7 == 3, mx.finfo(mx.float32).min, bias)
    with backend.using(name):
        found = handle.view.attend(queries, rank**-0.5, bias, None)
        decoded = np.array(handle.view.regions.decode()[0].astype(mx.float32), np.float64)[0, 0]
    scores = np.array(queries.astype(mx.float32), np.float64)[0, :, 0] @ decoded.T * rank**-0.5
    scores = scores + np.array(bias, np.float64)[0, :, 0]
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    exact = weights / weights.sum(axis=-1, keepdims=True) @ decoded
    error = np.abs(np.array(found.astype(mx.float32))[0, :, 0] - exact).max() / np.abs(exact).max()
    # A type's own rounding of the output, and of the decoded rows that it is compared with.
    assert error < {mx.float32: 1e-5, mx.float16: 2e-3, mx.bfloat16: 1e-2}[dtype]


def test_a_step_decodes_the_rotated_parts_and_no_latents(monkeypatch):
    config = KVConfig(key="tq4", value="q8", **REGIONS)
    latents, rotated = normal(1, 1, 1, 200, 64), normal(2, 1, 1, 200, 32)
    cache, _, fetched = make_latents(config, latents, rotated)
    assert mx.abs(fetched - rotated).max() < 0.05
    codec = cache.packed_rows()[1].key
    monkeypatch.setattr(type(codec), "decode", None)
    with patch_attention():
        handle, _ = cache.update_and_fetch(normal(5, 1, 1, 1, 64), normal(6, 1, 1, 1, 32))
    assert mx.isfinite(handle.view.attend(normal(7, 1, 8, 1, 64), 0.1, None, None)).all()


def test_an_indexer_takes_rows_of_all_regions():
    latents, rotated = normal(1, 1, 1, 200, 64), normal(2, 1, 1, 200, 32)
    _, handle, _ = make_latents(TQ2, latents, rotated)
    index = mx.array([[[0, 3, 4, 5, 150, 170, 171, 172, 199, 77]]])
    with patch_attention():
        for axis in (2, -2):
            found = mx.take_along_axis(handle, mx.broadcast_to(index[..., None], (1, 1, 10, 64)), axis=axis)
            assert mx.array_equal(found, handle.view.regions.decode()[0][:, :, index[0, 0]])


def test_layouts_fitted_to_a_conversation_end_with_it():
    config = KVConfig(key="tq35", value="q8", **REGIONS)
    cache, handle, _ = make_latents(config, normal(1, 1, 1, 200, 64), normal(2, 1, 1, 200, 32))
    layout = handle.view.regions.layout
    assert layout.learned_bytes
    assert handle.view.merged_regions().layout is handle.view.merged_regions().layout
    cache.searched(normal(3, 1, 8, 1, 96))
    reference = weakref.ref(layout)
    del cache, handle, layout, _
    gc.collect()
    assert reference() is None


# Passes of several tokens.


def test_each_token_of_a_short_pass_sees_what_it_would_alone():
    """A block is packed in the middle of most of these passes."""
    with compressed_attention(MODEL):
        caches, single = (make_prompt_cache(MODEL, TQ2) for _ in range(2))
        steps = run(MODEL, single, 60, *[1] * 80)
        passes = run(MODEL, caches, 60, *[8] * 10)
    assert mx.abs(steps - passes).max() < 1e-4
    assert caches[0].packed_tokens == single[0].packed_tokens > 60


def test_rows_of_a_batch_equal_single_sequences():
    """Of several lengths, in passes of one token and more, with a block packed in the middle for some of them."""
    lengths, more = (61, 100, 38), (7, 1, 5, 1, 8, 1)
    with compressed_attention(MODEL):
        alone = [make_prompt_cache(MODEL, TQ2) for _ in lengths]
        for caches, length in zip(alone, lengths, strict=True):
            run(MODEL, caches, length)
        together = [rows[0].merge(list(rows)) for rows in zip(*alone, strict=True)]
        for step in more:
            tokens = mx.array([TOKENS[length : length + step] for length in lengths])
            found = MODEL(tokens, cache=together)
            expected = mx.concatenate([MODEL(tokens[i : i + 1], cache=caches) for i, caches in enumerate(alone)])
            assert mx.abs(found - expected).max() < 1e-4


# What all caches can do.


def test_trimmed_caches_equal_shorter_ones():
    with compressed_attention(MODEL):
        caches, never = (make_prompt_cache(MODEL, TQ2) for _ in range(2))
        run(MODEL, caches, 150, *[1] * 20)
        run(MODEL, never, 150, 1)
        native.trim_prompt_cache(caches, 19)
        assert mx.array_equal(*(run(MODEL, each, 5, 30, 1, start=151) for each in (caches, never)))


@pytest.mark.parametrize("name", ["deepseek_v32", "longcat_flash"])
def test_copies_and_loaded_files_give_the_same_tokens(name, tmp_path):
    model, path = build(name), tmp_path / "cache.safetensors"
    with compressed_attention(model):
        caches = make_prompt_cache(model, TQ2)
        run(model, caches, 150, 1)
        twin = copy.deepcopy(caches)
        save_prompt_cache(path, caches, model=model, config=TQ2)
        loaded = load_prompt_cache(path, model=model, config=TQ2).caches
        assert {type(cache) for cache in compressed_caches(loaded)} == {LatentKVCache}
        logits = [run(model, each, 1, 9, 30, 1, start=151) for each in (caches, twin, loaded)]
    assert mx.array_equal(logits[0], logits[1])
    assert mx.array_equal(logits[0], logits[2])


def test_bytes_are_as_planned():
    model = build("deepseek_v3", kv_lora_rank=512)
    for key, row in (("tq4", 256 + 64 + 4), ("q8", 512 + 64 + 4)):
        plan = plan_caches(model, KVConfig(key=key, value="tq4", **REGIONS))
        assert {layer.row_nbytes for layer in plan.layers} == {row}
        assert {(layer.spec.key, layer.spec.value) for layer in plan.layers} == {(key, "q8")}
        caches = build_caches(plan)
        with compressed_attention(model):
            for start, stop in ((0, 90), (90, 91), (91, 320)):
                run(model, caches, stop - start, start=start)
                assert sum(cache.nbytes for cache in caches) == plan.nbytes(stop)


# Eviction.


@pytest.mark.parametrize("policy", ["recency", "knorm", "streaming", "random"])
def test_policies_that_need_no_queries_evict(policy):
    evict = EvictConfig(f"{policy}:trigger=8", 80, recall="off")
    config = KVConfig(key="tq4", value="q8", evict=evict, sinks=0 if policy == "streaming" else 4, window=24)
    with compressed_attention(MODEL):
        caches = make_prompt_cache(MODEL, config)
        logits = run(MODEL, caches, 70, 60, 1, 7, 33, 1)
    assert mx.isfinite(logits).all()
    assert layer_group_of(caches).stats.rounds > 0
    assert caches[0].size() < 172 == caches[0].offset


def test_unsupported_settings_for_latents_are_refused():
    def plan(model=MODEL, policy="knorm", budget=80, key="tq4"):
        plan_caches(model, KVConfig(key=key, value="tq4", evict=EvictConfig(policy, budget), **REGIONS))

    with pytest.raises(UnsupportedModelError, match=r"TriAttention: in layer 0, it caches .*Use another policy"):
        plan(policy="triattention:warmup=64")
    with pytest.raises(UnsupportedModelError, match=r"deepseek_v3 caches latents, which all.* Use another policy"):
        plan(policy="heads", budget="50%@400")
    with pytest.raises(
        UnsupportedModelError, match=r"deepseek_v32 cannot evict .*an indexer computes .* --kv-evict none"
    ):
        plan(build("deepseek_v32"))
    with pytest.raises(ConfigError, match=r"layer 0 .*its latents are stored in one format.* names two\. Use q8"):
        plan(budget=800, key="q8~tq3")
    with pytest.raises(ConfigError, match=r"shadow mode .* MLA caches latents"):
        build_caches(plan_caches(MODEL, KVConfig()), shadow=True)
    with compressed_attention(MODEL):
        caches = make_prompt_cache(MODEL, KVConfig(**REGIONS))
        run(MODEL, caches, 150)
    with pytest.raises(ConfigError, match="MLA caches latents, which all heads share"):
        compact_prompt_cache(MODEL, None, caches, TOKENS[:150], 0.5)
    with pytest.raises(UnsupportedModelError, match=r"deepseek_v3 caches latents \(MLA\), whose keys .*another policy"):
        record_attention(MODEL, TOKENS[:80], 8)


@pytest.mark.parametrize("chunks", [(30,), pytest.param((1,) * 30, marks=pytest.mark.full), (20, 1, 8, 1)])
@pytest.mark.parametrize("name", ["deepseek_v3", "mistral4", "kimi_linear"])
def test_a_search_scores_archived_blocks_as_attention_would(name, chunks, monkeypatch):
    """Of the first layer with latents, whose inputs no eviction has changed, by both parts of keys."""
    model, length, question = build(name), 250, 30
    weights = first_weights(model, length, question, monkeypatch)
    evict = EvictConfig("recency:trigger=8", 150, recall=64)
    with compressed_attention(model):
        caches = make_prompt_cache(model, KVConfig(key="fp16", value="fp16", evict=evict, sinks=4, window=64))
        run(model, caches, length - 10, 10)
        plain = copy.deepcopy(caches)
        layers, group = compressed_caches(caches), layer_group_of(caches)
        group.capture_queries([0], rounds=False)
        layer_group_of(plain).capture_queries([], rounds=False)
        plain = run(model, plain, *chunks, start=length)
        found = run(model, caches, *chunks, start=length)
        selection = group.search_archive(layers, question, 64)
    assert mx.abs(plain - found).max() < 1e-4
    blocks = [scored.block for scored in selection.ranked]
    assert sum(len(block.positions) for block in blocks) == len(group.evicted) > 60
    powers = [(weights[..., block.positions].max(axis=-1) ** 4).sum(axis=0) for block in blocks]
    expected = score_by_specificity(np.stack(powers, axis=-1))
    assert np.allclose([scored.score for scored in selection.ranked], expected, rtol=1e-3, atol=1e-7)
    assert expected.max() > 1e-4


def first_weights(model, length, count, monkeypatch):
    """The weights that the last `count` tokens give all tokens in the first layer with latents, [Hq, count, S]."""
    calls = []

    def attend(queries, keys, values, cache, scale, mask):
        bias = mx.where(mask, 0, -1e30) if mask.dtype == mx.bool_ else mask
        calls.append(mx.softmax(scale * queries @ keys.swapaxes(-1, -2) + bias, axis=-1))
        return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask)

    with monkeypatch.context() as patched:
        patched.setattr(importlib.import_module(type(model).__module__), "scaled_dot_product_attention", attend)
        caches = native.make_prompt_cache(model)
        for cache in caches:
            if isinstance(cache, native.KVCache):
                monkeypatch.setattr(cache, "make_mask", partial(causal_mask, cache))
        run(model, caches, length, count)
    return np.array(calls[len(calls) // 2])[0]


def causal_mask(cache, N, **_):
    return create_causal_mask(N, cache.offset)


@pytest.mark.parametrize("chunks", [(64,), pytest.param((1,) * 64, marks=pytest.mark.full)])
def test_captured_queries_keep_no_keys_in_memory(chunks):
    model = build("deepseek_v3")
    evict = EvictConfig("recency:trigger=8", 150, recall=64)
    with compressed_attention(model):
        caches = make_prompt_cache(model, KVConfig(key="tq4", value="q8", evict=evict, sinks=4, window=64))
        run(model, caches, 250)
        held = []
        for captured in ([], [0, 1]):
            twin = copy.deepcopy(caches)
            layer_group_of(twin).capture_queries(captured, rounds=False)
            gc.collect()  # also what earlier tests left
            before = mx.get_active_memory()
            mx.eval(run(model, twin, *chunks, start=250), [cache.state for cache in twin])
            gc.collect()
            held.append(mx.get_active_memory() - before)
    queries = 2 * 4 * 64 * (64 + 32) * 4
    assert held[1] - held[0] < 4 * queries, (held, queries)


def test_a_batch_that_captures_queries_runs_one_token_at_a_time():
    evict = EvictConfig("recency:trigger=8", 150, recall=64)
    config = KVConfig(key="q8", value="fp16", evict=evict, sinks=4, window=64)
    with compressed_attention(MODEL):
        caches = make_prompt_cache(MODEL, config)
        run(MODEL, caches, 250)
        together = [cache.merge([cache]) for cache in caches]
        together[0].rows[0].group.capture_queries([0, 1], rounds=True)
        with pytest.raises(ConfigError, match="passes of one token, and this one has 3"):
            run(MODEL, together, 3, start=250)
        assert together[0].rows[0].offset == 250
        run(MODEL, together, 1, start=250)


def test_rows_of_a_batch_search_the_archive_while_they_decode():
    evict = EvictConfig("recency:trigger=8", 150, recall=64)
    config = KVConfig(key="q8", value="fp16", evict=evict, sinks=4, window=64)
    lengths, found = (250, 300), []
    with compressed_attention(MODEL):
        alone = [make_prompt_cache(MODEL, config) for _ in lengths]
        for caches, length in zip(alone, lengths, strict=True):
            run(MODEL, caches, length - 10, 10)
        together = [rows[0].merge(list(rows)) for rows in zip(*alone, strict=True)]
        rows = [[layer.rows[i] for layer in together] for i in range(len(lengths))]
        for caches in (*alone, *rows):
            caches[0].group.capture_queries([0, 1], rounds=True)
        for step in range(12):
            tokens = mx.array([[TOKENS[length + step]] for length in lengths])
            expected = mx.concatenate([MODEL(tokens[i : i + 1], cache=caches) for i, caches in enumerate(alone)])
            assert mx.abs(MODEL(tokens, cache=together) - expected).max() < 1e-4
        for caches in (*alone, *rows):
            selection = caches[0].group.search_archive(caches, 12, 64)
            found.append([(scored.block.positions[0], scored.score) for scored in selection.ranked])
    assert len(found[0]) > 1
    assert np.allclose(found[0], found[2], rtol=1e-3)
    assert np.allclose(found[1], found[3], rtol=1e-3)
