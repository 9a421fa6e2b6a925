"""Sliding windows that are widened for a draft give every token what it sees alone, and are as before afterwards."""

import mlx.core as mx
import pytest
from mlx_lm.models.cache import BatchRotatingKVCache, RotatingKVCache

from mlx_tq.integration.rollback import rollback_windows

WINDOW, DIM, SCALE = 16, 8, 8**-0.5


def tokens(seed):
    """Return queries, keys and values [1, 2, 100, DIM] of a sequence."""
    return [mx.random.normal((1, 2, 100, DIM), key=mx.random.key(10 * seed + part)) for part in range(3)]


def expected(sequence):
    positions = mx.arange(100)
    distance = positions[:, None] - positions[None]
    return mx.fast.scaled_dot_product_attention(*sequence, scale=SCALE, mask=(distance >= 0) & (distance < WINDOW))


def step(cache, sequences, starts, count):
    """Return attention of the next tokens of each sequence."""
    parts = [[x[:, :, start : start + count] for x in sequence] for sequence, start in zip(sequences, starts)]  # noqa: B905
    queries, keys, values = (mx.concatenate(rows) for rows in zip(*parts, strict=True))
    mask = cache.make_mask(count)
    keys, values = cache.update_and_fetch(keys, values)
    return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=SCALE, mask=mask)


@pytest.mark.parametrize("lengths", [(5, 12), (12, 5), (3, 40), (40, 30)])
@pytest.mark.parametrize("is_batch", [False, True], ids=["alone", "the rest of a batch"])
def test_rejected_tokens_are_rolled_back(lengths, is_batch):
    """Left padding of a batch stays when its longer row ends."""
    sequences, rows = [tokens(seed) for seed in range(2)], [RotatingKVCache(WINDOW) for _ in range(2)]
    for row, sequence, length in zip(rows, sequences, lengths, strict=True):
        step(row, [sequence], [0], length)
    cache, at, sequence = rows[0], lengths[0], sequences[0]
    if is_batch:
        cache = BatchRotatingKVCache.merge(rows)
        for i in range(3):
            step(cache, sequences, [length + i for length in lengths], 1)
        cache.filter(mx.array([0]))
        at += 3
    kind, wanted = type(cache), expected(sequence)
    for count, accepted in ((4, 1), (3, 3), (8, 2), (2, 1), (6, 6), (5, 1)):
        with rollback_windows([cache], count):
            found = step(cache, [sequence], [at], count)
            cache.trim(count - accepted)
        assert mx.allclose(found, wanted[:, :, at : at + count], atol=1e-5)
        at += accepted
        assert (type(cache), cache.max_size, cache.keys.shape[2] <= WINDOW) == (kind, WINDOW, True)
        for _ in range(2):  # without a draft
            assert mx.allclose(step(cache, [sequence], [at], 1), wanted[:, :, at : at + 1], atol=1e-5)
            at += 1


@pytest.mark.parametrize("is_batch", [False, True])
def test_no_more_is_trimmed_than_a_window_stores(is_batch):
    cache = BatchRotatingKVCache(WINDOW, [0]) if is_batch else RotatingKVCache(WINDOW)
    step(cache, [tokens(0)], [0], 5)
    with rollback_windows([cache], 1):
        assert cache.trim(8) == 5
        assert cache.size() == 0
        assert cache.trim(1) == 0
    empty = BatchRotatingKVCache(WINDOW, [0]) if is_batch else RotatingKVCache(WINDOW)
    with rollback_windows([empty], 1):
        assert empty.trim(3) == 0


def test_padding_is_dropped_with_the_oldest_tokens():
    sequence, cache = tokens(0), BatchRotatingKVCache(WINDOW, [10])
    padded = [mx.concatenate([x[:, :, :10], x], axis=2) for x in sequence]
    step(cache, [padded], [0], 30)
    with rollback_windows([cache], 4):
        assert mx.allclose(step(cache, [sequence], [20], 4), expected(sequence)[:, :, 20:24], atol=1e-5)
