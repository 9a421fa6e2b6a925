"""A layer whose heads keep different tokens: what each head holds, and attention over exactly that, in float64."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from cache.tools import DIM, check_attention, exact_attention, listen, make_spec, random, random_pair
from mlx_tq.cache.batch import BatchView
from mlx_tq.cache.headwise import HeadwiseKVCache
from mlx_tq.cache.layer import CompressedKVCache
from mlx_tq.cache.view import StepView
from mlx_tq.errors import UnsupportedModelError
from mlx_tq.kernels import backend, by_head

HEADS, GROUP = 4, 2
SINKS, WINDOW = 32, 96  # of streaming heads
SCALE = DIM**-0.5


@pytest.fixture(autouse=True, params=["cpu", "reference"])
def _backend(request):
    with backend.using(request.param):
        yield


def headwise(kept, *, key="q8", value="tq4", **changes):
    spec = make_spec(key, value, **changes)
    return replace(spec, retrieval_heads=kept, head_sinks=SINKS, head_window=WINDOW)


def fed(spec, keys, values, *, steps=(64,)):
    """A cache that has read these tokens; whenever it holds more than its window, streaming heads lose the middle."""
    cache = HeadwiseKVCache(spec)
    for number in range(keys.shape[2]):
        step = steps[number % len(steps)]
        start = cache.offset
        if start == keys.shape[2]:
            break
        view = cache.append(*(x[:, :, start : start + step] for x in (keys, values)))
        listen(view, start, cache.offset - start)
        evict(cache)
    return cache


def evict(cache):
    positions = cache.packed_positions
    keep = np.flatnonzero((positions < SINKS) | (positions >= cache.offset - WINDOW))
    if len(keep) < len(positions):
        cache.compact(keep, positions[keep])


def held(cache, head):
    positions = cache.positions
    return positions[head] if isinstance(positions, list) else positions


def check_heads(view, queries, out, sinks=None):
    """Each KV head attends to its own rows: twice the error of mlx's attention over them is allowed."""
    for head in range(HEADS):
        members = slice(head * GROUP, (head + 1) * GROUP)
        part = StepView(view.regions.head(head))
        logits = None if sinks is None else sinks[members]
        check_attention(part, queries[:, members], out[:, members], SCALE, sinks=logits)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("kept", [(), (2,), (0, 3), (0, 1, 2)])
def test_each_head_holds_and_sees_its_own_rows(kept, normalize):
    keys, values = random_pair(700, heads=HEADS, dtype=mx.float32)
    cache = fed(headwise(kept, normalize=normalize), keys[:, :, :-1], values[:, :, :-1])
    view = cache.append(keys[:, :, -1:], values[:, :, -1:])
    assert cache.size() == (700 if kept else len(held(cache, 0)))
    for head in range(HEADS):
        positions = held(cache, head)
        assert len(positions) == 700 if head in kept else SINKS + WINDOW <= len(positions) <= SINKS + WINDOW + 33
        stored_keys, stored_values = view.regions.head(head).decode()
        for stored, original in ((stored_keys, keys), (stored_values, values)):
            rows = np.array(original)[0, head, positions]
            wrong = np.linalg.norm(np.array(stored)[0, 0] - rows, axis=-1) / np.linalg.norm(rows, axis=-1)
            assert wrong.max() < 0.3, "another token's row is 1.4 away"
    queries = random(1, heads=HEADS * GROUP, dtype=mx.float32, seed=5)
    check_heads(view, queries, view.attend(queries, SCALE, None, None))
    sinks = mx.array(np.linspace(-3, 6, HEADS * GROUP).astype(np.float32))
    check_heads(view, queries, view.attend(queries, SCALE, None, sinks), sinks)


@pytest.mark.parametrize("length", [2, 8])
def test_a_few_tokens_see_what_each_would_have_seen_alone(length):
    keys, values = random_pair(400, heads=HEADS, dtype=mx.float32)
    spec = headwise((1,))
    alone = fed(spec, keys[:, :, :290], values[:, :, :290])
    together = alone.fork()
    queries = random(400, heads=HEADS * GROUP, dtype=mx.float32, seed=5)
    while together.offset + length <= 360:
        start = together.offset
        new = slice(start, start + length)
        out = together.append(keys[:, :, new], values[:, :, new]).attend(queries[:, :, new], SCALE, "causal", None)
        for i in range(length):
            one = slice(start + i, start + i + 1)
            single = alone.append(keys[:, :, one], values[:, :, one]).attend(queries[:, :, one], SCALE, None, None)
            assert mx.allclose(out[:, :, i : i + 1], single, atol=1e-5, rtol=0)


@pytest.mark.full
@pytest.mark.parametrize("before", [0, 20, 200])
def test_in_a_long_pass_streaming_heads_see_only_what_is_near(before):
    """Besides what was packed before: of nothing, little and more, in runs of queries that divide the pass unevenly."""
    kept, length = (0, 3), 2 * by_head.LEAST_RUN + 77
    total = before + length
    keys, values = random_pair(total, heads=HEADS, dtype=mx.float32)
    cache = HeadwiseKVCache(headwise(kept))
    if before:
        cache.append(keys[:, :, :before], values[:, :, :before])
    packed = cache.packed_tokens
    view = cache.append(keys[:, :, before:], values[:, :, before:])
    queries = random(length, heads=HEADS * GROUP, dtype=mx.float32, seed=5)
    for sinks in (None, mx.array(np.linspace(-3, 6, HEADS * GROUP).astype(np.float32))):
        out = view.attend(queries, SCALE, "causal", sinks)
        for head in range(HEADS):
            part = view.regions.head(head)
            stored = [np.array(x, np.float64) for x in part.decode()]
            key, query = np.arange(total)[None], np.arange(before, total)[:, None]
            visible = key <= query
            if head not in kept:
                is_packed = (key >= cache.spec.sinks) & (key < cache.spec.sinks + packed)
                visible &= (key < SINKS) | is_packed | (key > query - WINDOW)
            members = slice(head * GROUP, (head + 1) * GROUP)
            logits = None if sinks is None else sinks[members]
            exact = exact_attention(queries[:, members], *stored, SCALE, mx.array(visible), logits)
            assert np.abs(np.array(out[:, members]) - exact).max() < 2e-5


def test_heads_that_keep_all_tokens_are_those_of_a_layer_that_evicts_nothing():
    keys, values = random_pair(500, heads=HEADS)
    spec = headwise((0, 2), normalize=True)
    cache = fed(spec, keys, values, steps=(100, 3, 64, 1))
    plain = CompressedKVCache(make_spec(normalize=True))
    for start in range(0, 500, 50):
        view = plain.append(keys[:, :, start : start + 50], values[:, :, start : start + 50])
        listen(view, start, 50)
    for head in (0, 2):
        of_cache, of_plain = (each.keys_and_values()[0].view.regions.head(head) for each in (cache, plain))
        assert all(mx.array_equal(a, b) for a, b in zip(of_cache.decode(), of_plain.decode(), strict=True))
    assert len(held(cache, 1)) < 200


def test_a_batch_mixes_layers_by_head_with_others():
    keys, values = random_pair(400, heads=HEADS, dtype=mx.float32)
    spec, views = headwise((1,)), []
    plain = CompressedKVCache(make_spec())
    plain.append(keys[:, :, :120], values[:, :, :120])
    for cache in (fed(spec, keys[:, :, :390], values[:, :, :390]), plain):
        views.append(cache.append(keys[:, :, 390:391], values[:, :, 390:391]))
    queries = random(1, batch=2, heads=HEADS * GROUP, dtype=mx.float32, seed=5)
    together = BatchView(views, [1, 1], (HEADS, DIM), (HEADS, DIM)).attend(queries, SCALE, None, None)
    check_heads(views[0], queries[:1], together[:1])
    check_attention(views[1], queries[1:], together[1:], SCALE)


def test_what_has_no_array_is_refused():
    keys, values = random_pair(400, heads=HEADS)
    cache = fed(headwise((1,)), keys, values)
    for ask in (
        lambda: cache.keys_and_values()[0].materialize(),
        lambda: cache.make_mask(4, return_array=True),
        lambda: cache.keys_and_values()[0].view.attend(random(1, heads=8), SCALE, mx.ones((1, 400), mx.bool_), None),
    ):
        with pytest.raises(UnsupportedModelError, match=r"keep different tokens\. Use neither --kv-evict heads nor"):
            ask()
