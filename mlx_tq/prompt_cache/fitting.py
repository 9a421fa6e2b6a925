"""`Fitting`: a model's passes get caches that were made for it, or are refused before they change anything."""

from collections.abc import Sequence
from typing import Any
from weakref import WeakSet

from mlx_lm.models.cache import CacheList

from mlx_tq.cache.layer import CompressedKVCache
from mlx_tq.errors import CacheFormatError
from mlx_tq.integration.probe import SlotFacts, model_facts
from mlx_tq.prompt_cache.passes import before_pass, compressed_caches


class Fitting:
    """What comes before the passes of one model; it looks at each prompt cache once.

    Args:
        model: of mlx-lm.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._fitting: WeakSet[CompressedKVCache] = WeakSet()

    def before_pass(self, caches: Sequence[Any], count: int) -> bool:
        """As `passes.before_pass`.

        Raises:
            CacheFormatError: the caches are of another model, too.
        """
        layers = compressed_caches(caches)
        if layers and layers[0] not in self._fitting:
            self._check(caches)
            self._fitting.add(layers[0])
        return before_pass(caches, count)

    def _check(self, caches: Sequence[Any]) -> None:
        facts = model_facts(self._model)
        compared = [(f"{len(caches)} layers", f"{len(facts.classes)} layers")]
        if len(caches) == len(facts.classes):
            compared = [(_held(slot, caches), _sizes(slot.heads, slot.key_dim, slot.value_dim)) for slot in facts.slots]
        for held, wanted in compared:
            if held not in ("", wanted):
                raise CacheFormatError(
                    f"the cache is of another model than this {facts.model_type}: it has {held}, the model {wanted}. "
                    "Make a new one with mlx_tq.make_prompt_cache(model)."
                )


def _sizes(heads: int, key_dim: int, value_dim: int) -> str:
    return f"{heads} heads of {key_dim} and {value_dim}"


def _held(slot: SlotFacts, caches: Sequence[Any]) -> str:
    """Heads and sizes of what a layer holds, or nothing where it holds nothing."""
    cache = caches[slot.index]
    part = cache.caches[slot.part] if isinstance(cache, CacheList) and slot.part is not None else cache
    if not isinstance(part, CompressedKVCache) or part.empty():
        return ""
    keys, values = part.keys_and_values()
    return _sizes(keys.shape[1], keys.shape[3], values.shape[3])
