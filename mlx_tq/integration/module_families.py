"""The packages whose models run on compressed caches. Each has its own attention and caches, under the same names."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import mlx.core as mx


@dataclass(frozen=True)
class ModuleFamily:
    """A package with the modules `models.base` and `models.cache` of mlx-lm."""

    package: str
    title: str  # as users know it

    @property
    def is_loaded(self) -> bool:
        return {f"{self.package}.models.{name}" for name in ("base", "cache")} <= sys.modules.keys()

    @property
    def base(self) -> Any:
        return import_module(f"{self.package}.models.base")

    @property
    def cache(self) -> Any:
        return import_module(f"{self.package}.models.cache")


MLX_LM = ModuleFamily("mlx_lm", "mlx-lm")
MLX_VLM = ModuleFamily("mlx_vlm", "mlx-vlm")


def loaded_families() -> list[ModuleFamily]:
    """Return mlx-lm's family, and mlx-vlm's if the caller has imported mlx-vlm."""
    return [MLX_LM, MLX_VLM] if MLX_VLM.is_loaded else [MLX_LM]


def family_of(model: Any) -> ModuleFamily:
    """Return mlx-vlm's family for a model whose class, or a base of it, is of mlx-vlm, and mlx-lm's for all others."""
    packages = {cls.__module__.partition(".")[0] for cls in type(model).__mro__}
    return MLX_VLM if MLX_VLM.is_loaded and MLX_VLM.package in packages else MLX_LM


def language_model(model: Any) -> Any:
    """Return what runs on the caches: of a model of mlx-vlm its language model, else the model."""
    return getattr(model, "language_model", model) if family_of(model) is MLX_VLM else model


def model_arguments(model: Any) -> Any:
    """Return the configuration of a model, or None; some models have no `args`."""
    return getattr(model, "args", None) or getattr(model, "config", None)


def run_for_logits(model: Any, tokens: mx.array, caches: list[Any]) -> mx.array:
    """Run a model on tokens [B, L] and return its logits, which most models of mlx-vlm return as a field."""
    output = model(tokens, cache=caches)
    return getattr(output, "logits", output)  # type: ignore[no-any-return]


@contextmanager
def preserved_attributes(model: Any) -> Iterator[None]:
    """Restore a model's own attributes on exit: those of mlx-vlm keep positions of the last prompt in them."""
    if family_of(model) is not MLX_VLM:
        yield
        return
    items, attributes = dict(model), dict(vars(model))
    try:
        yield
    finally:
        for current, before in ((model, items), (vars(model), attributes)):  # a module of mlx is a dictionary too
            for name in current.keys() - before.keys():
                dict.pop(current, name)
            dict.update(current, before)
