"""One layer: its stored tokens as sinks, packed body and tail, alone or as a row of a batch, and in files."""

import mlx_lm.models.cache as _native

from mlx_tq.cache.batch import BatchCompressedKVCache
from mlx_tq.cache.layer import CompressedKVCache
from mlx_tq.cache.tiered import TieredKVCache

# mlx-lm's load_prompt_cache and CacheList look classes up among the globals of this module.
for _cache in (CompressedKVCache, TieredKVCache, BatchCompressedKVCache):
    setattr(_native, _cache.__name__, _cache)
