"""The batch class: sequences of different lengths, each stored and attended to as if alone."""

import copy

import mlx.core as mx
import numpy as np
import pytest

from cache.tools import DIM, filled, make_cache, make_spec, random, random_pair, same_bits
from mlx_tq.cache.batch import BatchCompressedKVCache
from mlx_tq.cache.layer import CompressedKVCache
from mlx_tq.errors import ConfigError, UnsupportedModelError

LENGTHS = [3, 150, 57, 100]
SPECS = [make_spec(), make_spec("tq4", normalize=True)]
TOKENS = [random_pair(300, seed=row) for row in range(4)]
QUERIES = [random(300, heads=4, seed=50 + row) for row in range(4)]
SCALE = DIM**-0.5


def alone(row, length=None, spec=SPECS[0]):
    keys, values = TOKENS[row]
    length = LENGTHS[row] if length is None else length
    return filled(spec, keys[:, :, :length], values[:, :, :length])


def merged(rows=range(4), spec=SPECS[0]):
    return CompressedKVCache.merge([alone(row, spec=spec) for row in rows])


def next_tokens(rows, count, arrays, starts):
    """The next tokens of some rows, padded on the right with NaN: [B, H, L, D]."""
    longest = max(count)
    parts = []
    for row, n, start in zip(rows, count, starts, strict=True):
        part = arrays[row][:, :, start : start + n]
        pad = mx.full((*part.shape[:2], longest - n, part.shape[3]), float("nan"), part.dtype)
        parts.append(mx.concatenate([part, pad], axis=2))
    return mx.concatenate(parts)


def fetched(batch, rows, counts, starts):
    """Feed the batch one padded step; returns the handles of keys and values."""
    return batch.update_and_fetch(*(next_tokens(rows, counts, arrays, starts) for arrays in zip(*TOKENS, strict=True)))


def step(batch, rows, counts, starts):
    """Feed the batch one padded step; returns attention's output."""
    key, value = fetched(batch, rows, counts, starts)
    assert key.view is value.view
    queries = next_tokens(rows, counts, QUERIES, starts)
    return key.view.attend(queries, SCALE, batch.make_mask(max(counts)), None)


def step_alone(cache, row, count):
    start = cache.offset
    view = cache.append(*(x[:, :, start : start + count] for x in TOKENS[row]))
    return view.attend(QUERIES[row][:, :, start : start + count], SCALE, "causal" if count > 1 else None, None)


@pytest.mark.parametrize("count", [1, 5, 70])
@pytest.mark.parametrize("spec", SPECS, ids=["plain", "normalized"])
def test_a_row_is_as_if_alone(spec, count):
    """Normalized rows learn apart: by 70 tokens one goes on, two learn, one has not enough yet."""
    batch, rows = merged(spec=spec), [alone(row, spec=spec) for row in range(4)]
    for _ in range(2):
        starts = batch.offset.tolist()
        out = step(batch, range(4), [count] * 4, starts)
        for row, cache in enumerate(rows):
            assert mx.array_equal(out[row : row + 1], step_alone(cache, row, count))
            assert same_bits(batch.rows[row].state, cache.state)


@pytest.mark.parametrize("chunk", [64, 16, 5])
def test_padded_prompts_are_stored_without_padding(chunk):
    """A batch of fresh caches gets prompts of different lengths, in chunks, padded on the right."""
    prompts = [70, 3, 56, 20]
    batch, rows = CompressedKVCache.merge([make_cache() for _ in prompts]), [make_cache() for _ in prompts]
    assert batch.empty()
    batch.prepare(lengths=prompts, right_padding=[70 - n for n in prompts])
    for start in range(0, 70, chunk):
        width = min(chunk, 70 - start)
        counts = [max(0, min(width, n - start)) for n in prompts]
        keys, values, queries = (
            next_tokens(range(4), prompts, arrays, [0] * 4)[:, :, start : start + width]
            for arrays in (*zip(*TOKENS, strict=True), QUERIES)
        )
        key, _ = batch.update_and_fetch(keys, values)
        out = key.view.attend(queries, SCALE, batch.make_mask(width), None)
        assert out.shape == (4, 4, width, DIM)
        for row, count in enumerate(counts):
            assert (out[row, :, count:] == 0).all()
            if count:
                assert mx.array_equal(out[row : row + 1, :, :count], step_alone(rows[row], row, count))
    batch.finalize()
    assert batch.offset.tolist() == prompts
    assert all(same_bits(a.state, b.state) for a, b in zip(batch.rows, rows, strict=True))
    step(batch, range(4), [2] * 4, prompts)  # after the prompt, every token counts
    assert batch.offset.tolist() == [n + 2 for n in prompts]


@pytest.mark.parametrize("kind", [list, np.array, lambda x: mx.array(x, mx.int32)])
def test_rows_go_come_and_are_taken_out(kind):
    """In the order that was asked for; what was put in or taken out is a copy."""
    mine = [alone(row) for row in range(4)]
    batch = CompressedKVCache.merge(mine)
    assert (batch.offset.tolist(), batch.offset.dtype, batch.size()) == (LENGTHS, mx.int32, max(LENGTHS))
    assert batch.is_trimmable()
    assert not batch.empty()
    assert batch.nbytes == sum(cache.nbytes for cache in mine)
    batch.filter(kind([2, 0]))
    batch.extend(merged([3, 1]))
    order = [2, 0, 3, 1]
    assert batch.offset.tolist() == [LENGTHS[row] for row in order]
    taken = batch.extract(0)
    out = step(batch, order, [40] * 4, batch.offset.tolist())
    for place, row in enumerate(order):
        assert mx.array_equal(out[place : place + 1], step_alone(alone(row), row, 40))
    assert type(taken) is CompressedKVCache
    for cache, row in ((taken, 2), *zip(mine, range(4), strict=True)):
        assert same_bits(cache.state, alone(row).state)
    batch.filter(kind([]))
    assert (batch.size(), batch.nbytes, batch.offset.tolist(), batch.trim(3)) == (0, 0, [], 0)
    assert batch.empty()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda batch: BatchCompressedKVCache.from_state(batch.state)])
def test_copies_in_the_middle_of_a_padded_prompt(copied):
    batch = CompressedKVCache.merge([make_cache() for _ in range(2)])
    batch.prepare(lengths=[60, 30], right_padding=[0, 30])
    step(batch, range(2), [40, 30], [0, 0])
    twin = copied(batch)
    for one in (batch, twin):
        step(one, range(2), [20, 0], [40, 30])
        assert one.offset.tolist() == [60, 30]
    assert all(same_bits(a.state, b.state) for a, b in zip(batch.rows, twin.rows, strict=True))


def test_materialize_pads_with_zeros():
    batch = merged()
    handle, _ = fetched(batch, range(4), [1] * 4, LENGTHS)
    array = handle.materialize()
    assert array.shape == (4, 2, 151, DIM)
    for row in range(4):
        length = LENGTHS[row] + 1
        own, _ = alone(row, length).keys_and_values()
        assert mx.array_equal(array[row : row + 1, :, :length], own.materialize())
        assert (array[row, :, length:] == 0).all()


def test_layers_that_share_a_batch_and_a_trim():
    spec = make_spec(shared=True)
    shared = CompressedKVCache.merge([filled(spec, *(x[:, :, :100] for x in TOKENS[0])) for _ in range(2)])
    handle, _ = shared.update_and_fetch(*(mx.repeat(x[:, :, 100:101], 2, axis=0) for x in TOKENS[0]))
    assert shared.keys_and_values()[0].view is handle.view
    twin = copy.deepcopy(shared).keys_and_values()[0]
    assert (twin.shape, twin.dtype) == (handle.shape, handle.dtype)
    batch = merged()
    assert batch.trim(20) == 20
    assert batch.offset.tolist() == [max(0, n - 20) for n in LENGTHS]
    step(batch, range(4), [1] * 4, batch.offset.tolist())
    with pytest.raises(UnsupportedModelError, match=r"mlx_tq\.make_prompt_cache on this model"):
        batch.keys_and_values()


def test_a_model_that_counts_the_keys_of_different_lengths():
    """One shape cannot tell; padded or not, what differs from row to row is refused."""
    batch = merged()
    for handle in fetched(batch, range(4), [1] * 4, LENGTHS):
        assert handle.ndim == 4
        with pytest.raises(UnsupportedModelError, match=r"differs from row to row .* Run the sequences one at a time"):
            _ = handle.shape
    batch = CompressedKVCache.merge([alone(0, 10), alone(0, 5)])
    batch.prepare(lengths=[5, 10], right_padding=[5, 0])
    key, _ = fetched(batch, range(2), [5, 10], [10, 5])
    with pytest.raises(UnsupportedModelError):
        _ = key.shape


def test_what_rows_do_not_have_is_refused():
    batch = merged()
    with pytest.raises(ConfigError, match=r"left padding \[0, 3\] cannot be stored; pad .* on the right"):
        batch.prepare(left_padding=[0, 3])
    with pytest.raises(ConfigError, match="needs the rows' lengths"):
        batch.prepare(right_padding=[0, 3])
    with pytest.raises(ConfigError, match="sliding window of 16 tokens"):
        batch.make_mask(4, window_size=16)
    handle, _ = fetched(batch, range(4), [2] * 4, LENGTHS)
    with pytest.raises(ConfigError, match=r"an attention mask of its own.* Run the sequences one at a time"):
        handle.view.attend(random(2, batch=4, heads=4), SCALE, mx.ones((2, 152), mx.bool_), None)
    batch.prepare(left_padding=[0, 0], right_padding=[0, 0])
    assert (batch.make_mask(1), batch.make_mask(2)) == (None, "causal")
