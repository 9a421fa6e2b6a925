"""The one seam with mlx-lm: attention on compressed caches, inside a context manager.

mlx-lm's models import `scaled_dot_product_attention` by name, so every module that holds the original gets ours while
the context lasts, and its own back afterwards, also on an exception.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import mlx.core as mx
from mlx_lm.models import base

from mlx_tq.cache.factory import Plan, build_caches, make_plan
from mlx_tq.cache.view import Handle
from mlx_tq.config import DEFAULT_PROFILE, PROFILES, KVConfig
from mlx_tq.errors import ConfigError
from mlx_tq.evict.calibration import load_calibration
from mlx_tq.evict.taps import tapped
from mlx_tq.models import fingerprint
from mlx_tq.probe import native_caches, probe_model

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
    """mlx-lm's attention, which also takes the handles of a compressed cache as keys and values."""
    if isinstance(keys, Handle):
        return keys.view.attend(queries, scale, mask, sinks)
    return _original(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks)  # type: ignore[no-any-return]


def _rebind(old: Callable[..., mx.array], new: Callable[..., mx.array]) -> None:
    for name, module in list(sys.modules.items()):
        if name.startswith("mlx_lm.") and getattr(module, _NAME, None) is old:
            setattr(module, _NAME, new)


class _Seam:
    """What is bound while contexts are open, and given back after the last: attention and the models' `make_cache`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        # By id of a model: its own instance's make_cache (mostly None), then those of its open contexts.
        self._makers: dict[int, list[Callable[[], list[Any]] | None]] = {}

    def open(self) -> None:
        with self._lock:
            self._users += 1
            _rebind(_original, scaled_dot_product_attention)

    def close(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:  # also in modules that were imported meanwhile
                _rebind(scaled_dot_product_attention, _original)

    def install(self, model: Any, make: Callable[[], list[Any]]) -> None:
        with self._lock:
            self._makers.setdefault(id(model), [model.__dict__.get("make_cache")]).append(make)
            model.make_cache = make

    def remove(self, model: Any, make: Callable[[], list[Any]]) -> None:
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


_seam = _Seam()


@contextmanager
def attention(model: Any, config: KVConfig | None = None) -> Iterator[None]:
    """Let `model` run on compressed caches until the context ends.

    With a `config`, every cache that mlx-lm makes for the model meanwhile (in its generate, batch, speculative decoding
    and server) is a compressed one. Contexts nest, also across threads.

    Raises:
        UnsupportedModelError: a config was given and the model cannot run on it.
        ConfigError: `model` is no model, or `config` no configuration.
    """
    if config is not None:
        _check_arguments(model, config)
    _seam.open()
    try:
        with tapped(model):
            if config is None or config.is_off:
                yield
            else:
                make = partial(build_caches, plan_caches(model, config))
                _seam.install(model, make)
                try:
                    yield
                finally:
                    _seam.remove(model, make)
    finally:
        _seam.close()


def _check_arguments(model: Any, config: Any) -> None:
    if not hasattr(model, "layers"):
        raise ConfigError(f"model is {model!r}; it must be a model of mlx-lm, as `mlx_tq.load()` returns it.")
    if not isinstance(config, KVConfig):
        raise ConfigError(
            f"config is {config!r}; it must be a KVConfig, such as mlx_tq.KVConfig(key='q8', value='tq4')."
        )


def plan_caches(model: Any, config: KVConfig) -> Plan:
    """Decide how each layer of `model` is stored; runs the model once on a few tokens.

    Raises:
        UnsupportedModelError: the model cannot run on compressed caches; the message names it and the reason.
        ConfigError: a head size that the configured formats cannot take, or an eviction that the model cannot meet.
        CacheFormatError: calibration statistics that are damaged or of another model.
    """
    return planner(model)(config)


def planner(model: Any) -> Callable[[KVConfig], Plan]:
    """`plan_caches` for any number of configurations, with one run of the model for all; raises as it does."""
    _seam.open()
    try:
        facts = probe_model(model)
    finally:
        _seam.close()

    def plan(config: KVConfig) -> Plan:
        calibration = None
        if config.evict is not None and config.evict.stats is not None:
            calibration = load_calibration(config.evict.stats, fingerprint(model))
        return make_plan(facts, config, calibration)

    return plan


def make_prompt_cache(model: Any, config: KVConfig = PROFILES[DEFAULT_PROFILE]) -> list[Any]:
    """A compressed prompt cache for `model`, for use inside `attention(model)`: one entry per mlx-lm cache.

    Raises:
        UnsupportedModelError: the model cannot run on compressed caches; the message names it and the reason.
        ConfigError: a head size that the configured formats cannot take, no model or no configuration.
    """
    _check_arguments(model, config)
    if config.is_off:
        return native_caches(model)
    return build_caches(plan_caches(model, config))
