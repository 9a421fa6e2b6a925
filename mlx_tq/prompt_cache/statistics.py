"""`CacheStats`: the tokens and bytes of a prompt cache, measured or predicted."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.cache import QuantizedKVCache

from mlx_tq.prompt_cache.archive import LIMIT
from mlx_tq.prompt_cache.layer_group import EvictionStats, cache_parts, compressed_caches, layer_group_of
from mlx_tq.prompt_cache.plan import Plan


@dataclass(frozen=True)
class CacheStats:
    """The tokens and bytes of a prompt cache.

    Attributes:
        tokens: tokens that the cache has seen.
        nbytes: bytes of its arrays.
        fp16_nbytes: bytes of all its tokens at 16 bits, evicted ones included.
        clamped: vectors that exceeded fp16's range and were clamped to it.
        evicted: tokens that were evicted.
        rounds: eviction rounds.
        evict_seconds: seconds that the rounds took.
        archived: evicted tokens whose rows are on disk.
        archived_nbytes: bytes of these rows.
        recalled: evicted tokens whose rows are in the cache again.
    """

    tokens: int
    nbytes: int
    fp16_nbytes: int
    clamped: int = 0
    evicted: int = 0
    rounds: int = 0
    evict_seconds: float = 0.0
    archived: int = 0
    archived_nbytes: int = 0
    recalled: int = 0

    @property
    def live(self) -> int:
        """Tokens in the cache, recalled ones included."""
        return self.tokens - self.evicted + self.recalled

    @property
    def dropped(self) -> int:
        """Evicted tokens that are not archived."""
        return max(0, self.evicted - self.archived)

    @property
    def retention(self) -> float:
        """Share of the tokens that were not evicted."""
        return 1 - self.evicted / self.tokens if self.tokens else 1.0

    @property
    def ratio(self) -> float:
        """How many times smaller than fp16 the cache is."""
        return self.fp16_nbytes / self.nbytes if self.nbytes else 1.0

    def to_dict(self) -> dict[str, Any]:
        """Return the fields and properties as plain data, for JSON."""
        properties = {name: getattr(self, name) for name in ("live", "dropped", "retention", "ratio")}
        return asdict(self) | properties


def predict_stats(plan: Plan, tokens: int) -> CacheStats:
    """Return the statistics of a cache that has seen `tokens`, up to the limit of its archive."""
    evicted, archived = tokens - plan.live(tokens), 0
    row_nbytes = sum(layer.slot.heads * layer.row_nbytes for layer in plan.layers)
    if plan.eviction is not None and plan.recalls:
        limit = plan.eviction.config.archive_limit
        archived = min(evicted, (LIMIT if limit is None else limit) // row_nbytes)
    return CacheStats(
        tokens,
        plan.nbytes(tokens),
        plan.fp16_nbytes(tokens),
        evicted=evicted,
        archived=archived,
        archived_nbytes=archived * row_nbytes,
    )


def tokens_seen(caches: Sequence[Any]) -> int:
    """Return how many tokens a prompt cache has seen, evicted ones included."""
    return max((int(part.offset) for part in cache_parts(caches) if hasattr(part, "offset")), default=0)


def cache_stats(caches: Sequence[Any], plan: Plan | None) -> CacheStats:
    """Measure a prompt cache; `plan` is None for mlx-lm's own. Waits for its arrays."""
    tokens = tokens_seen(caches)
    caches = [cache for cache in caches if not cache.empty()]
    compressed = compressed_caches(caches)
    quantized = [part for part in cache_parts(caches) if isinstance(part, QuantizedKVCache) and not part.empty()]
    counted = {id(part) for part in (*compressed, *quantized)}
    others = [part for part in cache_parts(caches) if id(part) not in counted]
    fp16_nbytes = sum(map(_fp16_nbytes, others)) + sum(map(_dequantized_nbytes, quantized))
    if compressed and plan is not None:
        fp16_nbytes += plan.fp16_nbytes(tokens)
    group = layer_group_of(compressed)
    eviction = group.stats if group else EvictionStats()
    blocks = [block for block in group.archived if not block.lost] if group else []
    return CacheStats(
        tokens,
        sum(cache.nbytes for cache in caches),
        fp16_nbytes,
        clamped=sum(cache.clamped for cache in compressed),
        evicted=eviction.tokens,
        rounds=eviction.rounds,
        evict_seconds=eviction.seconds,
        archived=sum(len(block.positions) for block in blocks),
        archived_nbytes=sum(block.nbytes for block in blocks),
        recalled=len(group.recalled) if group else 0,
    )


def _dequantized_nbytes(cache: Any) -> int:
    """Return the bytes at 16 bits of a cache that mlx-lm quantized."""
    vectors = sum(scales[..., : cache.offset, :].size for _, scales, _ in (cache.keys, cache.values))
    return int(2 * vectors * cache.group_size)


def _fp16_nbytes(cache: Any) -> int:
    """Return the bytes at 16 bits of a cache of mlx-lm's, unused capacity included."""
    leaves: list[tuple[str, Any]] = tree_flatten(cache.state)  # type: ignore[assignment]
    arrays = [leaf for _, leaf in leaves if isinstance(leaf, mx.array)]
    widest = max((array.dtype.size for array in arrays if mx.issubdtype(array.dtype, mx.floating)), default=2)
    return int(cache.nbytes) * 2 // widest
