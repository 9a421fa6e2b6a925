"""Caches that hold all keys and values as they are, and hand attention over to a study."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from mlx_tq.cache.handles import Handle, handles

# Queries [1, Hq, L, D], keys and values [1, H, S, D], the scale of scores, the mask, and sinks.
Attend = Callable[[mx.array, mx.array, mx.array, float, Any, mx.array | None], mx.array]


@dataclass
class _View:
    keys: mx.array
    values: mx.array
    answer: Attend
    wants_queries = False

    def key_shape(self) -> tuple[int, ...]:
        return self.keys.shape

    def value_shape(self) -> tuple[int, ...]:
        return self.values.shape

    def attend(self, queries: mx.array, scale: float, mask: Any, sinks: mx.array | None) -> mx.array:
        return self.answer(queries, self.keys, self.values, scale, mask, sinks)


class WholeCache(KVCache):  # type: ignore[misc]
    """A layer's keys and values as they are; inside `patch_attention` the study attends."""

    def __init__(self, answer: Attend) -> None:
        super().__init__()
        self._answer = answer

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Handle, Handle]:
        keys, values = super().update_and_fetch(keys, values)
        return handles(_View(keys, values, self._answer), keys.dtype)  # type: ignore[arg-type]
