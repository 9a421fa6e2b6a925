"""Trims: up to 32 tokens lead back to exactly the cache that never saw them; deeper ones keep what was packed."""

import mlx.core as mx
import pytest

from cache.tools import DIM, PREFIX, WINDOW, check_attention, feed, filled, make_spec, random, random_pair, same_bits
from mlx_tq.errors import ConfigError

KEYS, VALUES = random_pair(200)
WRONG_KEYS, WRONG_VALUES = random_pair(100, seed=9)  # tokens that are trimmed again
SPEC = make_spec()
SCALE = DIM**-0.5
# Blocks leave the tail at 56, 88 and 120 tokens.
EDGES = [*range(20, 36), *range(52, 60), *range(84, 92), *range(118, 123)]


def with_rejected(length, count, chunk):
    """A cache of `length` good tokens, then `count` wrong ones, trimmed."""
    cache = filled(SPEC, KEYS[:, :, :length], VALUES[:, :, :length])
    for start in range(0, count, chunk):
        stop = min(start + chunk, count)
        cache.append(WRONG_KEYS[:, :, start:stop], WRONG_VALUES[:, :, start:stop])
    assert cache.trim(count) == count
    return cache


@pytest.mark.parametrize("length", EDGES)
def test_up_to_32_tokens_were_never_there(length):
    never = filled(SPEC, KEYS[:, :, :length], VALUES[:, :, :length])
    queries = random(1, heads=4, seed=5)
    for count in (1, 2, 7, 8, 31, 32):
        for chunk in (1, count):
            cache = with_rejected(length, count, chunk)
            # The trimmed cache may hold the originals of fewer packed tokens, but never sees a difference.
            assert cache.offset == length
            assert cache.body_tokens == never.body_tokens
            assert all(mx.array_equal(*pair) for pair in zip(contents(cache), contents(never), strict=True))
            step = next_token(cache, length, queries), next_token(never.fork(), length, queries)
            assert mx.array_equal(*step)


def contents(cache):
    return [handle.materialize() for handle in cache.keys_and_values()]


def next_token(cache, length, queries):
    view = cache.append(KEYS[:, :, length : length + 1], VALUES[:, :, length : length + 1])
    return view.attend(queries, SCALE, None, None)


@pytest.mark.parametrize("length", [30, 55, 56, 57, 87, 88, 100])
@pytest.mark.parametrize("chunk", [1, 5, 40])
def test_continuing_leads_to_equal_bits(length, chunk):
    """Once both have packed a further block, all that they hold is equal."""
    never = filled(SPEC, KEYS[:, :, :length], VALUES[:, :, :length])
    trimmed = with_rejected(length, 32, 8)
    rest = 80
    for cache in (never, trimmed):
        feed(cache, KEYS, VALUES, [chunk] * (rest // chunk))
    assert same_bits(never.state, trimmed.state)
    assert never.nbytes == trimmed.nbytes


def test_speculation_at_every_step_changes_nothing():
    plain = filled(SPEC, KEYS[:, :, :40], VALUES[:, :, :40])
    guessed = plain.fork()
    while guessed.offset < 160:
        before = guessed.offset
        guessed.append(KEYS[:, :, before : before + 1], VALUES[:, :, before : before + 1])
        guessed.append(WRONG_KEYS[:, :, :3], WRONG_VALUES[:, :, :3])
        assert guessed.trim(3) == 3
    feed(plain, KEYS, VALUES, [1] * 120)
    assert same_bits(plain.state[2:5], guessed.state[2:5])
    assert all(mx.array_equal(*pair) for pair in zip(contents(plain), contents(guessed), strict=True))


@pytest.mark.parametrize("count", [33, 40, 64, 77, 96, 120])
def test_deeper_trims_keep_packed_values(count):
    """What attention reads for a token that was packed long ago stays its packed value."""
    length = 160
    cache = filled(SPEC, KEYS[:, :, :length], VALUES[:, :, :length])
    before = contents(cache)
    assert cache.trim(count) == count
    left = length - count
    kept = 128 - 32  # 128 = (160 - window) // 32 * 32 are packed, and one block's originals are there
    assert cache.offset == left
    assert cache.body_tokens == min(max((left - WINDOW) // 32 * 32, kept), left) - PREFIX
    packed = PREFIX + cache.body_tokens
    for now, then, original in zip(contents(cache), before, (KEYS, VALUES), strict=True):
        assert now.shape[2] == left
        assert mx.array_equal(now[:, :, :packed], then[:, :, :packed])
        assert mx.array_equal(now[:, :, packed:], original[:, :, packed:left])
    queries = random(1, heads=4, seed=5)
    view = cache.append(KEYS[:, :, left : left + 1], VALUES[:, :, left : left + 1])
    assert cache.offset == left + 1
    check_attention(view, queries, view.attend(queries, SCALE, None, None), SCALE)


def test_after_a_deep_trim_packed_tokens_wait_for_the_rule():
    cache = filled(SPEC, KEYS[:, :, :160], VALUES[:, :, :160])
    cache.trim(90)
    bodies = []
    for _ in range(80):
        feed(cache, KEYS, VALUES, [1])
        bodies.append(PREFIX + cache.body_tokens)
    # 70 packed tokens were left. The next block ends at 96, and leaves at 96 + window.
    assert bodies == [70] * (96 + WINDOW - 71) + [96] * 31
    keys, _ = contents(cache)
    codec = SPEC.layout(DIM, DIM, mx.float16).key
    assert mx.array_equal(keys[:, :, PREFIX:96], codec.decode(codec.encode(KEYS[:, :, PREFIX:96])).astype(mx.float16))


@pytest.mark.parametrize("left", [0, 1, PREFIX - 1, PREFIX, PREFIX + 1])
def test_into_the_prefix(left):
    cache = filled(SPEC, KEYS[:, :, :160], VALUES[:, :, :160])
    assert cache.trim(160 - left) == 160 - left
    assert (cache.offset, cache.body_tokens) == (left, max(0, left - PREFIX))
    if left <= PREFIX:
        feed(cache, KEYS, VALUES, [150 - left])
        never = filled(SPEC, KEYS[:, :, :150], VALUES[:, :, :150])
        assert same_bits(never.state, cache.state)


def test_no_more_than_there_is():
    cache = filled(SPEC, KEYS[:, :, :50], VALUES[:, :, :50])
    assert cache.trim(0) == 0
    assert cache.trim(1000) == 50
    assert cache.trim(1) == 0
    assert cache.offset == 0
    assert not cache.empty()  # as mlx-lm's KVCache: the buffers are there


@pytest.mark.parametrize("count", [-1, 1.5, None])
def test_a_trim_is_a_count(count):
    cache = filled(SPEC, KEYS[:, :, :40], VALUES[:, :, :40])
    with pytest.raises(ConfigError, match="it must be a whole number from 0 on"):
        cache.trim(count)
    assert cache.offset == 40
