"""A step copies neither the body nor the buffers beside it, also when the next one is built before it is done."""

import mlx.core as mx
import numpy as np

from cache.tools import DIM, make_cache, random, random_pair
from mlx_tq.cache.buffers import STEP
from mlx_tq.config import BLOCK

SCALE = DIM**-0.5
PREFIX = WINDOW = 32


def addresses(cache):
    """Where the buffers lie; evaluates them."""
    return tuple(np.array(x, copy=False).ctypes.data for x in (cache._body.arrays[-1], *cache._full))


def run_ahead(cache, seen, count):
    """Steps of one token, as mlx-lm's generate_step makes them: each is asked for while the one before it runs."""
    for _ in range(count):
        keys, values = (x[:, :, cache.offset % 100 :][:, :, :1] + seen for x in random_pair(101))
        following = cache.append(keys, values).attend(random(1, heads=4), SCALE, None, None).mean() * 0
        mx.async_eval(following)
        seen.item()
        seen = following
    return seen


def test_the_body_stays_where_it_is():
    cache = make_cache(sinks=PREFIX, window=WINDOW)
    cache.append(*random_pair(PREFIX + WINDOW + STEP + BLOCK))
    seen = run_ahead(cache, mx.array(0.0), 3)
    rows, *full = addresses(cache)
    for count in (1, 2, 4, BLOCK - 11):  # a copy a step would end elsewhere after some of these
        seen = run_ahead(cache, seen, count)
        assert addresses(cache) == (rows, *full), "between packings the others stay too"
    seen = run_ahead(cache, seen, 2 * BLOCK + 4)
    assert cache.body_tokens == STEP + 4 * BLOCK
    assert addresses(cache)[0] == rows
    run_ahead(cache, seen, STEP)
    assert addresses(cache)[0] != rows, "it grew, so this test can see a copy"


def test_attention_reads_the_buffers_themselves():
    cache = make_cache(sinks=PREFIX, window=WINDOW)
    cache.append(*random_pair(PREFIX + WINDOW + 3 * BLOCK + 5))
    view = cache.append(*random_pair(1))
    inside = [(np.array(x, copy=False).ctypes.data, x.nbytes) for x in cache._full]
    for read, (start, size) in zip((view.regions.keys, view.regions.values), inside, strict=True):
        assert start <= np.array(read, copy=False).ctypes.data < start + size
