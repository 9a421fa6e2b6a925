"""Caches of prompts and answers in memory, kept for requests that begin as they do."""

import logging
from typing import Any

from mlx_lm.models.cache import LRUPromptCache, can_trim_prompt_cache, trim_prompt_cache

from mlx_tq.errors import CacheFormatError
from mlx_tq.session.recall import archive_warning, release

log = logging.getLogger(__name__)
_ONE_MODEL = "model"  # the key under which mlx-lm's prompt cache, which could hold several models, has ours


class KeptPrompts:
    """mlx-lm's prompt cache of one model: the least recently used leave first.

    Args:
        entries: caches that are kept, at most.
        nbytes: that they take, at most.
    """

    def __init__(self, entries: int, nbytes: int) -> None:
        self._kept = LRUPromptCache(entries, nbytes)

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def nbytes(self) -> int:
        """Of all of them."""
        return int(self._kept.nbytes)

    def trim_to(self, nbytes: int) -> None:
        """Let those go that exceed so many bytes."""
        self._kept.trim_to(n_bytes=nbytes)

    def clear(self) -> None:
        """Let all go."""
        self._kept.trim_to(n_sequences=0)

    def keep(self, tokens: list[int], caches: list[Any], kind: str) -> None:
        """Keep caches that have read `tokens`; `kind` is the role of what was read last."""
        release(caches)
        if warning := archive_warning(caches):
            log.warning(warning)
        self._kept.insert_cache(_ONE_MODEL, list(tokens), caches, cache_type=kind)

    def find(self, ids: list[int], least: int) -> tuple[list[Any] | None, int]:
        """A cache that holds the beginning of a prompt, but for its last `least` tokens, and how much of it."""
        asked = ids[: len(ids) - least + 1]  # all but one of them may be held
        if len(asked) <= 1:
            return None, 0
        try:
            caches, rest = self._kept.fetch_nearest_cache(_ONE_MODEL, asked)
        except CacheFormatError:  # what left of the beginning that is shared is not archived
            return None, 0
        if caches is None or rest:
            return caches, len(asked) - len(rest)
        if not can_trim_prompt_cache(caches):
            return None, 0
        trim_prompt_cache(caches, 1)
        return caches, len(asked) - 1
