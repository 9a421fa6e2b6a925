"""Learn from one short run how a model uses its cache: what would be compressed, and whether it can be.

Lists of model names go stale, so the model itself is asked: it runs on 64 tokens with caches that hand out handles
instead of arrays. A model that computes with fetched keys fails here, by name, before anything was generated.
"""

from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import CacheList, KVCache

from mlx_tq.cache.handles import Handle, handles
from mlx_tq.codec.formats.base import dtype_name
from mlx_tq.distributed.group import Ranks
from mlx_tq.errors import UnsupportedModelError
from mlx_tq.integration import rope_hooks
from mlx_tq.integration.attention import compressed_attention
from mlx_tq.integration.facts import ModelFacts, SlotFacts
from mlx_tq.kernels.masks import Mask
from mlx_tq.models import ranks_of

TOKENS = 64
_STRIDE = 7919  # a prime, so that the tokens are spread over any vocabulary


class _ProbeView:
    """Attends as mlx-lm does, and counts it."""

    def __init__(self, keys: mx.array, values: mx.array) -> None:
        self._keys, self._values = keys, values
        self.served = False
        self.counted = False
        self.rope: Any = None
        self.no_rope = ""
        self.turns: Any = None

    def key_shape(self) -> tuple[int, ...]:
        self.counted = True
        return self._keys.shape

    def value_shape(self) -> tuple[int, ...]:
        self.counted = True
        return self._values.shape

    wants_queries = False

    def observed(self, queries: mx.array, rope: Any) -> "_ProbeView":
        return self

    def attend(self, queries: mx.array, scale: float, mask: Mask, sinks: mx.array | None) -> mx.array:
        if not self.served:
            self._trace(queries)
        self.served = True
        return mx.fast.scaled_dot_product_attention(
            queries, self._keys, self._values, scale=scale, mask=mask, sinks=sinks
        )

    def materialize(self) -> tuple[mx.array, mx.array]:
        return self._keys, self._values

    def _trace(self, queries: mx.array) -> None:
        """Find the RoPE that the queries came from."""
        call, calls = rope_hooks.find(queries), rope_hooks.outputs()
        rope_hooks.forget()  # so that the next layer meets its own calls only
        self.turns = next((each.module for each in calls if each.output.shape[-1] == queries.shape[-1]), None)
        if call is not None:
            self.rope = call.module
        elif not calls:
            self.no_rope = "its attention has no RoPE"
        elif self.turns is None:
            self.no_rope = "RoPE turns a part of each query that is joined to the rest afterwards, as in MLA"
        else:
            self.no_rope = "queries are not what RoPE returned: they skip it, or are scaled, normed or cast afterwards"


class _ProbeCache(KVCache):  # type: ignore[misc]
    """Hands out handles of what a KVCache stores."""

    def __init__(self) -> None:
        super().__init__()
        self.views: list[_ProbeView] = []
        self._updates = 0

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Handle, Handle]:
        self._updates += 1
        return super().update_and_fetch(keys, values)  # type: ignore[no-any-return]  # calls keys_and_values

    def keys_and_values(self) -> tuple[Handle, Handle]:
        keys, values = super().keys_and_values()
        view = _ProbeView(keys, values)
        self.views.append(view)
        return handles(view, keys.dtype)

    def facts(self, index: int, part: int | None, ranks: Ranks) -> SlotFacts:
        keys, values = super().keys_and_values()
        norm = mx.linalg.norm(keys.astype(mx.float32), axis=-1)
        return SlotFacts(
            index=index,
            part=part,
            heads=keys.shape[1],
            key_dim=keys.shape[3],
            value_dim=values.shape[3],
            dtype=dtype_name(keys.dtype),
            key_norm=float(np.median(ranks.gather(np.array(norm[0])))),
            shared=len(self.views) > self._updates,
            rope=self.views[0].rope,
            no_rope=self.views[0].no_rope,
            turns=self.views[0].turns,
        )


def model_type(model: Any) -> str:
    """mlx-lm's name of the architecture."""
    args = getattr(model, "args", None)
    return getattr(args, "model_type", None) or type(model).__module__.rpartition(".")[2]


def native_caches(model: Any) -> list[Any]:
    """The model's own caches, whatever has been installed on the instance."""
    make = getattr(type(model), "make_cache", None)
    return list(make(model)) if make else [KVCache() for _ in model.layers]


def position_limit(model: Any) -> int | None:
    """Tokens that the model was made for, or None where its configuration does not say."""
    args = getattr(model, "args", None)
    limit = getattr(args, "max_position_embeddings", None)
    return limit or (getattr(args, "text_config", None) or {}).get("max_position_embeddings")


def _vocabulary(model: Any) -> int:
    args = getattr(model, "args", None)
    size = getattr(args, "vocab_size", None) or (getattr(args, "text_config", None) or {}).get("vocab_size")
    return int(size or TOKENS)


def _swap(caches: list[Any]) -> tuple[list[Any], dict[tuple[int, int | None], _ProbeCache]]:
    probes: dict[tuple[int, int | None], _ProbeCache] = {}

    def swap(cache: Any, index: int, part: int | None) -> Any:
        if type(cache) is KVCache:
            cache = probes[index, part] = _ProbeCache()
        return cache

    swapped = []
    for index, cache in enumerate(caches):
        if type(cache) is CacheList:
            swapped.append(CacheList(*(swap(c, index, part) for part, c in enumerate(cache.caches))))
        else:
            swapped.append(swap(cache, index, None))
    return swapped, probes


def probe_model(model: Any) -> ModelFacts:
    """Run `model` on 64 tokens and report its caches.

    Raises:
        UnsupportedModelError: the model keeps no plain KV cache, or uses it as a compressed one cannot be used.
    """
    name = model_type(model)
    native = native_caches(model)
    caches, probes = _swap(native)
    classes = [type(cache).__name__ for cache in native]
    if not probes:
        raise UnsupportedModelError(
            f"{name} keeps no plain KV cache (its caches are {', '.join(sorted(set(classes)))}), so there is nothing "
            "to compress. Use --kv-profile off."
        )
    tokens = mx.array([[i * _STRIDE % _vocabulary(model) for i in range(TOKENS)]])
    try:
        with compressed_attention(), rope_hooks.hooked(model), rope_hooks.remembering():
            mx.eval(model(tokens, cache=caches))
    except Exception as error:
        mx.eval(model(tokens, cache=native))  # a model that fails on its own caches raises its own error
        raise UnsupportedModelError(
            f"{name} cannot run on a compressed cache: it computes with the keys and values that it fetched, instead "
            "of handing them to mlx-lm's scaled_dot_product_attention "
            f"({type(error).__name__}: {_first_line(error)}). Use --kv-profile off."
        ) from error
    idle = [index for (index, _), probe in probes.items() if not any(view.served for view in probe.views)]
    if idle:
        raise UnsupportedModelError(
            f"{name} cannot run on a compressed cache: its layers {idle} fetch keys and values, but attention never "
            "sees them. Use --kv-profile off."
        )
    ranks = ranks_of(model)
    slots = [probe.facts(index, part, ranks) for (index, part), probe in probes.items()]
    counts = any(view.counted for probe in probes.values() for view in probe.views)
    return ModelFacts(name, classes, slots, counts, position_limit(model), ranks)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:160] if str(error).strip() else "no message"
