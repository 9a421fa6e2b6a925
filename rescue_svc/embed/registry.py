"""Embedders, found by name. Another package adds one through the entry-point group `mlx_tq.embedders`."""

from importlib.metadata import entry_points
from pathlib import Path
from typing import Protocol

from rescue_svc.embed.hashing import HashingEmbedder
from rescue_svc.embed.minilm import MiniLMEmbedder, find_model
from rescue_svc.embed.types import Vectors
from rescue_svc.errors import EmbedderUnavailableError, SettingsError

GROUP = "mlx_tq.embedders"
BUILT_IN: dict[str, type["Embedder"]] = {"minilm": MiniLMEmbedder, "hashing": HashingEmbedder}


class Embedder(Protocol):
    """Turns texts into unit vectors. Built in the child process with the setting `model_path`."""

    model: str  # names the vectors: those of another model are not compared with them
    dim: int
    floor: float | None  # cosine below which a span has nothing to do with a question; None where no cosine says so

    def __init__(self, model_path: Path | None) -> None: ...

    def embed(self, texts: list[str]) -> Vectors:
        """Return one unit vector a text, [N, D]."""


def embedder_class(name: str) -> type[Embedder]:
    """Return an embedder by name; raise SettingsError with the names there are."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    others = {point.name: point for point in entry_points(group=GROUP)}
    if name in others:
        found: type[Embedder] = others[name].load()
        return found
    raise SettingsError(f"embedder {name}: no such embedder; there are auto, none, {', '.join([*BUILT_IN, *others])}")


def choose_embedder(setting: str, model_path: Path | None) -> tuple[str | None, str | None]:
    """Return the embedder's name, or None and the reason why there is none.

    `auto` is MiniLM where its weights are on the machine.
    A name that was asked for and cannot be had is a SettingsError.
    """
    if setting == "none":
        return None, "switched off (embedder=none)"
    name = "minilm" if setting == "auto" else setting
    embedder_class(name)
    if name == "minilm":
        try:
            find_model(model_path)
        except EmbedderUnavailableError as error:
            if setting == "auto" and model_path is None:
                return None, str(error)
            raise SettingsError(str(error)) from error
    return name, None
