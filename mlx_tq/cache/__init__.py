"""Compressed KV caches that mlx-lm's models and tools take for their own."""

import mlx_lm.models.cache as _native

from mlx_tq.cache.batch import BatchCompressedKVCache
from mlx_tq.cache.compressed import CompressedKVCache
from mlx_tq.cache.evicting import EvictingKVCache
from mlx_tq.cache.mixed import MixedKVCache

__all__ = ["BatchCompressedKVCache", "CompressedKVCache", "EvictingKVCache", "MixedKVCache"]

# mlx-lm's load_prompt_cache and CacheList look classes up among the globals of this module.
for _cache in (CompressedKVCache, EvictingKVCache, MixedKVCache, BatchCompressedKVCache):
    setattr(_native, _cache.__name__, _cache)
