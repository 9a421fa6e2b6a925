"""Formats that learn from a cache's first tokens: what they found stays with the cache, wherever it goes."""

import mlx.core as mx
import numpy as np
import pytest

from cache.tools import DIM, check_attention, copies, feed, filled, leaves, make_spec, random, same_bits
from mlx_tq.config import BLOCK, KVConfig

LENGTH = 200
SCALE = DIM**-0.5


def uneven(count, *, batch=1, seed=0):
    """Keys and values whose dims differ in energy, otherwise in each head."""
    pair = []
    for side in range(2):
        scale = random(1, batch=batch, dtype=mx.float32, seed=100 + seed + side)
        pair.append((random(count, batch=batch, seed=seed + side) * mx.exp(scale)).astype(mx.float16))
    return pair


def learned(cache):
    return [leaves(cache.state)[name] for name in ("4", "5")]


@pytest.mark.parametrize("pair", [("tq35", "q8"), ("q8", "tq25"), ("tq35", "tq25")])
def test_dims_are_ordered_by_the_prefix_and_the_first_block(pair):
    keys, values = uneven(LENGTH)
    spec = make_spec(*pair)
    cache = filled(spec, keys, values)
    for name, x, order in zip(pair, (keys, values), learned(cache), strict=True):
        if name == "q8":
            assert order is None
            continue
        x = np.array(x[:, :, : spec.prefix + BLOCK], np.float64)
        energy = (x**2 / (x**2).sum(axis=-1, keepdims=True)).sum(axis=2)
        ordered = np.take_along_axis(energy, np.array(order).astype(int), axis=-1)
        assert (np.diff(ordered, axis=-1) <= 1e-5).all()
        assert len({tuple(head) for head in np.array(order)[0].tolist()}) == 2  # each head has its own


@pytest.mark.parametrize("length", [1, 5, 40])
def test_attention_with_grouped_queries_and_batches(length):
    keys, values = uneven(LENGTH, batch=2)
    cache = filled(make_spec("tq35", "tq25"), keys[:, :, :-length], values[:, :, :-length])
    view = cache.append(keys[:, :, -length:], values[:, :, -length:])
    queries = random(length, batch=2, heads=6, seed=5)
    out = view.attend(queries, SCALE, None if length == 1 else "causal", None)
    check_attention(view, queries, out, SCALE)


def test_through_state_fork_and_file(tmp_path):
    keys, values = uneven(LENGTH)
    config = KVConfig(key="tq35", value="tq25", prefix=4, window=24)
    cache = filled(make_spec("tq35", "tq25"), keys[:, :, :100], values[:, :, :100])
    twins = copies(cache, config, tmp_path / "x.safetensors")
    for twin in twins:
        assert same_bits(twin.state, cache.state)
    for each in (cache, *twins):
        feed(each, keys, values, [7, 40, 53])
    assert all(same_bits(twin.state, cache.state) for twin in twins)


def test_after_a_trim_to_nothing_packed_it_learns_anew():
    keys, values = uneven(LENGTH)
    others = uneven(LENGTH, seed=50)
    cache = filled(make_spec("tq35", "tq25"), keys, values)
    cache.trim(LENGTH)
    feed(cache, *others, [LENGTH])
    fresh = filled(make_spec("tq35", "tq25"), *others)
    assert same_bits(cache.state, fresh.state)
    assert not mx.array_equal(learned(cache)[0], learned(filled(make_spec("tq35", "tq25"), keys, values))[0])


def test_bytes_count_what_was_learned():
    keys, values = uneven(LENGTH)
    cache = filled(make_spec("tq35", "tq25"), keys, values)
    arrays = [leaf for leaf in leaves(cache.state).values() if isinstance(leaf, mx.array)]
    assert cache.nbytes >= sum(array.nbytes for array in arrays)
    assert sum(order.nbytes for order in learned(cache)) == 2 * 2 * DIM * 2
