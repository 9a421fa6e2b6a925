"""What mlx-lm makes for a model where it asks for caches: `make_cache` of the instance, which all its tools find."""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from mlx_lm.models.cache import make_prompt_cache

from mlx_tq.errors import ConfigError

Make = Callable[[], list[Any]]


class _Makers:
    """By id of a model: its own instance's make_cache (mostly None), then those of its open contexts."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._makers: dict[int, list[Make | None]] = {}

    def install(self, model: Any, make: Make) -> None:
        with self._lock:
            if not self._makers:
                _bind(make_prompt_cache, self._make_sized)
            self._makers.setdefault(id(model), [model.__dict__.get("make_cache")]).append(make)
            model.make_cache = make

    def remove(self, model: Any, make: Make) -> None:
        """Contexts of several threads may end in any order; the newest of those still open serves."""
        with self._lock:
            makers = self._makers[id(model)]
            makers.remove(make)
            if makers[-1] is None:
                del model.make_cache
            else:
                model.make_cache = makers[-1]
            if len(makers) == 1:
                del self._makers[id(model)]
            if not self._makers:
                _bind(self._make_sized, make_prompt_cache)

    def _make_sized(self, model: Any, max_kv_size: int | None = None) -> list[Any]:
        """mlx-lm's own, which ignores the size where a model makes its caches, as ours do meanwhile."""
        if max_kv_size is not None and id(model) in self._makers:
            raise ConfigError(
                f"max_kv_size is {max_kv_size}, and compressed caches have no such limit. Drop it, or let tokens leave "
                f"with KVConfig(evict=EvictConfig(budget={max_kv_size}))."
            )
        made: list[Any] = make_prompt_cache(model, max_kv_size)
        return made


def _bind(now: Callable[..., Any], then: Callable[..., Any]) -> None:
    """Replace a function in all modules of mlx-lm, which import it by its name."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "mlx_lm" and vars(module).get("make_prompt_cache") == now:
            module.make_prompt_cache = then  # type: ignore[attr-defined]


_makers = _Makers()


@contextmanager
def making(model: Any, make: Make) -> Iterator[None]:
    """Let mlx-lm get its caches for `model` from `make` until the context ends; contexts nest, the newest serves."""
    _makers.install(model, make)
    try:
        yield
    finally:
        _makers.remove(model, make)
