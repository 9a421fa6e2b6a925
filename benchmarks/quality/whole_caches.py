"""Caches that hold all keys and values as they are, and hand attention over to a study."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from mlx_tq.cache.view import Handle, make_handles

# Queries [1, Hq, L, D], keys and values [1, H, S, D], the scale of scores, the mask, and sinks.
Attend = Callable[[mx.array, mx.array, mx.array, float, Any, mx.array | None], mx.array]


@dataclass
class _View:
    """What a pass reads of one layer."""

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
    """One layer's; inside `compressed_attention` `answer` attends."""

    def __init__(self, answer: Attend) -> None:
        """Empty."""
        super().__init__()
        self._answer = answer

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Handle, Handle]:
        """Append a pass's keys and values, and hand out what attends to all."""
        keys, values = super().update_and_fetch(keys, values)
        return make_handles(_View(keys, values, self._answer), keys.dtype)  # type: ignore[arg-type]
