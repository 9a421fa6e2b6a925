"""Watch the attention of plain KV caches, and record with what it was called."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import CacheList, KVCache

from mlx_tq.cache.view import Handle, make_handles
from mlx_tq.errors import UnsupportedModelError
from mlx_tq.integration.probe import model_facts, native_caches
from mlx_tq.kernels.mlx_attention import attend_in_full_precision
from mlx_tq.kernels.regions import Mask
from mlx_tq.prompt_cache.compressed import compressed_attention

# Called with queries [B, Hq, L, Dk], keys [B, H, S, Dk], values [B, H, S, Dv], scale, mask and attention-sink logits.
Attend = Callable[[mx.array, mx.array, mx.array, float, Mask, mx.array | None], mx.array]


@dataclass(frozen=True)
class Attended:
    """The last step of one layer: L queries over S tokens."""

    queries: mx.array  # [B, Hq, L, Dk]
    keys: mx.array  # [B, H, S, Dk]
    values: mx.array  # [B, H, S, Dv]
    scale: float
    mask: Mask
    sinks: mx.array | None  # attention-sink logits
    output: mx.array  # [B, Hq, L, Dv], in the model's type
    earlier_queries: mx.array  # [B, Hq, S - L, Dk], of the tokens before the step


@dataclass
class _View:
    keys: mx.array
    values: mx.array
    watch: Attend
    wants_queries = False

    def key_shape(self) -> tuple[int, ...]:
        return self.keys.shape

    def value_shape(self) -> tuple[int, ...]:
        return self.values.shape

    def notify_before_rope(self, queries: mx.array, rope: Any) -> "_View":
        return self

    def attend(self, queries: mx.array, scale: float, mask: Mask, sinks: mx.array | None) -> mx.array:
        return self.watch(queries, self.keys, self.values, scale, mask, sinks)

    def materialize(self) -> tuple[mx.array, mx.array]:
        return self.keys, self.values


class WatchedCache(KVCache):  # type: ignore[misc]
    """mlx-lm's cache, whose attention a callback computes while attention is patched."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self._attend = attend

    def keys_and_values(self) -> tuple[Handle, Handle]:
        keys, values = super().keys_and_values()
        return make_handles(_View(keys, values, self._attend), keys.dtype)


def record_attention(model: Any, ids: list[int], last: int) -> list[Attended]:
    """Prefill `ids` and return how the last `last` tokens attended in each plain KV cache, in the order of a `Plan`."""
    calls: dict[int, Attended] = {}  # the last one of each cache

    def record(number: int, attended: Attended) -> None:
        calls[number] = attended

    caches, steps = watched_caches(model, record), []
    with compressed_attention(model):
        for part in (ids[:-last], ids[-last:]):
            mx.eval(model(mx.array(part)[None], cache=caches))
            steps.append([calls[number] for number in sorted(calls)])
    return [replace(step, earlier_queries=before.queries) for before, step in zip(*steps, strict=True)]


def watched_caches(model: Any, watch: Callable[[int, Attended], None]) -> list[Any]:
    """Return empty caches of mlx-lm's; those of a `Plan` call `watch` with each pass, and with their number in it."""
    facts = model_facts(model)
    if any(slot.latent for slot in facts.slots):
        raise UnsupportedModelError(
            f"{facts.model_type} caches latents (MLA), whose keys and values no cache sees. Use another policy or "
            "measurement."
        )
    numbers = {(slot.index, slot.part): number for number, slot in enumerate(facts.slots)}

    def watched(cache: Any, index: int, part: int | None = None) -> Any:
        if type(cache) is CacheList:
            return CacheList(*(watched(inner, index, place) for place, inner in enumerate(cache.caches)))
        number = numbers.get((index, part))
        return cache if number is None else WatchedCache(partial(_attend, watch, number))

    return [watched(cache, index) for index, cache in enumerate(native_caches(model))]


def _attend(
    watch: Callable[[int, Attended], None],
    number: int,
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    mask: Mask,
    sinks: mx.array | None,
) -> mx.array:
    output = attend_in_full_precision(queries, keys, values, scale=scale, mask=mask, sinks=sinks)
    watch(number, Attended(queries, keys, values, scale, mask, sinks, output, queries[:, :, :0]))
    return output
