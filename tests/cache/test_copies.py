"""Copies of a cache: forks, deep copies and states are equal, and no change crosses from one to the other."""

import copy

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import cache as native

from cache.tools import feed, filled, leaves, make_cache, make_spec, random, random_pair, same_bits
from mlx_tq.cache import BatchCompressedKVCache, CompressedKVCache

KEYS, VALUES = random_pair(220)
OTHERS = [random_pair(220, seed=9), random_pair(220, seed=10)]
LENGTHS = [0, 3, 40, 56, 200]


def through_state(cache):
    return CompressedKVCache.from_state(cache.state)


def through_merge(cache):
    return BatchCompressedKVCache.merge([cache]).rows[0]


def through_extract(cache):
    return BatchCompressedKVCache([cache]).extract(0)


COPIES = [CompressedKVCache.fork, copy.deepcopy, through_state, through_merge, through_extract]
everywhere = pytest.mark.parametrize("make", COPIES, ids=lambda make: make.__name__)


def stored(length):
    cache = make_cache()
    if length:
        feed(cache, KEYS, VALUES, [length])
    return cache


def frozen(cache):
    """The state as NumPy arrays: safe from whatever the cache does later."""
    return {name: np.array(x) if isinstance(x, mx.array) else x for name, x in leaves(cache.state).items()}


def unchanged(cache, before):
    return all(np.array_equal(x, before[name]) for name, x in frozen(cache).items())


@everywhere
@pytest.mark.parametrize("length", LENGTHS)
def test_copies_are_equal_and_continue_equally(make, length):
    cache = stored(length)
    twin = make(cache)
    assert twin is not cache
    assert twin.spec == cache.spec
    assert same_bits(twin.state, cache.state)
    assert (twin.offset, twin.empty(), twin.body_tokens) == (cache.offset, cache.empty(), cache.body_tokens)
    for one in (cache, twin):
        feed(one, KEYS, VALUES, [1, 8, 11])
        one.trim(9)
    assert same_bits(twin.state, cache.state)
    if make is not through_state:  # a state has no spare capacity
        assert twin.nbytes == cache.nbytes


@everywhere
@pytest.mark.parametrize("length", LENGTHS[1:])
@pytest.mark.parametrize("evaluated", [True, False])
def test_no_change_crosses(make, length, evaluated):
    cache = stored(length)
    if evaluated:
        mx.eval(cache.state)
    twin = make(cache)
    before = frozen(cache)
    rewrite(twin, *OTHERS[0])
    assert unchanged(cache, before)
    before = frozen(twin)
    rewrite(cache, *OTHERS[1])
    assert unchanged(twin, before)


@everywhere
def test_copies_keep_the_counters(make):
    loud = mx.array(KEYS).astype(mx.float32)
    loud[0, 0, [10, 50], 0] = 1e6
    cache = filled(make_spec(), loud[:, :, :150], VALUES[:, :, :150])
    assert make(cache).clamped == cache.clamped == 2


def rewrite(cache, keys, values):
    """Trim into the body, then write other tokens over what was there, across packings."""
    cache.trim(90)
    feed(cache, keys, values, [1] * 5)
    feed(cache, keys, values, [70])
    mx.eval(cache.state)


def test_a_view_outlives_its_cache():
    """What a step attends to stays what it was, although buffers are written in place."""
    cache = stored(100)
    (view,) = feed(cache, KEYS, VALUES, [1])
    queries = random(1, heads=4, seed=5)
    before = np.array(view.attend(queries, 0.125, None, None))
    rewrite(cache, *OTHERS[0])
    assert np.array_equal(np.array(view.attend(queries, 0.125, None, None)), before)


def test_state_has_no_spare_capacity():
    cache = stored(100)
    keys, values, rows, *_ = cache.state
    assert keys.shape[2] == values.shape[2] == 4 + 100 - 32  # one block of originals beside the tail
    assert rows.shape[2] == cache.body_tokens == 60


def test_a_state_round_trip_can_be_trimmed_as_before():
    never = filled(make_spec(), KEYS[:, :, :90], VALUES[:, :, :90])
    cache = through_state(filled(make_spec(), KEYS[:, :, :122], VALUES[:, :, :122]))
    cache.trim(32)
    for one in (never, cache):
        feed(one, KEYS, VALUES, [100])
    assert same_bits(never.state, cache.state)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("trimmed", [0, 20, 1000])
def test_files_of_mlx_lm_hold_our_caches(length, trimmed, tmp_path):
    caches = [stored(length), stored(200)]
    caches[0].trim(trimmed)
    path = str(tmp_path / "cache.safetensors")
    native.save_prompt_cache(path, caches, {"model": "tiny"})
    loaded, metadata = native.load_prompt_cache(path, return_metadata=True)
    assert metadata == {"model": "tiny"}
    for cache, again in zip(caches, loaded, strict=True):
        assert type(again) is CompressedKVCache
        assert same_bits(cache.state, again.state)
        for one in (cache, again):
            feed(one, *OTHERS[0], [20])
        assert same_bits(cache.state, again.state)
