"""The compressed KV cache of one layer, alone or as a row of a batch."""

import mlx_lm.models.cache as _native

from mlx_tq.cache.batch import BatchCompressedKVCache
from mlx_tq.cache.compacted import CompactedKVCache
from mlx_tq.cache.headwise import HeadwiseKVCache
from mlx_tq.cache.latent import BatchLatentKVCache, LatentKVCache
from mlx_tq.cache.layer import CompressedKVCache
from mlx_tq.cache.tiered import TieredKVCache

# mlx-lm's load_prompt_cache and CacheList look classes up among the globals of this module.
for _cache in (
    CompressedKVCache,
    CompactedKVCache,
    HeadwiseKVCache,
    LatentKVCache,
    TieredKVCache,
    BatchCompressedKVCache,
    BatchLatentKVCache,
):
    setattr(_native, _cache.__name__, _cache)
