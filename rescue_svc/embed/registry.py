"""Embedders, found by name. Another package adds one through the entry-point group `mlx_tq.embedders`."""

from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Protocol

from rescue_svc.embed import sentence_models
from rescue_svc.embed.hashing import HashingEmbedder
from rescue_svc.embed.minilm import MiniLMEmbedder, find_model
from rescue_svc.embed.sentence_models import SentenceTransformersEmbedder
from rescue_svc.embed.types import Vectors
from rescue_svc.errors import EmbedderUnavailableError, SettingsError

GROUP = "mlx_tq.embedders"
BUILT_IN: dict[str, type["Embedder"]] = {
    "minilm": MiniLMEmbedder,
    "hashing": HashingEmbedder,
    sentence_models.KIND: SentenceTransformersEmbedder,
}


class Embedder(Protocol):
    """Turns texts into unit vectors. Built in the child process with the setting `model_path`.

    One that embeds questions in another way than texts has a method `embed_questions` too.
    """

    model: str  # names the vectors: those of another model are not compared with them
    dim: int
    floor: float | None  # cosine below which a span has nothing to do with a question; None where no cosine says so

    def __init__(self, model_path: Path | None) -> None: ...

    def embed(self, texts: list[str]) -> Vectors:
        """Return one unit vector a text, [N, D]."""


@dataclass(frozen=True)
class Choice:
    """An embedder as it is known without being loaded."""

    name: str  # as the setting has it
    model: str  # names its vectors
    dim: int | None  # of its vectors; None where only the loaded model knows
    floor: float | None
    folder: Path | None  # what it is built with

    def build(self) -> Embedder:
        """Load it: seconds, and memory. Raises EmbedderUnavailableError where its files are not those chosen."""
        embedder = embedder_class(self.name)(self.folder)
        if embedder.model != self.model:
            raise EmbedderUnavailableError(
                f"the files of {self.name} changed since the service started; restart it, and all is embedded anew"
            )
        return embedder


def embedder_class(name: str) -> type[Embedder]:
    """Return an embedder by name, without what follows a colon; raise SettingsError with the names there are."""
    kind = name.partition(":")[0]
    if kind in BUILT_IN:
        return BUILT_IN[kind]
    others = {point.name: point for point in entry_points(group=GROUP)}
    if name in others:
        found: type[Embedder] = others[name].load()
        return found
    known = ", ".join([*BUILT_IN, *others]).replace(sentence_models.KIND, f"{sentence_models.KIND}:NAME_OR_FOLDER")
    raise SettingsError(f"embedder {name}: no such embedder; there are auto, none, {known}")


def choose_embedder(setting: str, model_path: Path | None) -> tuple[Choice | None, str | None]:
    """Return the embedder, or None and the reason why there is none.

    `auto` is MiniLM where its weights are on the machine.
    A name that was asked for and cannot be had is a SettingsError.
    """
    if setting == "none":
        return None, "switched off (embedder=none)"
    name = "minilm" if setting == "auto" else setting
    chosen = embedder_class(name)
    kind, _, argument = name.partition(":")
    try:
        if kind == sentence_models.KIND:
            return _sentence_model(name, argument, model_path), None
        if name == "minilm":
            find_model(model_path)
    except EmbedderUnavailableError as error:
        if setting == "auto" and model_path is None:
            return None, str(error)
        raise SettingsError(str(error)) from error
    return Choice(name, chosen.model, chosen.dim, chosen.floor, model_path), None


def load_embedder(setting: str, model_path: Path | None = None) -> Embedder:
    """Return an embedder in this process; raise SettingsError where it cannot be had."""
    chosen, reason = choose_embedder(setting, model_path)
    if chosen is None:
        raise SettingsError(f"embedder {setting}: {reason}")
    return chosen.build()


def _sentence_model(name: str, argument: str, model_path: Path | None) -> Choice:
    if model_path is not None:
        raise SettingsError(
            f"model_path {model_path} is MiniLM's; name the folder in embedder={sentence_models.KIND}:FOLDER"
        )
    folder = sentence_models.find_folder(argument)
    return Choice(name, sentence_models.name_vectors(folder), None, SentenceTransformersEmbedder.floor, folder)
