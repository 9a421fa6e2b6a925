"""Caches of sorted keys learn their groups from the first keys and queries, and keep them wherever they go."""

import mlx.core as mx
import numpy as np
import pytest
from zoo import build

from cache.test_headwise import fed, headwise
from cache.tools import (
    DIM,
    HEADS,
    PAIRS,
    PREFIX,
    WINDOW,
    check_attention,
    check_copies,
    error,
    exact_attention,
    feed,
    filled,
    make_cache,
    make_spec,
    random,
    same_bits,
    uneven,
)
from mlx_tq.cache.batch import BatchView
from mlx_tq.cache.normalizer import SKIP
from mlx_tq.config import KVConfig
from mlx_tq.errors import ConfigError
from mlx_tq.kernels import backend
from mlx_tq.prompt_cache.compressed import plan_caches

LENGTH, LEARNED = 300, 128
SCALE = DIM**-0.5
KEYS, VALUES = uneven(LENGTH)


@pytest.fixture(autouse=True, params=["cpu", "reference"])
def _backend(request):
    with backend.using(request.param):
        yield


def groups_of(cache):
    return cache.keys_and_values()[0].view.regions.layout.key.groups


@pytest.mark.parametrize("chunks", [[1] * LENGTH, [31, 33, 64, 1, 171], [100, 150, 50]], ids=len)
def test_chunks_change_nothing(chunks):
    spec = make_spec("stcq3", "tcq2", normalize=True)
    whole, parts = filled(spec, KEYS, VALUES), filled(spec, KEYS, VALUES, chunks)
    assert same_bits(whole.state, parts.state)
    assert whole.nbytes == parts.nbytes


def test_groups_are_those_of_the_first_normalized_keys():
    cache = filled(make_spec("stcq2", "tq4", normalize=True), KEYS, VALUES)
    scale = np.array(cache.state["normalizer"]["scale"], np.float64)[:, :, None]
    first = np.array(KEYS[:, :, SKIP:LEARNED].astype(mx.float32), np.float64)
    energy = ((first - first.mean(axis=2, keepdims=True)) * scale).var(axis=2)[0]
    for a, b in PAIRS:
        energy[:, [a, b]] = energy[:, [a, b]].mean(axis=1, keepdims=True)
    order = groups_of(cache).order[0].astype(int)
    assert (np.diff(np.take_along_axis(energy, order, axis=1), axis=1) <= 1e-3 * energy.max()).all()
    assert not np.array_equal(order[0], order[1])


@pytest.mark.parametrize("key", [pytest.param("stcq2", marks=pytest.mark.full), "stcq3~tq2"])
def test_groups_go_with_a_state_a_file_a_fork_and_a_batch(key, tmp_path):
    """Also of a cache that has not learned them, and of one that may have to forget them."""
    shared = {"sinks": PREFIX, "window": WINDOW, "recent": 64}
    config, cache = KVConfig(key=key, value="tcq2", **shared), make_cache(key, "tcq2", normalize=True, **shared)
    check_copies(cache, config, KEYS, VALUES, tmp_path / "x.safetensors")


def test_after_a_trim_to_nothing_it_learns_anew():
    spec, others = make_spec("stcq2", "tq4", normalize=True), uneven(LENGTH, seed=50)
    cache = filled(spec, KEYS, VALUES)
    before = cache.state["learned"]["key"]
    cache.trim(LENGTH)
    feed(cache, *others, [LENGTH])
    assert same_bits(cache.state, filled(spec, *others).state)
    assert not mx.array_equal(cache.state["learned"]["key"], before)


def test_without_queries_all_groups_are_equal():
    """Which dims queries read is then unknown: the widths of energies alone could drop what they read most."""
    cache = make_cache("stcq2", "tq4", normalize=True)
    cache.append(KEYS, VALUES)
    cache.stop_learning()
    assert "learned" not in cache.state
    assert groups_of(cache).widths.tolist() == [[[2, 2]]]
    view = cache.append(KEYS[:, :, :1], VALUES[:, :, :1])
    queries = random(1, heads=2 * HEADS, dtype=mx.float32)
    check_attention(view, queries, view.attend(queries, SCALE, None, None), SCALE)


@pytest.mark.parametrize("length", [1, 8, 40])
def test_attention(length):
    cache = filled(make_spec("stcq3", "tcq3", normalize=True), KEYS[:, :, :-length], VALUES[:, :, :-length])
    view = cache.append(KEYS[:, :, -length:], VALUES[:, :, -length:])
    queries = random(length, heads=2 * HEADS, dtype=mx.float32, seed=3)
    mask = "causal" if length > 1 else None
    check_attention_of(view, queries, view.attend(queries, SCALE, mask, None))


def check_attention_of(view, queries, out):
    """As `check_attention`, for normalized keys."""
    keys, values = (np.array(x.astype(mx.float32), np.float64) for x in view.materialize())
    room = 2e-3 * np.abs(values).max()  # keys are rounded to fp16
    assert error(out, exact_attention(queries, keys, values, SCALE)) < room


def test_sequences_with_other_groups_attend_together():
    spec, views = make_spec("stcq2", "tcq2", normalize=True), []
    for seed, length in ((0, 280), (60, 200)):
        keys, values = uneven(LENGTH, seed=seed)
        cache = filled(spec, keys[:, :, :length], values[:, :, :length])
        views.append(cache.append(keys[:, :, length : length + 1], values[:, :, length : length + 1]))
    assert views[0].regions.layout is not views[1].regions.layout
    queries = random(1, batch=2, heads=2 * HEADS, dtype=mx.float32, seed=5)
    batch = BatchView(views, [1, 1], (HEADS, DIM), (HEADS, DIM))
    assert batch._steps_together(queries)
    together = batch.attend(queries, SCALE, None, None)
    for i, view in enumerate(views):
        alone = view.attend(queries[i : i + 1], SCALE, None, None)
        np.testing.assert_allclose(np.array(together[i : i + 1]), np.array(alone), atol=1e-5)
        check_attention_of(view, queries[i : i + 1], alone)


@pytest.mark.parametrize("kept", [(2,), (0, 3)])
def test_heads_that_keep_other_tokens(kept):
    keys, values = (random(500, heads=4, dtype=mx.float32, seed=seed) for seed in (0, 1))
    keys = keys * mx.exp(0.7 * random(1, heads=4, dtype=mx.float32, seed=2))
    cache = fed(headwise(kept, key="stcq3", value="tq4", normalize=True), keys[:, :, :-1], values[:, :, :-1])
    view = cache.append(keys[:, :, -1:], values[:, :, -1:])
    queries = random(1, heads=8, dtype=mx.float32, seed=4)
    out = view.attend(queries, SCALE, None, None)
    for head in range(4):
        members = slice(2 * head, 2 * head + 2)
        stored = [np.array(x.astype(mx.float32), np.float64) for x in view.regions.head(head).decode()]
        assert error(out[:, members], exact_attention(queries[:, members], *stored, SCALE)) < 1e-4
    rows, layout, _ = cache.packed_rows()
    assert layout.key.decode(layout.keys(rows)).shape[1] == 4 - len(kept)


@pytest.mark.parametrize(
    ("name", "why"), [("deepseek_v3", "latents are values too"), ("starcoder2", "48 dims are no multiple of 32")]
)
def test_layers_that_cannot_sort_take_as_many_bits(name, why):
    layers = plan_caches(build(name), KVConfig(key="stcq3", value="tq4")).layers
    assert {layer.spec.key for layer in layers} == {"tcq3"}
    assert all(f"keys not sorted: {why}" in layer.note for layer in layers)


def test_where_they_are_refused(embedded):
    for changes, match in (
        ({"key": "stcq2", "normalize": False}, "key is 'stcq2', which sorts dims by normalized keys, and normalize is"),
        ({"value": "stcq3"}, "value is 'stcq3', which is for keys only"),
    ):
        with pytest.raises(ConfigError, match=match):
            KVConfig(**changes)
    with pytest.raises(ConfigError, match="stcq2 learns from keys as they first came; cold keys are decoded ones"):
        plan_caches(embedded[0], KVConfig(key="tq4~stcq2"))
