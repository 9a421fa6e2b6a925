"""Where the tokens of a compressed cache are: `sinks | body | tail`, their bytes, and what mlx-lm asks about them.

What any history leads to is shown in tests/property.
"""

import copy

import mlx.core as mx
import numpy as np
import pytest

from cache.tools import (
    DIM,
    HEADS,
    PREFIX,
    WINDOW,
    check_copies,
    feed,
    filled,
    leaves,
    make_cache,
    make_spec,
    random,
    random_pair,
    same_bits,
    uneven,
)
from mlx_tq.cache.batch import BatchCompressedKVCache
from mlx_tq.cache.layer import CompressedKVCache
from mlx_tq.cache.packed_rows import STEP
from mlx_tq.config import BLOCK, KVConfig
from mlx_tq.errors import CacheFormatError, ConfigError

LENGTH = 300
KEYS, VALUES = random_pair(LENGTH)
OTHERS = [random_pair(LENGTH, seed=9), random_pair(LENGTH, seed=10)]


def stored(length, **changes):
    cache = make_cache(**changes)
    feed(cache, KEYS, VALUES, [length] if length else [])
    return cache


def test_empty_cache():
    cache = make_cache()
    assert (cache.offset, cache.size(), cache.packed_tokens, list(cache.positions)) == (0, 0, 0, [])
    assert cache.empty()
    assert cache.is_trimmable()
    assert (cache.trim(5), cache.trim(0)) == (0, 0)
    assert cache.nbytes == 8  # the two health counters
    with pytest.raises(CacheFormatError, match="the cache is empty; run the model on a prompt first"):
        cache.keys_and_values()
    with pytest.raises(CacheFormatError, match=r"nothing of the cache is packed yet\. Read more tokens first"):
        stored(50).packed_rows()


@pytest.mark.parametrize("count", [-1, 1.5, None])
def test_a_trim_is_a_count(count):
    cache = stored(40)
    with pytest.raises(ConfigError, match="it must be a whole number from 0 on"):
        cache.trim(count)
    assert cache.trim(50) == 40
    assert not cache.empty()  # as mlx-lm's KVCache: the buffers are there


@pytest.mark.parametrize("key", [pytest.param("tq35", marks=pytest.mark.full), "tq35~spectral8"])
@pytest.mark.parametrize("chunks", [[1] * LENGTH, [31, 33, 64, 1, 171], [100, 150, 50], [8] * 37 + [4]], ids=len)
@pytest.mark.parametrize("normalize", [False, True], ids=["plain", "normalized"])
def test_chunks_change_nothing(key, chunks, normalize):
    spec = make_spec(key, "tq25", recent=64, normalize=normalize)
    whole, parts = filled(spec, KEYS, VALUES), filled(spec, KEYS, VALUES, chunks)
    assert same_bits(whole.state, parts.state)
    assert whole.nbytes == parts.nbytes


@pytest.mark.parametrize("normalize", [False, True], ids=["plain", "normalized"])
def test_rows_do_not_depend_on_their_neighbours(normalize):
    keys, values = random_pair(200, batch=3)
    spec = make_spec(normalize=normalize)
    together = filled(spec, keys, values, [100, 100])
    for row in range(3):
        alone = filled(spec, keys[row : row + 1], values[row : row + 1], [200])
        for name, array in leaves(alone.state).items():
            if isinstance(array, mx.array) and array.ndim > 2:
                assert mx.array_equal(array, leaves(together.state)[name][row : row + 1])


def arrays_of(cache):
    """All arrays of a cache but those that its formats learned."""
    held = [*vars(cache).values(), *vars(cache._normalizer).values(), cache._rows._unshared.rows]
    return [value for value in held if isinstance(value, mx.array)] + [
        array for value in held if isinstance(value, tuple) for array in value
    ]


@pytest.mark.parametrize("formats", [("q8", "tq4"), ("tq35", "tq25")])
@pytest.mark.parametrize("normalize", [False, True], ids=["plain", "normalized"])
def test_nbytes_are_the_bytes_of_the_arrays(formats, normalize):
    for length in (1, 55, 56, 140, LENGTH):
        cache = filled(make_spec(*formats, normalize=normalize), KEYS[:, :, :length], VALUES[:, :, :length])
        if cache.packed_tokens > 100:
            kept = np.arange(50, 90)
            cache.compact(kept, cache.packed_positions[kept])
        learned = sum(leaf.nbytes for leaf in learned_of(cache) if leaf is not None)
        assert cache.nbytes == sum(array.nbytes for array in arrays_of(cache)) + learned


def test_buffers_of_the_models_type_do_not_grow():
    """The body does, by blocks of 32 rows and from STEP on by STEP."""
    cache = filled(make_spec(), KEYS[:, :, :100], VALUES[:, :, :100])
    row = HEADS * cache.spec.layout(DIM, DIM, mx.float16).nbytes
    beside = cache.nbytes - row * 32 * -(-cache.packed_tokens // 32)
    for _ in range(LENGTH - 100):
        feed(cache, KEYS, VALUES, [1])
        step = 32 if cache.packed_tokens <= STEP else STEP
        assert cache.nbytes == beside + row * step * -(-cache.packed_tokens // step)


@pytest.mark.parametrize("gaps", [False, True])
def test_masks_of_a_cache_with_gaps_go_by_position(gaps):
    cache = stored(100)
    body = cache.packed_positions
    if gaps:
        cache.compact(np.arange(0, len(body), 2), body[::2])
    assert (cache.make_mask(1), cache.make_mask(2)) == (None, "causal")
    keys = [*cache.positions.tolist(), 100, 101, 102]
    for size in (None, 10, 50):
        wanted = [[key <= q and (size is None or key > q - size) for key in keys] for q in (100, 101, 102)]
        assert cache.make_mask(3, return_array=True, window_size=size).tolist() == wanted


def test_handles_look_like_arrays_as_far_as_models_look():
    keys, values = random_pair(90, dims=(96, 64))
    cache = CompressedKVCache(make_spec())
    key, value = cache.update_and_fetch(keys, values)
    assert (key.shape, value.shape) == ((1, HEADS, 90, 96), (1, HEADS, 90, 64))
    assert (key.ndim, value.ndim) == (4, 4)
    assert key.dtype == mx.float16
    wide = key.astype(mx.float32)
    assert (wide.dtype, wide.view) == (mx.float32, key.view)
    assert mx.array_equal(wide.materialize(), keys.astype(mx.float32))
    assert not hasattr(cache, "bits")
    assert not hasattr(cache, "to_quantized")


COPIES = {
    "fork": CompressedKVCache.fork,
    "deepcopy": copy.deepcopy,
    "state": lambda cache: CompressedKVCache.from_state(cache.state),
    "merge": lambda cache: BatchCompressedKVCache.merge([cache]).rows[0],
    "extract": lambda cache: BatchCompressedKVCache([cache]).extract(0),
}


def frozen(cache):
    """The state as NumPy arrays: safe from whatever the cache does later."""
    return {name: np.array(x) if isinstance(x, mx.array) else x for name, x in leaves(cache.state).items()}


def rewrite(cache, keys, values):
    """Trim into the body, then write other tokens over what was there, across packings."""
    cache.trim(90)
    feed(cache, keys, values, [1] * 5)
    feed(cache, keys, values, [70])
    mx.eval(cache.state)


@pytest.mark.parametrize("name", COPIES)
def test_no_change_crosses(name):
    """Also where nothing has been computed yet."""
    for length in (3, 56, 200):
        for evaluated in (True, False):
            cache = stored(length)
            if evaluated:
                mx.eval(cache.state)
            twin = COPIES[name](cache)
            for one, other, tokens in ((cache, twin, OTHERS[0]), (twin, cache, OTHERS[1])):
                before = frozen(one)
                rewrite(other, *tokens)
                assert all(np.array_equal(x, before[leaf]) for leaf, x in frozen(one).items())


@pytest.mark.parametrize("name", COPIES)
def test_copies_keep_the_counters_and_the_buffers(name):
    loud = mx.array(KEYS).astype(mx.float32)
    loud[0, 0, [10, 50], 0] = 1e6
    cache = filled(make_spec(), loud[:, :, :150], VALUES[:, :, :150])
    twin = COPIES[name](cache)
    assert twin.clamped == cache.clamped == 2
    assert (twin.nbytes == cache.nbytes) == (name != "state")  # which has no spare capacity


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
    state = cache.state
    assert state["keys"].shape[2] == state["values"].shape[2] == 4 + 100 - 32  # with one block of originals
    assert state["rows"].shape[2] == cache.packed_tokens == 60


# Formats that learn from a cache's first tokens: what they found stays with the cache, wherever it goes.


def learned_of(cache):
    learned = cache.state.get("learned", {})
    return [learned.get(side) for side in ("key", "value")]


@pytest.mark.parametrize("pair", [("tq35", "q8"), ("q8", "tq25"), ("tq35", "tq25")])
def test_dims_are_ordered_by_the_prefix_and_the_first_block(pair):
    keys, values = uneven(LENGTH)
    spec = make_spec(*pair)
    cache = filled(spec, keys, values)
    for name, x, order in zip(pair, (keys, values), learned_of(cache), strict=True):
        if name == "q8":
            assert order is None
            continue
        x = np.array(x[:, :, : spec.sinks + BLOCK], np.float64)
        energy = (x**2 / (x**2).sum(axis=-1, keepdims=True)).sum(axis=2)
        ordered = np.take_along_axis(energy, np.array(order).astype(int), axis=-1)
        assert (np.diff(ordered, axis=-1) <= 1e-5).all()
        assert len({tuple(head) for head in np.array(order)[0].tolist()}) == 2  # each head has its own


@pytest.mark.parametrize("key", ["tq35", "q8~tq3", "tq35~tq4", "fp16~q8_0"])
@pytest.mark.parametrize("normalize", [pytest.param(False, marks=pytest.mark.full), True], ids=["plain", "normalized"])
def test_formats_through_state_fork_file_and_batch(key, normalize, tmp_path):
    """Also of a cache that has not learned what formats and weights learn, and of one that may have to forget it."""
    keys, values = uneven(LENGTH)
    shared = {"sinks": PREFIX, "window": WINDOW, "recent": 64, "normalize": normalize}
    config, cache = KVConfig(key=key, value="tq25", **shared), make_cache(key, "tq25", **shared)
    check_copies(cache, config, keys, values, tmp_path / "x.safetensors")


def test_after_a_trim_to_nothing_packed_it_learns_anew():
    keys, values = uneven(LENGTH)
    others = uneven(LENGTH, seed=50)
    cache = filled(make_spec("tq35", "tq25"), keys, values)
    before = learned_of(cache)[0]
    cache.trim(LENGTH)
    feed(cache, *others, [LENGTH])
    assert same_bits(cache.state, filled(make_spec("tq35", "tq25"), *others).state)
    assert not mx.array_equal(learned_of(cache)[0], before)
