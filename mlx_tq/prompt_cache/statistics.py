"""`CacheStats`: the tokens and bytes of a prompt cache, measured or predicted."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import QuantizedKVCache

from mlx_tq.cache.layer import cache_parts
from mlx_tq.codec.formats.base import dtype_name
from mlx_tq.prompt_cache.layer_group import (
    EvictionStats,
    cache_arrays,
    cache_offsets,
    compressed_caches,
    layer_group_of,
)
from mlx_tq.prompt_cache.plan import Plan


@dataclass(frozen=True)
class CacheStats:
    """The tokens and bytes of a prompt cache.

    Each token is in one place: `tokens` = `live` + `evicted`, and `evicted` = `archived` + `dropped`.

    Attributes:
        tokens: tokens that the cache has seen.
        nbytes: bytes of its arrays, allocated ones that are not in use included.
        native_nbytes: bytes of the arrays that mlx-lm's own cache would hold for all tokens, evicted ones included.
        native_dtype: dtype of mlx-lm's own cache, such as "bfloat16"; "" while that is not known.
        compressed_from: tokens from which a cache compresses any.
        clamped: vectors that exceeded fp16's range and were clamped to it.
        evicted: tokens that were evicted and are not in the cache.
        rounds: eviction rounds.
        evict_seconds: seconds that the rounds took.
        archived: evicted tokens whose rows are on disk.
        archived_nbytes: bytes of these rows.
        recalled: live tokens that were evicted, and recalled since.
        by_head: whether retrieval heads keep all tokens; evicted and recalled ones are then those of streaming heads.
    """

    tokens: int
    nbytes: int
    native_nbytes: int
    native_dtype: str = ""
    compressed_from: int = 0
    clamped: int = 0
    evicted: int = 0
    rounds: int = 0
    evict_seconds: float = 0.0
    archived: int = 0
    archived_nbytes: int = 0
    recalled: int = 0
    by_head: bool = False

    @property
    def live(self) -> int:
        """Tokens in the cache, recalled ones included."""
        return self.tokens - self.evicted

    @property
    def dropped(self) -> int:
        """Evicted tokens that are not archived."""
        return self.evicted - self.archived

    @property
    def retention(self) -> float:
        """Share of the tokens that are in the cache."""
        return 1 - self.evicted / self.tokens if self.tokens else 1.0

    @property
    def ratio(self) -> float:
        """How many times smaller than mlx-lm's own cache the cache is."""
        return self.native_nbytes / self.nbytes if self.nbytes else 1.0

    @property
    def is_comparable(self) -> bool:
        """Return whether the cache is long enough to be compressed, and not mlx-lm's own."""
        return self.tokens >= self.compressed_from and self.nbytes != self.native_nbytes

    def to_dict(self) -> dict[str, Any]:
        """Return the fields and properties as plain data, for JSON."""
        properties = {name: getattr(self, name) for name in ("live", "dropped", "retention", "ratio")}
        return asdict(self) | properties


def predict_stats(plan: Plan, tokens: int) -> CacheStats:
    """Return the statistics of a cache that has seen `tokens`, up to the limit of its archive."""
    evicted, archived = tokens - plan.live(tokens), 0
    row_nbytes = sum(
        (layer.slot.heads - len(layer.spec.retrieval_heads)) * layer.row_nbytes for layer in plan.layers if layer.evicts
    )
    if plan.eviction is not None and plan.recalls:
        archived = min(evicted, plan.eviction.archive_limit // row_nbytes)
    return CacheStats(
        tokens,
        plan.nbytes(tokens),
        plan.native_nbytes(tokens),
        plan.native_dtype,
        plan.compressed_from,
        evicted=evicted,
        archived=archived,
        archived_nbytes=archived * row_nbytes,
        by_head=plan.eviction is not None and plan.eviction.retrieval_heads > 0,
    )


def tokens_seen(caches: Sequence[Any]) -> int:
    """Return how many tokens a prompt cache has seen, evicted ones included."""
    return max(map(int, cache_offsets(caches)), default=0)


def cache_stats(caches: Sequence[Any], plan: Plan | None) -> CacheStats:
    """Measure a prompt cache; `plan` is None for mlx-lm's own. Waits for its arrays."""
    tokens = tokens_seen(caches)
    caches = [cache for cache in caches if not cache.empty()]
    compressed = compressed_caches(caches)
    quantized = [part for part in cache_parts(caches) if isinstance(part, QuantizedKVCache) and not part.empty()]
    counted = {id(part) for part in (*compressed, *quantized)}
    others = [part for part in cache_parts(caches) if id(part) not in counted]
    native_nbytes = sum(part.nbytes for part in others) + sum(map(_dequantized_nbytes, quantized))
    if compressed and plan is not None:
        native_nbytes += plan.native_nbytes(tokens) - plan.uncompressed_nbytes(tokens)
    group = layer_group_of(compressed)
    eviction = group.stats if group else EvictionStats()
    blocks = [b for b in group.archived if not b.lost and b.positions[0] not in group.recalled] if group else []
    return CacheStats(
        tokens,
        sum(cache.nbytes for cache in caches),
        native_nbytes,
        _native_dtype(quantized or others) if plan is None else plan.native_dtype,
        plan.compressed_from if compressed and plan is not None else 0,
        clamped=sum(cache.clamped for cache in compressed),
        evicted=len(group.evicted) - len(group.recalled) if group else 0,
        rounds=eviction.rounds,
        evict_seconds=eviction.seconds,
        archived=sum(len(block.positions) for block in blocks),
        archived_nbytes=sum(block.nbytes for block in blocks),
        recalled=len(group.recalled) if group else 0,
        by_head=group is not None and group.plan.retrieval_heads > 0,
    )


def _dequantized_nbytes(cache: QuantizedKVCache) -> int:
    """Return the bytes of a cache that mlx-lm quantized, had it not."""
    return sum(int(scales.nbytes) * cache.group_size for _, scales, _ in (cache.keys, cache.values))


def _native_dtype(caches: Sequence[Any]) -> str:
    """Return the dtype of the keys and values of mlx-lm's own caches; "" if they are empty."""
    arrays = (array for cache in caches for array in cache_arrays(cache))
    return next((dtype_name(array.dtype) for array in arrays if mx.issubdtype(array.dtype, mx.floating)), "")
