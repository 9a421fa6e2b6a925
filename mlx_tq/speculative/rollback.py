"""Tells which caches can drop the rows of rejected drafts."""

from typing import Any

from mlx_tq.cache.latent import LatentKVCache
from mlx_tq.cache.layer import cache_parts
from mlx_tq.models import ranks_of


def lookup_blocker(model: Any, caches: list[Any]) -> str | None:
    """Return why prompt lookup cannot be used for a model on its caches, None if it can."""
    parts = cache_parts(caches)
    if not ranks_of(model).is_alone:
        return "several processes may time passes differently, and would draft different tokens"
    if any(getattr(row, "evicts", False) for part in parts for row in getattr(part, "rows", [part])):
        return "an eviction round cannot be undone when a draft is rejected"
    if any(isinstance(part, LatentKVCache) and part.spec.indexed for part in parts):
        return "the model's indexer numbers the latents of a pass, so that its tokens see other ones than alone"
    if any(not part.is_trimmable() and window_of(part) is None for part in parts):
        kinds = ", ".join(sorted({type(part).__name__ for part in parts if not part.is_trimmable()}))
        return f"the model's recurrent states ({kinds}) cannot drop a rejected draft"
    return None


def has_windows(caches: list[Any]) -> bool:
    """Whether caches have sliding windows, which cannot drop a rejected draft once they are full."""
    return any(window_of(part) is not None for part in cache_parts(caches))


def can_roll_back(caches: list[Any], rows: int) -> bool:
    """Return whether caches can drop the next `rows` tokens again."""
    return all(
        part.is_trimmable() and (window is None or getattr(part, "_offset", part.offset) + rows <= window)
        for part, window in ((part, window_of(part)) for part in cache_parts(caches))
    )


def window_of(part: Any) -> int | None:
    """Return the tokens of a sliding window, None for other caches."""
    window: int | None = getattr(part, "max_size", None)
    return window
