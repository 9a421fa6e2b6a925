"""Memory really is what the caches declare: no hidden copy in the model's type, and one layer of scratch at a time."""

import gc

import mlx.core as mx
import pytest

from cache.tools import make_cache
from mlx_tq.kernels import backend

HEADS, QUERY_HEADS, DIM, CHUNK = 1, 2, 128, 512
STEPS = 40  # of one token, before each measure: some block is packed among them
ROW = 196 + 2  # bytes of a packed token of q8 and tq4, head dim 128, and its share of a mean of 128 keys


def forward(caches, chunk, queries):
    """What a model does with its caches, layer by layer in one graph; each layer needs the output of the one before."""
    out = mx.array(0.0)
    for cache in caches:
        keys, values, q = (mx.random.normal((1, heads, chunk, DIM)) for heads in (HEADS, HEADS, QUERY_HEADS))
        view = cache.append(keys + out.mean(), values)
        out = view.attend(q[:, :, -queries:], DIM**-0.5, "causal" if chunk > 1 else None, None)
    mx.eval(out, [cache.state for cache in caches])


def measure(layers, queries, lengths):
    """At each length the bytes that are alive and declared, and the most that the last chunk had beside them."""
    gc.collect()
    mx.clear_cache()
    before, caches = mx.get_active_memory(), [make_cache(sinks=128, window=128, normalize=True) for _ in range(layers)]
    for length in lengths:
        while (left := length - STEPS - caches[0].offset) > 0:
            mx.clear_cache()
            mx.reset_peak_memory()
            forward(caches, min(CHUNK, left), queries if left <= CHUNK else 1)
            peak = mx.get_peak_memory() - mx.get_active_memory()
        for _ in range(STEPS):
            forward(caches, 1, 1)
        mx.clear_cache()
        yield mx.get_active_memory() - before, sum(cache.nbytes for cache in caches), peak


def test_active_memory_grows_by_the_declared_bytes():
    """From 1K to 5K tokens. Keys and values in fp16 would take 512 bytes a token."""
    (active, declared, _), (later, more, _) = measure(2, 16, [1024, 5120])
    assert more - declared == 2 * 4096 * ROW
    assert 0.99 * (more - declared) <= later - active <= 1.1 * (more - declared)
    assert later <= 1.1 * more + 200_000  # rotations, and the random state


@pytest.mark.full
def test_prefill_holds_the_scratch_of_one_layer():
    """Scores, the decoded past and its rotated neighbors are gone before the next layer makes its own.

    Derived for one layer of fp32: scores and their softmax, [2, 512, S] each, and three copies of keys and values,
    [1, S, 128] each: blocks of them decoded, side by side with the rotated tail, and one in hand.
    """
    tokens = 2048
    with backend.using("reference"):
        ((_, _, few),), ((_, _, many),) = (list(measure(layers, 512, [tokens])) for layers in (1, 3))
    scores, past = 2 * 512 * tokens * 4, 2 * tokens * 128 * 4
    assert many <= 2 * scores + 3 * past
    assert many <= 1.1 * few
