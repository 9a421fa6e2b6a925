"""Record the queries, keys and values with which the layers of a model attend."""

from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import CacheList, KVCache

from mlx_tq.cache.handles import Handle, handles
from mlx_tq.integration.probe import native_caches
from mlx_tq.kernels.regions import Mask
from mlx_tq.prompt_cache.compressed import compressed
from mlx_tq.prompt_cache.passes import cache_parts


@dataclass(frozen=True)
class Attended:
    """The last step of one layer: L queries over S tokens."""

    keys: mx.array  # [B, H, S, Dk]
    values: mx.array  # [B, H, S, Dv]
    queries: mx.array  # [B, Hq, L, Dk]
    scale: float
    mask: Mask
    sinks: mx.array | None  # attention-sink logits
    output: mx.array  # [B, Hq, L, Dv], in the model's type
    earlier_queries: mx.array  # [B, Hq, S - L, Dk], of the tokens before the step


class _Recording:
    """A view that attends as mlx-lm does, and records its last call."""

    wants_queries = False

    def __init__(self, keys: mx.array, values: mx.array) -> None:
        self._keys, self._values = keys, values
        self.attended: Attended | None = None

    def key_shape(self) -> tuple[int, ...]:
        return self._keys.shape

    def value_shape(self) -> tuple[int, ...]:
        return self._values.shape

    def observed(self, queries: mx.array, rope: Any) -> "_Recording":
        return self

    def attend(self, queries: mx.array, scale: float, mask: Mask, sinks: mx.array | None) -> mx.array:
        keys, values = self._keys, self._values
        output = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask, sinks=sinks)
        self.attended = Attended(keys, values, queries, scale, mask, sinks, output, queries[:, :, :0])
        return output

    def materialize(self) -> tuple[mx.array, mx.array]:
        return self._keys, self._values


class _Recorder(KVCache):  # type: ignore[misc]
    def keys_and_values(self) -> tuple[Handle, Handle]:
        keys, values = super().keys_and_values()
        self.view = _Recording(keys, values)
        return handles(self.view, keys.dtype)


def _with_recorders(cache: Any) -> Any:
    if type(cache) is CacheList:
        return CacheList(*map(_with_recorders, cache.caches))
    return _Recorder() if type(cache) is KVCache else cache


def record_attention(model: Any, ids: list[int], last: int) -> list[Attended]:
    """Prefill `ids` and return how the last `last` tokens attended in each plain KV cache, in the order of a `Plan`."""
    caches = [_with_recorders(cache) for cache in native_caches(model)]
    recorders = [part for part in cache_parts(caches) if isinstance(part, _Recorder)]
    steps = []
    with compressed(model):
        for part in (ids[:-last], ids[-last:]):
            mx.eval(model(mx.array(part)[None], cache=caches))
            steps.append([recorder.view.attended for recorder in recorders if recorder.view.attended is not None])
    return [replace(step, earlier_queries=before.queries) for before, step in zip(*steps, strict=True)]
