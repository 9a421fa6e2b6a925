"""mlx-lm's attention on compressed caches, inside a context.

mlx-lm's models import `scaled_dot_product_attention` by name, so every module that holds the original gets ours while
a context is open, and its own back afterwards, also on an exception.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
from mlx_lm.models import base

from mlx_tq.cache.handles import Handle
from mlx_tq.errors import UnsupportedModelError
from mlx_tq.integration import rope_hooks

_NAME = "scaled_dot_product_attention"
_original = base.scaled_dot_product_attention


def scaled_dot_product_attention(
    queries: mx.array,
    keys: Any,
    values: Any,
    cache: Any,
    scale: float,
    mask: mx.array | str | None,
    sinks: mx.array | None = None,
) -> mx.array:
    """mlx-lm's attention, which also takes the handles of a compressed cache as keys and values.

    Raises:
        UnsupportedModelError: the cache's sequence has to see the queries before RoPE, and no RoPE module made them.
    """
    if not isinstance(keys, Handle):
        return _original(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks)  # type: ignore[no-any-return]
    view = keys.view
    if view.wants_queries:
        call = rope_hooks.find(queries)
        if call is None:
            raise UnsupportedModelError(
                "eviction is calibrated on queries before RoPE, and those of this layer came from no RoPE module that "
                "could be followed. Use another policy, such as knorm."
            )
        view = view.observed(call.source, call.module)
    return view.attend(queries, scale, mask, sinks)


class _Binding:
    """Which function mlx-lm's modules hold, by the number of contexts that are open."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0

    def open(self) -> None:
        with self._lock:
            self._users += 1
            _rebind(_original, scaled_dot_product_attention)

    def close(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:  # also in modules that were imported meanwhile
                _rebind(scaled_dot_product_attention, _original)


def _rebind(old: Callable[..., mx.array], new: Callable[..., mx.array]) -> None:
    for name, module in list(sys.modules.items()):
        if name.startswith("mlx_lm.") and getattr(module, _NAME, None) is old:
            setattr(module, _NAME, new)


_binding = _Binding()


@contextmanager
def compressed_attention() -> Iterator[None]:
    """Let mlx-lm's models attend to compressed caches until the context ends; contexts nest, also across threads."""
    _binding.open()
    try:
        yield
    finally:
        _binding.close()
