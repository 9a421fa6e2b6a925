"""`load` records a model's source, which files of its caches name, and its context length."""

from dataclasses import dataclass
from typing import Any

_SOURCE, _LENGTH = "_mlx_tq_source", "_mlx_tq_context_length"  # attributes of a model


@dataclass(frozen=True)
class ModelSource:
    """Names what `load` needs to load a model again with the same weights."""

    model: str  # folder, file or hub name, "" for the bundled model
    dtype: str | None = None  # None if the weights are of several types
    dequantize: bool = False
    adapter_path: str | None = None
    architecture: str = ""  # equal for models of the same shape; "" if it is unknown

    def __post_init__(self) -> None:
        is_named = isinstance(self.model, str) and isinstance(self.architecture, str)
        is_valid = is_named and isinstance(self.dequantize, bool)
        if not is_valid or not all(isinstance(text, str | None) for text in (self.dtype, self.adapter_path)):
            raise ValueError(f"{self} is no source of a model")

    def __str__(self) -> str:
        return (
            (self.model or "needle")
            + (f" in {self.dtype}" if self.dtype else "")
            + (", dequantized" if self.dequantize else "")
            + (f", with the adapter {self.adapter_path}" if self.adapter_path else "")
        )


def record_source(model: Any, source: ModelSource) -> None:
    setattr(model, _SOURCE, source)


def source_of(model: Any) -> ModelSource | None:
    """Return how a model was loaded; None if not by `load`."""
    source: ModelSource | None = getattr(model, _SOURCE, None)
    return source


def record_length(model: Any, length: int | None) -> None:
    setattr(model, _LENGTH, length)


def recorded_length(model: Any) -> int | None:
    """Return the context length in the model's files, which mlx-lm does not read for all architectures."""
    length: int | None = getattr(model, _LENGTH, None)
    return length
