"""Attention over a compressed cache equals attention over the decoded cache, for every way in which tokens come."""

import mlx.core as mx
import numpy as np
import pytest

from cache.tools import DIM, check_attention, feed, filled, make_spec, random, random_pair, uneven

LENGTH = 200
SCALE = DIM**-0.5
CASES = [
    ("fp16", "fp16", mx.bfloat16, 1),
    ("q8", "tq4", mx.float16, 2),
    ("tq3", "tq2", mx.float32, 1),
    ("spectral16_int8", "q8_0", mx.float16, 1),
    ("tq35", "tq25", mx.float16, 2),
    ("tq4~spectral8", "tq3", mx.float16, 1),
]


@pytest.mark.parametrize("count", [1, 5, 40])
@pytest.mark.parametrize(("key", "value", "dtype", "batch"), CASES)
def test_equals_attention_over_the_decoded_cache(key, value, dtype, batch, count):
    """What holds for kernels (tests/kernels) holds for what a cache hands them, with its window, masks and sinks."""
    keys, values = (x.astype(dtype) for x in uneven(LENGTH, batch=batch))
    cache = filled(make_spec(key, value, recent=64), keys[:, :, :-count], values[:, :, :-count])
    packed = cache.body_tokens
    view = cache.append(keys[:, :, -count:], values[:, :, -count:])
    assert view.key_shape() == (batch, 2, LENGTH, DIM)
    assert packed > 100
    unpacked = LENGTH - (cache.body_tokens if count <= 8 else packed)
    assert view.regions.keys.shape[2] == unpacked, "a chunk sees itself as it is"
    queries = random(count, batch=batch, heads=6, dtype=dtype, seed=5)
    out = view.attend(queries, SCALE, None if count == 1 else "causal", None)
    assert out.dtype == dtype
    check_attention(view, queries, out, SCALE)
    mask, sinks = boolean(count), mx.array([0.5, 3.0, -2.0, 8.0, 0.0, 1.0])
    out = view.attend(queries, SCALE, mask, sinks.astype(dtype))
    check_attention(view, queries, out, SCALE, mask=mask, sinks=sinks)


def boolean(length):
    mask = np.random.default_rng(3).random((length, LENGTH)) < 0.5
    mask[:, ::50] = True
    return mx.array(mask) & (mx.arange(LENGTH)[None] <= mx.arange(LENGTH - length, LENGTH)[:, None])


def additive(length):
    return mx.where(boolean(length), random(1, dim=LENGTH, seed=4)[0, 0], -float("inf")).astype(mx.float16)


def of_keys_alone(length):
    return boolean(length)[:1, None, None]


@pytest.mark.parametrize("make", [boolean, additive, of_keys_alone, lambda length: mx.array(True)[None, None]])
def test_array_masks_while_a_block_leaves(make):
    """Queries before and after the block left have their own rows of the mask."""
    keys, values = random_pair(LENGTH)
    cache = filled(make_spec(window=LENGTH - 3 - 96), keys[:, :, :-8], values[:, :, :-8])
    view = cache.append(keys[:, :, -8:], values[:, :, -8:])
    count, earlier = view.earlier
    assert (count, earlier.regions.packed_tokens, view.regions.packed_tokens) == (4, 60, 92)
    queries, mask = random(8, heads=4, seed=5), make(8)
    out = view.attend(queries, SCALE, mask, None)
    mask = mx.broadcast_to(mask, (1, 1, 8, LENGTH))
    check_attention(earlier, queries[:, :, :4], out[:, :, :4], SCALE, mask=mask[..., :4, : LENGTH - 4])
    check_attention(view, queries[:, :, 4:], out[:, :, 4:], SCALE, mask=mask[..., 4:, :])


@pytest.mark.parametrize(("key", "sinks", "window"), [("tq4", 4, 24), ("tq4~tq3", 0, 0), ("tq4", 70, 1)])
@pytest.mark.parametrize("length", [2, 5, 8])
def test_a_few_tokens_see_what_each_would_have_seen_alone(key, sinks, window, length):
    """Also where a block leaves, or goes cold, in the middle of the step."""
    keys, values = random_pair(150, dtype=mx.float32)
    spec = make_spec(key, "tq2", sinks=sinks, window=window, recent=32)
    alone = filled(spec, keys[:, :, :30], values[:, :, :30])
    together = alone.fork()
    queries = random(150, heads=4, dtype=mx.float32, seed=5)
    while together.offset + length <= 110:
        start = together.offset
        (view,) = feed(together, keys, values, [length])
        out = view.attend(queries[:, :, start : start + length], SCALE, "causal", None)
        for i, single in enumerate(feed(alone, keys, values, [1] * length)):
            query = queries[:, :, start + i : start + i + 1]
            assert mx.allclose(out[:, :, i : i + 1], single.attend(query, SCALE, None, None), atol=1e-5, rtol=0)


def test_shared_layers_see_what_the_step_saw():
    """A later layer fetches the same regions: those of the step, not those after it."""
    keys, values = random_pair(LENGTH)
    shared, private = (filled(make_spec(shared=flag), keys[:, :, :100], values[:, :, :100]) for flag in (True, False))
    for cache in (shared, private):
        view = cache.append(keys[:, :, 100:180], values[:, :, 100:180])
        key, _ = cache.keys_and_values()
        assert key.shape == (1, 2, 180, DIM)
        assert (key.view is view) == (cache is shared)
    assert (
        shared.keys_and_values()[0].view.regions.packed_tokens < private.keys_and_values()[0].view.regions.packed_tokens
    )
    shared.trim(1)
    assert shared.keys_and_values()[0].shape[2] == 179
