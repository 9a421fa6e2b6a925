"""What the cache tests share: random keys and values, exact attention in float64, and comparisons of caches."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from mlx_tq.cache.batch import BatchCompressedKVCache
from mlx_tq.cache.layer import CompressedKVCache
from mlx_tq.cache.spec import CacheSpec
from mlx_tq.cache.tiered import TieredKVCache
from mlx_tq.config import KVConfig
from mlx_tq.prompt_cache.cache_file import load_prompt_cache, save_prompt_cache

PREFIX, WINDOW = 4, 24  # of most tests: small, and no multiples of a block
HEADS, DIM = 2, 64
PAIRS = tuple((i, i + 24) for i in range(24))  # dims that turn together; the others stand alone
MODEL = nn.Linear(1, 1)  # whose caches those of files are, where no test needs a real one


def make_spec(key="q8", value="tq4", sinks=PREFIX, window=WINDOW, *, shared=False, normalize=False, **changes):
    """A layer's storage; most tests are of where tokens are, which plain keys show at shorter lengths."""
    config = KVConfig(key=key, value=value, sinks=sinks, window=window, normalize=normalize, **changes)
    return CacheSpec.for_layer(config, 0, key, value, shared=shared, pairs=PAIRS if normalize else None)


def of_spec(spec):
    return (TieredKVCache if spec.cold else CompressedKVCache)(spec)


def make_cache(*args, **changes):
    return of_spec(make_spec(*args, **changes))


def random(count, *, batch=1, heads=HEADS, dim=DIM, dtype=mx.float16, seed=0):
    """Vectors [B, H, count, D] of which each depends on the seed and its position alone."""
    values = np.random.default_rng(seed).standard_normal((count, batch, heads, dim), np.float32)
    return mx.array(values.transpose(1, 2, 0, 3)).astype(dtype)


def random_pair(count, *, seed=0, dims=(DIM, DIM), **shape):
    """Keys [B, H, count, Dk] and values [B, H, count, Dv]."""
    return random(count, dim=dims[0], seed=2 * seed, **shape), random(count, dim=dims[1], seed=2 * seed + 1, **shape)


def feed(cache, keys, values, chunks):
    """Append from the cache's offset on, in chunks, and attend where the cache listens; returns the view of each."""
    views = []
    for chunk in chunks:
        start = int(cache.offset)
        views.append(cache.append(*(x[:, :, start : start + chunk] for x in (keys, values))))
        listen(views[-1], start, cache.offset - start)
    return views


def queries_at(start, count, heads=HEADS, dim=DIM):
    """Two queries for each KV head, as uneven as real ones: [1, 2 H, count, D]."""
    queries = random(start + count, heads=2 * heads, dim=dim, seed=77)[:, :, start:]
    return (queries * mx.exp(random(1, heads=2 * heads, dim=dim, dtype=mx.float32, seed=78))).astype(mx.float16)


def listen(view, start, count):
    """Attend with the queries of these positions if the cache listens to them."""
    if view.listeners:
        batch, heads, _, dim = view.key_shape()
        view.attend(mx.repeat(queries_at(start, count, heads, dim), batch, axis=0), dim**-0.5, "causal", None)


def filled(spec, keys, values, chunks=None):
    cache = of_spec(spec)
    feed(cache, keys, values, chunks or [keys.shape[2]])
    return cache


def contents(cache):
    """Decoded keys and values of all that is stored."""
    return [handle.materialize() for handle in cache.keys_and_values()]


def leaves(state):
    """Arrays and scalars of a state, by name."""
    return dict(tree_flatten(state))


def same_bits(a, b):
    """Whether two states are equal to the bit."""
    a, b = leaves(a), leaves(b)
    if a.keys() != b.keys():
        return False
    for name, x in a.items():
        y = b[name]
        if isinstance(x, mx.array) and isinstance(y, mx.array):
            if x.dtype != y.dtype or x.shape != y.shape or not np.array_equal(_bits(x), _bits(y)):
                return False
        elif x != y:
            return False
    return True


def _bits(x):
    return np.array(x.view(mx.uint16) if x.dtype == mx.bfloat16 else x)


def copies(cache, config, path):
    """A cache as it comes from a file, a state, a fork and a batch."""
    save_prompt_cache(path, [cache], model=MODEL, config=config)
    (loaded,) = load_prompt_cache(path, model=MODEL, config=config).caches
    merged = BatchCompressedKVCache.merge([cache]).rows[0]
    return [loaded, type(cache).from_state(cache.state), cache.fork(), merged]


def check_copies(cache, config, keys, values, path):
    """Assert that copies of a cache become equal ones, also before it has learned, and where it may have to forget."""
    for chunk in (50, 104, 40):
        feed(cache, keys, values, [chunk])
        twins = copies(cache, config, path)
        for each in (own := cache.fork(), *twins):
            feed(each, keys, values, [7, 40, 53])
            each.trim(9)
        assert all(type(twin) is type(own) and same_bits(twin.state, own.state) for twin in twins)


def decoded(view):
    """Keys and values of a `StepView` as stored, float64: the body decoded without rounding to the model's type."""
    regions = view.merged_regions()
    pair, layout = [], regions.layout
    for full, codec, part in ((regions.keys, layout.key, layout.keys), (regions.values, layout.value, layout.values)):
        full = np.array(full.astype(mx.float32), np.float64)
        if regions.packed_tokens:
            body = np.array(codec.decode(part(regions.rows())), np.float64)
            full = np.concatenate([full[:, :, : regions.sink_tokens], body, full[:, :, regions.sink_tokens :]], axis=2)
        pair.append(full)
    return pair


def exact_attention(queries, keys, values, scale, mask=None, sinks=None):
    """Softmax attention in float64: queries [B, Hq, L, Dk], the last L tokens of keys [B, H, S, Dk]."""
    q = np.array(queries.astype(mx.float32), np.float64)
    query_heads, length = q.shape[1:3]
    heads, count = keys.shape[1:3]
    group = query_heads // heads
    keys, values = (np.repeat(x, group, axis=1) for x in (keys, values))
    scores = q @ keys.swapaxes(-1, -2) * scale
    if isinstance(mask, mx.array):
        mask = np.array(mask if mask.dtype == mx.bool_ else mask.astype(mx.float32))
        scores = np.where(mask, scores, -np.inf) if mask.dtype == np.bool_ else scores + mask
    elif length > 1:
        scores = np.where(np.arange(count)[None] <= np.arange(count - length, count)[:, None], scores, -np.inf)
    if sinks is not None:
        column = np.array(sinks.astype(mx.float32), np.float64)[None, :, None, None]
        scores = np.concatenate([scores, np.broadcast_to(column, (*scores.shape[:-1], 1))], axis=-1)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return weights[..., :count] @ values


def error(out, exact):
    """The largest difference from a float64 result."""
    return float(np.abs(np.array(out.astype(mx.float32), np.float64) - exact).max())


def reference_error(view, queries, exact, scale, mask=None, sinks=None):
    """The error of mlx's own attention over the same keys and values, decoded to the model's type."""
    keys, values = view.materialize()
    sinks = None if sinks is None else sinks.astype(queries.dtype)
    return error(
        mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask, sinks=sinks), exact
    )


def check_attention(view, queries, out, scale, mask=None, sinks=None):
    """Assert that `out` is within twice the error of mlx's attention over the decoded cache, in the same type.

    In float32 both errors are a few units in the last place and their ratio is chance, so that a part of the room is a
    fixed number of them.
    """
    keys, values = decoded(view)
    exact = exact_attention(queries, keys, values, scale, mask, sinks)
    own = reference_error(view, queries, exact, scale, mask, sinks)
    room = 32 * float(mx.finfo(mx.float32).eps) * np.abs(values).max()
    assert error(out, exact) <= 2 * own + room


def uneven(count, *, batch=1, seed=0):
    """Keys and values whose dims differ in energy, otherwise in each head: what formats that learn are for."""
    pair = []
    for side in range(2):
        scale = random(1, batch=batch, dtype=mx.float32, seed=100 + seed + side)
        pair.append((random(count, batch=batch, seed=seed + side) * mx.exp(scale)).astype(mx.float16))
    return pair
