"""Formats of layers by what they lose: the best within their bits, measured as any cache is measured."""

from itertools import product

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from zoo import build

import mlx_tq
from mlx_tq.cli.inputs import load_text
from mlx_tq.cli.model_calibration import measure_losses
from mlx_tq.config import KVConfig
from mlx_tq.errors import CacheFormatError, ConfigError
from mlx_tq.integration.probe import model_facts
from mlx_tq.kernels import backend
from mlx_tq.models import fingerprint
from mlx_tq.prompt_cache.allocation import allocate, solve_knapsack
from mlx_tq.prompt_cache.compressed import plan_caches
from mlx_tq.prompt_cache.layer_group import compressed_caches
from mlx_tq.prompt_cache.measurements import Losses, find_losses, losses_path, save_measurements

MEASURED, FROM = 512, 192  # tokens that are read, and after which they count


@st.composite
def knapsacks(draw):
    """Sizes and losses [layers, choices], and room for at least the smallest."""
    layers, choices = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    shape = st.lists(st.lists(st.integers(1, 9), min_size=choices, max_size=choices), min_size=layers, max_size=layers)
    sizes, worth = np.array(draw(shape)), np.array(draw(shape)) / 7
    return sizes, worth, int(sizes.min(axis=1).sum()) + draw(st.integers(0, 12))


@given(knapsacks())
@settings(deadline=None)
def test_no_other_choice_within_the_room_loses_less(case):
    sizes, worth, room = case
    lines = range(len(sizes))

    def total(table, chosen):
        return sum(table[line, choice] for line, choice in zip(lines, chosen, strict=True))

    found = solve_knapsack(sizes, worth, room)
    allowed = [some for some in product(range(sizes.shape[1]), repeat=len(sizes)) if total(sizes, some) <= room]
    assert total(sizes, found) <= room
    assert total(worth, found) == pytest.approx(min(total(worth, some) for some in allowed))


@pytest.mark.parametrize("bits", [4.2, *(pytest.param(bits, marks=pytest.mark.full) for bits in (2.5, 6.0))])
def test_the_bits_are_those_of_the_arrays(embedded, bits):
    model, _ = embedded
    plan = plan_caches(model, KVConfig(mean_bits=bits, sinks=16, window=32))
    assert plan.config.mean_bits is None, "a file names the formats themselves"
    assert KVConfig.from_dict(plan.config.to_dict()) == plan.config
    with mlx_tq.compressed_attention(model):
        caches = mlx_tq.make_prompt_cache(model, plan.config)
        model(mx.arange(500)[None], cache=caches)
    layers = compressed_caches(caches)
    # Whole means for 128 tokens, of which the last are not all packed; weights are a layer's, not a token's.
    stored = sum(8 * layer.packed_nbytes for layer in layers) / (layers[0].packed_tokens * 6 * 2 * 256)
    assert plan.allocation.bits <= bits
    assert stored == pytest.approx(plan.allocation.bits, abs=0.1)
    assert plan.allocation.bits > bits - 0.2


@pytest.mark.parametrize("bits", [5.5, 6.5])
def test_the_bits_of_latents_are_those_of_the_plan(bits):
    """A plan stores the rotated parts in no less than q8, at which their losses were measured."""
    model = build("deepseek_v3")
    facts = model_facts(model)
    losses = Losses((0.1,) * len(facts.slots), (0.2,) * len(facts.slots), 320)
    config, allocation = allocate(facts, KVConfig(mean_bits=bits), bits, losses)
    plan = plan_caches(model, config)
    dims = sum(slot.key_dim + slot.value_dim for slot in facts.slots)
    stored = sum(8 * layer.row_nbytes for layer in plan.layers) / dims
    assert [layer.spec.value for layer in plan.layers] == ["q8"] * len(plan.layers)
    assert bits - 1 < stored <= bits
    assert stored == pytest.approx(allocation.bits)
    assert allocation.loss >= 0.2 * len(facts.slots)


def test_keys_that_are_not_normalized_are_not_sorted(embedded):
    key = plan_caches(embedded[0], KVConfig(mean_bits=3, normalize=False)).config.key
    assert "tcq" in key
    assert "stcq" not in key


def loss_above_rounding(model, tokenizer, key, value):
    """Return the KL divergence of the text's predictions, less that of q8/q8, from log-probabilities in float64."""
    ids = mx.array(tokenizer.encode(load_text())[:MEASURED])

    def predictions(config):
        with mlx_tq.compressed_attention(model):
            caches = mlx_tq.make_prompt_cache(model, config)
            logits = [model(ids[None, at : at + 64], cache=caches)[0] for at in range(0, MEASURED, 64)]
        logits = np.array(mx.concatenate(logits).astype(mx.float32), np.float64)[FROM:]
        logits -= logits.max(axis=-1, keepdims=True)
        return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))

    own = predictions(KVConfig.from_profile("off"))
    lost, rounding = (
        (np.exp(own) * (own - predictions(KVConfig(*formats, sinks=32, window=32)))).sum(axis=-1).mean()
        for formats in ((key, value), ("q8", "q8"))
    )
    return lost - rounding


@pytest.fixture
def mlx_operations():
    """Round bfloat16 where the shipped losses were rounded: kernels round elsewhere."""
    with backend.using("reference"):
        yield


@pytest.mark.full
@pytest.mark.usefixtures("mlx_operations")
def test_what_a_layer_loses_is_what_it_costs_alone(embedded):
    """Its values', against log-probabilities in float64; the file inside the package holds what is measured here."""
    model, tokenizer = embedded
    shipped = find_losses(fingerprint(model))
    value = "+".join("tcq3" if layer == 4 else "fp16" for layer in range(6))
    assert loss_above_rounding(model, tokenizer, "fp16", value) == pytest.approx(shipped.values[4], rel=0.05)
    assert shipped.values[4] == max(shipped.values)


@pytest.mark.full
def test_losses_of_latents(embedded):
    """The latents of the first of two layers lose most; the parts that are rotated stay at 8 bits."""
    tokenizer = embedded[1]
    model = build("deepseek_v3", vocab_size=len(tokenizer.get_vocab()) + 8)
    found = measure_losses(model, tokenizer, load_text(), lambda done, total: None)
    assert loss_above_rounding(model, tokenizer, "tcq3+fp16", "fp16") == pytest.approx(found.keys[0], rel=0.01)
    assert max(found.keys[1], *found.values) < 0.01 * found.keys[0]


@pytest.mark.full
@pytest.mark.usefixtures("mlx_operations")
def test_losses_of_all_layers_are_measured_as_they_are_shipped(embedded):
    model, tokenizer = embedded
    seen = []
    found = measure_losses(model, tokenizer, load_text(), lambda done, total: seen.append((done, total)))
    shipped = find_losses(fingerprint(model))
    assert found.tokens == shipped.tokens == MEASURED - FROM
    assert (found.keys, found.values) == (pytest.approx(shipped.keys, rel=0.1), pytest.approx(shipped.values, rel=0.1))
    assert seen[-1] == (13 * MEASURED, 13 * MEASURED)


def test_a_file_names_the_formats_that_were_chosen(embedded, monkeypatch, tmp_path):
    """Nobody who goes on with it has to know what layers lose; who says other bits is refused."""
    model, tokenizer = embedded
    config, file, talk = KVConfig(mean_bits=4.2, sinks=16, window=32), tmp_path / "a.safetensors", tmp_path / "b"
    chosen = plan_caches(model, config).config
    with mlx_tq.compressed_attention(model):
        caches = mlx_tq.make_prompt_cache(model, config)
        model(mx.arange(300)[None], cache=caches)
    mlx_tq.save_prompt_cache(file, caches, model=model, config=config)
    with mlx_tq.Session(model, tokenizer, config, max_tokens=2) as session:
        assert list(session.respond("The code is 4."))
        session.save(talk)
    assert mlx_tq.load_prompt_cache(file, model=model, config=config).config == chosen
    with pytest.raises(CacheFormatError, match="made with another configuration: key is 'stcq4"):
        mlx_tq.load_prompt_cache(file, model=model, config=KVConfig(mean_bits=3, sinks=16, window=32))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kept = losses_path(fingerprint(model))
    kept.parent.mkdir()
    save_measurements(kept, Losses((0.1,), (0.2,), 320))  # by which nothing can be chosen
    assert mlx_tq.load_prompt_cache(file, model=model).config == chosen
    with mlx_tq.Session(model, tokenizer, max_tokens=2) as session:
        session.load(talk)
        assert session.config == chosen
        assert list(session.respond("What is it?"))


def test_what_cannot_be_is_said(embedded, monkeypatch, tmp_path):
    model, tokenizer = embedded
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for settings_, says in (
        ({"mean_bits": 1.5}, "mean_bits is 1.5; qwen3 takes 2.19 at least, with stcq2/tcq2 in every layer"),
        ({"mean_bits": 4.2, "key": "tq3"}, "mean_bits is 4.2 and chooses the formats of all layers; key is 'tq3'"),
        ({"mean_bits": 4.2, "boundary": 1}, "of all layers; boundary is 1 and chooses some too. Drop one of the two"),
        ({"mean_bits": 4.2, "outlier": 0.0}, "of all layers; outlier is 0.0"),
        ({"value": "tq4+tq3"}, "value names 2 formats, and the model has 6 layers"),
        ({"value": "tq4+spectral8"}, "value is 'spectral8', which is for keys only"),
    ):
        with pytest.raises(ConfigError, match=says):
            plan_caches(model, KVConfig(**settings_))
    with pytest.raises(ConfigError, match="measured on 512 tokens; the text has 2"):
        measure_losses(model, tokenizer, "a text")
    kept = losses_path(fingerprint(model))
    kept.parent.mkdir()
    save_measurements(kept, Losses((0.1,), (0.2,), 320))
    with pytest.raises(ConfigError, match="of 1 layers, and qwen3 stores 6"):
        plan_caches(model, KVConfig(mean_bits=4.2))
    for damaged in ("{", '{"keys": [-1], "values": [1], "tokens": 3}', '{"keys": [1], "values": [], "tokens": 3}'):
        kept.write_text(damaged)
        with pytest.raises(CacheFormatError, match="is damaged"):
            plan_caches(model, KVConfig(mean_bits=4.2))
