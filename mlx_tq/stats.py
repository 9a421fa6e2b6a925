"""Numbers of one generation."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mlx_lm.models.cache import QuantizedKVCache

from mlx_tq.cache.coordinator import EvictionStats
from mlx_tq.cache.evicting import EvictingKVCache
from mlx_tq.cache.factory import Plan, cache_parts, compressed_caches


@dataclass(frozen=True)
class CacheStats:
    """What a prompt cache holds.

    Attributes:
        tokens: seen by the cache.
        nbytes: of all its arrays.
        fp16_nbytes: of the same tokens had nothing been compressed.
        clamped: vectors that exceeded fp16's range and were clamped to it.
        evicted: tokens that left.
        rounds: in which they did.
        evict_seconds: that these took.
    """

    tokens: int
    nbytes: int
    fp16_nbytes: int
    clamped: int
    evicted: int = 0
    rounds: int = 0
    evict_seconds: float = 0.0

    @property
    def retention(self) -> float:
        """Share of the tokens that stayed."""
        return 1 - self.evicted / self.tokens if self.tokens else 1.0

    @property
    def ratio(self) -> float:
        """How many times smaller than fp16."""
        return self.fp16_nbytes / self.nbytes if self.nbytes else 1.0


def tokens_seen(caches: Sequence[Any]) -> int:
    """Tokens that went through a prompt cache, whatever became of them."""
    return max((int(part.offset) for part in cache_parts(caches) if hasattr(part, "offset")), default=0)


def cache_stats(caches: Sequence[Any], plan: Plan | None) -> CacheStats:
    """Measure a cache; `plan` is how it was made, None for mlx-lm's own. Waits for its arrays."""
    tokens = tokens_seen(caches)
    caches = [cache for cache in caches if not cache.empty()]
    total = sum(cache.nbytes for cache in caches)
    compressed = compressed_caches(caches)
    quantized = [part for part in cache_parts(caches) if isinstance(part, QuantizedKVCache) and not part.empty()]
    native = total - sum(cache.nbytes for cache in (*compressed, *quantized)) + sum(map(_unquantized, quantized))
    if compressed and plan is not None:
        native += plan.native_nbytes(tokens)
    gone = next((cache.eviction for cache in compressed if isinstance(cache, EvictingKVCache)), EvictionStats())
    return CacheStats(
        tokens,
        total,
        native,
        clamped=sum(cache.clamped for cache in compressed),
        evicted=gone.tokens,
        rounds=gone.rounds,
        evict_seconds=gone.seconds,
    )


def _unquantized(cache: Any) -> int:
    """Bytes of a cache that mlx-lm quantised, in the type of its scales."""
    vectors = sum(scales[..., : cache.offset, :].nbytes for _, scales, _ in (cache.keys, cache.values))
    return int(vectors * cache.group_size)


@dataclass(frozen=True)
class GenerationStats:
    """Speed and memory of one generation.

    Attributes:
        prompt_tokens, generation_tokens: counts.
        ttft: seconds to the first token.
        prompt_tps, generation_tps: tokens a second.
        finish_reason: "stop", "length" or "interrupted".
        peak_memory: bytes.
        cache: of the whole conversation.
    """

    prompt_tokens: int
    generation_tokens: int
    ttft: float
    prompt_tps: float
    generation_tps: float
    finish_reason: str
    peak_memory: int
    cache: CacheStats

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        cache = {**asdict(self.cache), "ratio": self.cache.ratio, "retention": self.cache.retention}
        return {**asdict(self), "cache": cache}
