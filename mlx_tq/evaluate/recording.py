"""Record what a model's layers attend with: queries, keys and values, as the cache would store them."""

from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import CacheList, KVCache

from mlx_tq.cache.handles import Handle, handles
from mlx_tq.integration.probe import native_caches
from mlx_tq.kernels.masks import Mask
from mlx_tq.prompt_cache.compressed import compressed


@dataclass(frozen=True)
class Attended:
    """The last step of one layer.

    Attributes:
        keys, values: of all tokens, [B, H, S, D].
        queries: of the last L of them, [B, Hq, L, Dk].
        scale: of the scores.
        mask: as in `kernels.masks`.
        sinks: attention-sink logits or None.
        output: of attention in the model's type, [B, Hq, L, Dv].
        earlier: queries of the tokens before them, [B, Hq, S - L, Dk].
    """

    keys: mx.array
    values: mx.array
    queries: mx.array
    scale: float
    mask: Mask
    sinks: mx.array | None
    output: mx.array
    earlier: mx.array


class _Recording:
    """A view that attends as mlx-lm does, and keeps what it was asked last."""

    def __init__(self, keys: mx.array, values: mx.array) -> None:
        self._keys, self._values = keys, values
        self.attended: Attended | None = None

    def key_shape(self) -> tuple[int, ...]:
        return self._keys.shape

    def value_shape(self) -> tuple[int, ...]:
        return self._values.shape

    wants_queries = False

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
    """A KVCache that records its last step."""

    def keys_and_values(self) -> tuple[Handle, Handle]:
        keys, values = super().keys_and_values()
        self.view = _Recording(keys, values)
        return handles(self.view, keys.dtype)


def _recording(cache: Any) -> Any:
    if type(cache) is CacheList:
        return CacheList(*map(_recording, cache.caches))
    return _Recorder() if type(cache) is KVCache else cache


def record(model: Any, ids: list[int], last: int) -> list[Attended]:
    """Read `ids` and return, for each plain KV cache of the model, how its last `last` tokens attended.

    The order is that of the layers of a `Plan`.
    """
    caches = [_recording(cache) for cache in native_caches(model)]
    parts = [part for cache in caches for part in (cache.caches if isinstance(cache, CacheList) else [cache])]
    recorders = [part for part in parts if isinstance(part, _Recorder)]
    steps = []
    with compressed(model):
        for part in (ids[:-last], ids[-last:]):
            mx.eval(model(mx.array(part)[None], cache=caches))
            steps.append([each.view.attended for each in recorders if each.view.attended is not None])
    return [replace(asked, earlier=before.queries) for before, asked in zip(*steps, strict=True)]
