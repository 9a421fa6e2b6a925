"""Facts that are remembered: the probe runs once a model, not once a cache."""

import threading
import weakref
from typing import Any

from mlx.utils import tree_flatten

from mlx_tq.integration.facts import ModelFacts
from mlx_tq.integration.probe import probe_model

# By id of a model: the model, unless it is gone, the shapes and types of its weights at the time, and the facts.
_known: dict[int, tuple["weakref.ref[Any]", Any, ModelFacts]] = {}
_lock = threading.Lock()


def model_facts(model: Any) -> ModelFacts:
    """What is known of a model's caches; probes it where it was not met before or its weights have other shapes now.

    Raises:
        UnsupportedModelError: the model keeps no plain KV cache, or uses it as a compressed one cannot be used.
    """
    weights: list[tuple[str, Any]] = tree_flatten(model.parameters())  # type: ignore[assignment]
    shapes = [(name, weight.shape, weight.dtype) for name, weight in weights]
    with _lock:
        reference, then, facts = _known.get(id(model), (lambda: None, None, None))
    if reference() is model and then == shapes and facts is not None:
        return facts
    facts = probe_model(model)
    with _lock:
        gone = [key for key, (reference, *_) in _known.items() if reference() is None]
        for key in gone:
            del _known[key]
        _known[id(model)] = (weakref.ref(model), shapes, facts)
    return facts
