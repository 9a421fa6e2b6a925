"""Numbers of one generation."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.cache import QuantizedKVCache

from mlx_tq.prompt_cache.eviction import EvictionStats
from mlx_tq.prompt_cache.layer_group import sequence_of
from mlx_tq.prompt_cache.passes import cache_parts, compressed_caches
from mlx_tq.prompt_cache.plan import Plan
from mlx_tq.prompt_cache.tiers import Tiers


@dataclass(frozen=True)
class CacheStats:
    """What a prompt cache holds.

    Attributes:
        tokens: seen by the cache.
        nbytes: of all its arrays.
        fp16_nbytes: of the same tokens at 16 bits, whatever the model's type is.
        clamped: vectors that exceeded fp16's range and were clamped to it.
        evicted: tokens that left.
        rounds: in which they did.
        evict_seconds: that these took.
        archived, archived_nbytes: of those that left, the tokens whose rows are on the disk, and the bytes there.
        back: of those that left, the tokens whose rows are live again.
    """

    tokens: int
    nbytes: int
    fp16_nbytes: int
    clamped: int
    evicted: int = 0
    rounds: int = 0
    evict_seconds: float = 0.0
    archived: int = 0
    archived_nbytes: int = 0
    back: int = 0

    @property
    def tiers(self) -> Tiers:
        """Where the tokens are."""
        lost = max(0, self.evicted - self.archived)
        live = self.tokens - self.evicted + self.back
        return Tiers(live, self.nbytes, self.archived, self.archived_nbytes, lost)

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
    counted = {id(part) for part in (*compressed, *quantized)}
    others = [part for part in cache_parts(caches) if id(part) not in counted]
    fp16 = sum(map(_fp16, others)) + sum(map(_unquantized, quantized))
    if compressed and plan is not None:
        fp16 += plan.fp16_nbytes(tokens)
    sequence = sequence_of(compressed)
    gone = sequence.stats if sequence else EvictionStats()
    extents = [extent for extent in sequence.archived if not extent.lost] if sequence else []
    return CacheStats(
        tokens,
        total,
        fp16,
        clamped=sum(cache.clamped for cache in compressed),
        evicted=gone.tokens,
        rounds=gone.rounds,
        evict_seconds=gone.seconds,
        archived=sum(len(extent.positions) for extent in extents),
        archived_nbytes=sum(extent.size for extent in extents),
        back=len(sequence.recalled) if sequence else 0,
    )


def _unquantized(cache: Any) -> int:
    """Bytes at 16 bits of a cache that mlx-lm quantised."""
    vectors = sum(scales[..., : cache.offset, :].size for _, scales, _ in (cache.keys, cache.values))
    return int(2 * vectors * cache.group_size)


def _fp16(cache: Any) -> int:
    """Bytes at 16 bits of a cache of mlx-lm's, unused capacity included."""
    leaves: list[tuple[str, Any]] = tree_flatten(cache.state)  # type: ignore[assignment]
    arrays = [leaf for _, leaf in leaves if isinstance(leaf, mx.array)]
    widest = max((array.dtype.size for array in arrays if mx.issubdtype(array.dtype, mx.floating)), default=2)
    return int(cache.nbytes) * 2 // widest


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
        cached_tokens: of the prompt, those that the store of prefixes had.
        restore_seconds: that it took to restore them.
    """

    prompt_tokens: int
    generation_tokens: int
    ttft: float
    prompt_tps: float
    generation_tps: float
    finish_reason: str
    peak_memory: int
    cache: CacheStats
    cached_tokens: int = 0
    restore_seconds: float = 0.0

    @property
    def recompute_seconds(self) -> float:
        """To read again what no tier has, at the speed of this prompt; 0 where none was read."""
        return self.cache.tiers.recompute / self.prompt_tps if self.prompt_tps else 0.0

    def to_dict(self) -> dict[str, Any]:
        """The statistics as plain data, for JSON."""
        cache = {**asdict(self.cache), "ratio": self.cache.ratio, "retention": self.cache.retention}
        tiers = {**asdict(self.cache.tiers), "recompute_seconds": self.recompute_seconds}
        return {**asdict(self), "cache": cache, "tiers": tiers}
