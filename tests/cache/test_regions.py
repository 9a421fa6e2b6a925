"""Where the tokens of a compressed cache are: `prefix | body | tail`, their bytes, and what mlx-lm asks about them."""

import mlx.core as mx
import pytest

from cache.tools import DIM, HEADS, PREFIX, WINDOW, feed, filled, leaves, make_cache, make_spec, random_pair, same_bits
from mlx_tq.cache import CompressedKVCache
from mlx_tq.cache.compressed import STEP
from mlx_tq.errors import CacheFormatError

LENGTH = 300
KEYS, VALUES = random_pair(LENGTH)


def packed_by_rule(length, prefix=PREFIX, window=WINDOW):
    """The position before which tokens are packed: blocks of 32 logical positions older than the window."""
    return max(prefix, (length - window) // 32 * 32)


def test_empty_cache():
    cache = make_cache()
    assert (cache.offset, cache.size(), cache.body_tokens, list(cache.positions)) == (0, 0, 0, [])
    assert cache.empty()
    assert cache.is_trimmable()
    assert cache.trim(5) == 0
    assert cache.nbytes == 8  # the two health counters
    with pytest.raises(CacheFormatError, match="the cache is empty; run the model on a prompt first"):
        cache.keys_and_values()


@pytest.mark.parametrize("length", [1, PREFIX, PREFIX + 1, 55, 56, 57, 88, 120, LENGTH])
def test_lengths_and_regions(length):
    cache = filled(make_spec(), KEYS[:, :, :length], VALUES[:, :, :length])
    assert (cache.offset, cache.size(), list(cache.positions)) == (length, length, list(range(length)))
    assert not cache.empty()
    assert cache.body_tokens == packed_by_rule(length) - PREFIX


def test_a_block_leaves_once_it_is_older_than_the_window():
    cache = make_cache()
    seen = {}
    for length in range(1, 130):
        feed(cache, KEYS, VALUES, [1])
        seen.setdefault(cache.body_tokens, length)
    assert seen == {0: 1, 28: 32 + WINDOW, 60: 64 + WINDOW, 92: 96 + WINDOW}


def test_regions_hold_their_tokens():
    (view,) = feed(make_cache("fp16", "fp16"), KEYS, VALUES, [3])
    assert (view.body, view.keys.shape) == (0, (1, HEADS, 3, DIM))
    cache = filled(make_spec("fp16", "fp16"), KEYS[:, :, :200], VALUES[:, :, :200])
    (view,) = feed(cache, KEYS, VALUES, [1])
    assert (view.prefix, view.body) == (PREFIX, 160 - PREFIX)
    assert mx.array_equal(view.keys, mx.concatenate([KEYS[:, :, :PREFIX], KEYS[:, :, 160:201]], axis=2))
    keys, values = view.materialize()
    assert mx.array_equal(keys, KEYS[:, :, :201])
    assert mx.array_equal(values, VALUES[:, :, :201])


@pytest.mark.parametrize(("key", "value"), [("q8", "tq4"), ("tq4", "tq4"), ("tq3", "tq2"), ("fp16", "q8")])
@pytest.mark.parametrize("length", [60, 200])
def test_body_is_what_the_codec_makes(key, value, length):
    cache = filled(make_spec(key, value), KEYS[:, :, :length], VALUES[:, :, :length], [50, length - 50])
    fetched = cache.keys_and_values()
    codecs = cache.spec.layout(DIM, DIM, mx.float16)
    packed = packed_by_rule(length)
    for handle, codec, original in zip(fetched, (codecs.key, codecs.value), (KEYS, VALUES), strict=True):
        original = original[:, :, :length]
        body = codec.decode(codec.encode(original[:, :, PREFIX:packed])).astype(mx.float16)
        expected = mx.concatenate([original[:, :, :PREFIX], body, original[:, :, packed:]], axis=2)
        assert handle.shape == expected.shape
        assert handle.dtype == mx.float16
        assert mx.array_equal(handle.materialize(), expected)


CHUNKINGS = [[1] * LENGTH, [7] * 42 + [6], [32] * 9 + [12], [31, 33, 64, 1, 171], [8] * 37 + [4], [255, 45]]


@pytest.mark.parametrize(("key", "value"), [("q8", "tq4"), ("tq3", "tq2"), ("tq35", "tq25")])
@pytest.mark.parametrize("chunks", CHUNKINGS, ids=lambda chunks: f"{len(chunks)} chunks")
def test_chunks_change_nothing(key, value, chunks):
    assert sum(chunks) == LENGTH
    spec = make_spec(key, value)
    whole, parts = filled(spec, KEYS, VALUES), filled(spec, KEYS, VALUES, chunks)
    assert same_bits(whole.state, parts.state)
    assert whole.nbytes == parts.nbytes


def test_rows_of_a_batch_do_not_depend_on_their_neighbours():
    keys, values = random_pair(200, batch=3)
    spec = make_spec()
    together = filled(spec, keys, values, [100, 100])
    for row in range(3):
        alone = filled(spec, keys[row : row + 1], values[row : row + 1], [200])
        for name, array in leaves(alone.state).items():
            if isinstance(array, mx.array) and array.ndim == 4:
                assert mx.array_equal(array, leaves(together.state)[name][row : row + 1])


@pytest.mark.parametrize(("key", "value", "row"), [("tq4", "tq4", 132), ("q8", "tq4", 196), ("q8", "q8", 260)])
def test_bytes_of_a_packed_token(key, value, row):
    keys, values = random_pair(32 + 512, dims=(128, 128))
    spec = make_spec(key, value, prefix=32, window=32)
    small, large = (filled(spec, keys[:, :, :n], values[:, :, :n]) for n in (32 + 32 + STEP, 32 + 32 + 2 * STEP - 32))
    assert (small.body_tokens, large.body_tokens) == (STEP, 2 * STEP - 32)
    # The body grows by STEP rows at a time.
    assert large.nbytes - small.nbytes == HEADS * STEP * row
    rows = leaves(small.state)["2"]
    assert rows.nbytes == HEADS * small.body_tokens * row


@pytest.mark.parametrize("length", [1, 55, 56, 200, LENGTH])
def test_nbytes_are_the_bytes_of_the_arrays(length):
    cache = filled(make_spec(), KEYS[:, :, :length], VALUES[:, :, :length])
    arrays = [value for value in vars(cache).values() if isinstance(value, mx.array)]
    arrays += [array for value in vars(cache).values() if isinstance(value, tuple) for array in value]
    assert cache.nbytes == sum(array.nbytes for array in arrays)


def test_buffers_of_the_models_type_do_not_grow():
    cache = make_cache()
    feed(cache, KEYS, VALUES, [1])
    start = cache.nbytes
    for _ in range(LENGTH - 1):
        feed(cache, KEYS, VALUES, [1])
        row = cache.spec.layout(DIM, DIM, mx.float16).nbytes
        body = -(-cache.body_tokens // STEP) * STEP
        assert cache.nbytes == start + HEADS * row * body


def test_masks_are_those_of_mlx_lm():
    cache = filled(make_spec(), KEYS[:, :, :100], VALUES[:, :, :100])
    assert cache.make_mask(1) is None
    assert cache.make_mask(2) == "causal"
    mask = cache.make_mask(3, return_array=True)
    assert mask.shape == (3, 103)
    assert mask.sum(axis=1).tolist() == [101, 102, 103]
    window = cache.make_mask(3, window_size=10)
    assert window.sum(axis=1).tolist() == [10, 10, 10]


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
