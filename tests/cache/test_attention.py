"""Attention over a compressed cache equals attention over the decoded cache, for every way in which tokens come."""

import mlx.core as mx
import numpy as np
import pytest

from cache.tools import (
    DIM,
    check_attention,
    decoded,
    error,
    exact_attention,
    feed,
    filled,
    make_cache,
    make_spec,
    random,
    random_pair,
)

LENGTH = 200
SCALE = DIM**-0.5
FORMATS = [("fp16", "fp16"), ("q8", "q8"), ("q8", "tq4"), ("tq4", "tq4"), ("tq3", "tq2"), ("fp16", "tq4")]
OTHERS = [
    ("q8_0", "tq3_0"),
    ("fp8", "tq4"),
    ("tq3_0", "q8_0"),
    ("q8", "fp8"),
    ("tq35", "tq25"),
    ("spectral16_int8", "q8"),
]
DTYPES = [mx.float16, mx.bfloat16, mx.float32]


def last_view(spec, keys, values, length):
    """The regions that the last `length` tokens see, all but them fed before."""
    cache = filled(spec, keys[:, :, :-length], values[:, :, :-length])
    return cache.append(keys[:, :, -length:], values[:, :, -length:])


def causal(length, count):
    return mx.arange(count)[None] <= mx.arange(count - length, count)[:, None]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("mlx.core."))
@pytest.mark.parametrize(("key", "value"), FORMATS + OTHERS)
@pytest.mark.parametrize("length", [1, 5, 40])
def test_equals_attention_over_the_decoded_cache(key, value, dtype, length):
    keys, values = random_pair(LENGTH, dtype=dtype)
    view = last_view(make_spec(key, value), keys, values, length)
    assert view.body > 100
    queries = random(length, heads=6, dtype=dtype, seed=5)
    mask = None if length == 1 else "causal"
    out = view.attend(queries, SCALE, mask, None)
    assert out.dtype == dtype
    check_attention(view, queries, out, SCALE)


@pytest.mark.parametrize("length", [1, 6, 33])
@pytest.mark.parametrize("dims", [(192, 128), (64, 96), (48, 48), (80, 80), (256, 256)])
def test_head_sizes_and_batches(dims, length):
    keys, values = random_pair(LENGTH, batch=2, heads=1, dims=dims)
    view = last_view(make_spec(), keys, values, length)
    queries = random(length, batch=2, heads=3, dim=dims[0], seed=5)
    out = view.attend(queries, SCALE, None if length == 1 else "causal", None)
    assert out.shape == (2, 3, length, dims[1])
    check_attention(view, queries, out, SCALE)


@pytest.mark.parametrize("length", [1, 6, 33])
def test_sinks(length):
    keys, values = random_pair(LENGTH)
    view = last_view(make_spec(), keys, values, length)
    queries, sinks = random(length, heads=4, seed=5), mx.array([0.5, 3.0, -2.0, 8.0])
    out = view.attend(queries, SCALE, None if length == 1 else "causal", sinks.astype(mx.float16))
    check_attention(view, queries, out, SCALE, sinks=sinks)


def boolean(length):
    mask = np.random.default_rng(3).random((length, LENGTH)) < 0.5
    mask[:, ::50] = True
    return mx.array(mask) & causal(length, LENGTH)


def additive(length):
    return mx.where(boolean(length), random(1, dim=LENGTH, seed=4)[0, 0], -float("inf")).astype(mx.float16)


def per_head(length):
    return mx.stack([mx.roll(boolean(length), 7 * head, axis=1) for head in range(4)])[None]


def per_row(length):
    return mx.stack([boolean(length), causal(length, LENGTH)])[:, None]


def of_keys_alone(length):
    return boolean(length)[:1, None, None] & causal(length, LENGTH)[:1]


@pytest.mark.parametrize("make", [boolean, additive, per_head, per_row, of_keys_alone])
@pytest.mark.parametrize("length", [1, 4, 8, 33])
def test_array_masks(make, length):
    keys, values = random_pair(LENGTH, batch=2)
    view = last_view(make_spec(), keys, values, length)
    assert view.body > 100
    queries, mask = random(length, batch=2, heads=4, seed=5), make(length)
    check_attention(view, queries, view.attend(queries, SCALE, mask, None), SCALE, mask=mask)


@pytest.mark.parametrize("make", [boolean, additive, of_keys_alone, lambda length: mx.array(True)[None, None]])
def test_array_masks_while_a_block_leaves(make):
    """Queries before and after the block left have their own rows of the mask."""
    keys, values = random_pair(LENGTH)
    cache = filled(make_spec(window=LENGTH - 3 - 96), keys[:, :, :-8], values[:, :, :-8])
    view = cache.append(keys[:, :, -8:], values[:, :, -8:])
    count, earlier = view.earlier
    assert (count, earlier.body, view.body) == (4, 60, 92)
    queries, mask = random(8, heads=4, seed=5), make(8)
    out = view.attend(queries, SCALE, mask, None)
    mask = mx.broadcast_to(mask, (1, 1, 8, LENGTH))
    check_attention(earlier, queries[:, :, :4], out[:, :, :4], SCALE, mask=mask[..., :4, : LENGTH - 4])
    check_attention(view, queries[:, :, 4:], out[:, :, 4:], SCALE, mask=mask[..., 4:, :])


def test_a_causal_array_is_the_word():
    keys, values = random_pair(LENGTH)
    for length in (5, 33):
        view = last_view(make_spec(), keys, values, length)
        queries = random(length, heads=4, seed=5)
        word, array = (view.attend(queries, SCALE, mask, None) for mask in ("causal", causal(length, LENGTH)))
        assert mx.allclose(word, array, atol=2e-3, rtol=0)


@pytest.mark.parametrize(("prefix", "window"), [(4, 24), (0, 24), (0, 0), (4, 0), (32, 3), (70, 1), (0, 5)])
@pytest.mark.parametrize("length", range(2, 9))
def test_a_few_tokens_see_what_each_would_have_seen_alone(prefix, window, length):
    keys, values = random_pair(150, dtype=mx.float32)
    spec = make_spec("tq4", "tq2", prefix=prefix, window=window)
    alone = filled(spec, keys[:, :, :30], values[:, :, :30])
    together = alone.fork()
    queries = random(150, heads=4, dtype=mx.float32, seed=5)
    while together.offset + length <= 150:
        start = together.offset
        (view,) = feed(together, keys, values, [length])
        out = view.attend(queries[:, :, start : start + length], SCALE, "causal", None)
        for i, single in enumerate(feed(alone, keys, values, [1] * length)):
            query = queries[:, :, start + i : start + i + 1]
            assert mx.allclose(out[:, :, i : i + 1], single.attend(query, SCALE, None, None), atol=1e-5, rtol=0)
            check_attention(single, query, out[:, :, i : i + 1], SCALE)


@pytest.mark.parametrize(("prefix", "window"), [(4, 24), (0, 0), (4, 0), (70, 1)])
def test_a_chunk_sees_itself_unpacked(prefix, window):
    """What was not packed before a prefill chunk is attended to in the model's type."""
    keys, values = random_pair(150)
    cache = make_cache("tq2", "tq2", prefix=prefix, window=window)
    for chunk in (50, 9, 60, 31):
        packed = max(0, cache.body_tokens)
        (view,) = feed(cache, keys, values, [chunk])
        assert view.body == packed
        queries = random(chunk, heads=4, seed=5)
        check_attention(view, queries, view.attend(queries, SCALE, "causal", None), SCALE)


def test_shared_layers_see_what_the_step_saw():
    """A later layer fetches the same regions: those of the step, not those after it."""
    keys, values = random_pair(LENGTH)
    shared, private = (filled(make_spec(shared=flag), keys[:, :, :100], values[:, :, :100]) for flag in (True, False))
    for cache in (shared, private):
        view = cache.append(keys[:, :, 100:180], values[:, :, 100:180])
        key, _ = cache.keys_and_values()
        assert key.shape == (1, 2, 180, DIM)
        assert (key.view is view) == (cache is shared)
    assert shared.keys_and_values()[0].view.body < private.keys_and_values()[0].view.body
    shared.trim(1)
    assert shared.keys_and_values()[0].shape[2] == 179


def test_long_bodies_are_attended_to_in_blocks(monkeypatch):
    """Blocks merge to what one pass gives."""
    import mlx_tq.kernels.attend as kernel

    keys, values = random_pair(LENGTH)
    view = last_view(make_spec(), keys, values, 3)
    queries = random(3, heads=4, seed=5)
    mask = boolean(3)
    outs = []
    for size in (4096, 50):
        monkeypatch.setattr(kernel, "BLOCK_TOKENS", size)
        outs.append([view.attend(queries, SCALE, m, None) for m in ("causal", mask)])
    exact = exact_attention(queries, *decoded(view), SCALE, mask)
    assert error(outs[1][1], exact) < 2e-3
    for whole, blocks in zip(*outs, strict=True):
        assert mx.allclose(whole, blocks, atol=1e-3, rtol=0)
