"""Free the memory that caches hold beyond their tokens, before they are stored."""

import copy
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import CacheList, KVCache, RotatingKVCache

from mlx_tq.cache.layer import CompressedKVCache, cache_parts
from mlx_tq.prompt_cache.layer_group import cache_arrays


def release_capacity(caches: list[Any]) -> None:
    """Free what has no tokens, or will not be read again; the next pass allocates what it needs."""
    for part in cache_parts(caches):
        if isinstance(part, CompressedKVCache):
            part.release_capacity()
        elif type(part) is KVCache and part.keys is not None:
            part.keys, part.values = (mx.contiguous(rows[:, :, : part.offset]) for rows in (part.keys, part.values))
        elif type(part) is RotatingKVCache:
            _trim_window(part)
    mx.eval(all_arrays(caches))


def with_trimmed_windows(cache: Any) -> Any:
    """Return a cache, or a copy whose rotating windows have no rows that no later token sees."""
    if isinstance(cache, CacheList):
        return CacheList(*map(with_trimmed_windows, cache.caches))
    if type(cache) is RotatingKVCache:
        cache = copy.copy(cache)
        _trim_window(cache)
    return cache


def all_arrays(caches: list[Any]) -> list[mx.array]:
    """Return all arrays; rows that caches share are the same array in each."""
    parts = cache_parts(caches)
    return [x for part in parts for x in (part.arrays() if isinstance(part, CompressedKVCache) else cache_arrays(part))]


def _trim_window(cache: RotatingKVCache) -> None:
    """Drop the rows that a long prefill step added to the window, as mlx-lm does before the next token."""
    if cache.keys is not None and (excess := cache.keys.shape[2] - cache.max_size) > 0:
        cache.keys, cache.values = (
            cache._trim(excess, cache._temporal_order(rows)) for rows in (cache.keys, cache.values)
        )
        cache._idx = cache.max_size
