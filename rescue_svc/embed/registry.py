"""Finds embedders by name."""

from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path

from rescue_svc.embed import sentence_models
from rescue_svc.embed.embedder import Embedder
from rescue_svc.embed.hashing import HashingEmbedder
from rescue_svc.embed.sentence_models import MiniLMEmbedder, SentenceTransformersEmbedder
from rescue_svc.errors import EmbedderUnavailableError, SettingsError

GROUP = "mlx_tq.embedders"
BUILT_IN: dict[str, type[Embedder]] = {
    "minilm": MiniLMEmbedder,
    "hashing": HashingEmbedder,
    sentence_models.KIND: SentenceTransformersEmbedder,
}


@dataclass(frozen=True)
class Choice:
    """An embedder that is not loaded yet."""

    name: str  # of the setting
    model: str  # identity of its vectors
    dim: int | None  # None if only the loaded model tells
    floor: float | None
    folder: Path | None

    def build(self) -> Embedder:
        """Load the embedder, which takes seconds; raises EmbedderUnavailableError if its files have changed."""
        embedder = embedder_class(self.name)(self.folder)
        if embedder.model != self.model:
            raise EmbedderUnavailableError(
                f"the files of {self.name} changed since the service started; restart it to embed all spans again"
            )
        return embedder


def embedder_class(name: str) -> type[Embedder]:
    """Return an embedder by name, without the part after a colon; raise SettingsError for an unknown name."""
    kind = name.partition(":")[0]
    if kind in BUILT_IN:
        return BUILT_IN[kind]
    plugins = {point.name: point for point in entry_points(group=GROUP)}
    if name in plugins:
        plugin: type[Embedder] = plugins[name].load()
        return plugin
    names = ", ".join([*BUILT_IN, *plugins]).replace(sentence_models.KIND, f"{sentence_models.KIND}:NAME_OR_FOLDER")
    raise SettingsError(f"unknown embedder {name}; available: auto, none, {names}")


def choose_embedder(setting: str, model_path: Path | None) -> tuple[Choice | None, str | None]:
    """Return the embedder, or None and the reason why there is none.

    `auto` is MiniLM if its weights are on the machine. SettingsError is raised if a named embedder is not available.
    """
    if setting == "none":
        return None, "switched off (embedder=none)"
    name = "minilm" if setting == "auto" else setting
    chosen = embedder_class(name)
    kind, _, model = name.partition(":")
    try:
        if kind == sentence_models.KIND:
            if model_path is not None:
                raise SettingsError(
                    f"model_path {model_path} is for MiniLM; name the folder in embedder={sentence_models.KIND}:FOLDER"
                )
            folder = sentence_models.find_model(model)
            return Choice(name, sentence_models.digest_model(folder), None, chosen.floor, folder), None
        if name == "minilm":
            sentence_models.find_minilm(model_path)
    except EmbedderUnavailableError as error:
        if setting == "auto" and model_path is None:
            return None, str(error)
        raise SettingsError(str(error)) from error
    return Choice(name, chosen.model, chosen.dim, chosen.floor, model_path), None


def load_embedder(setting: str, model_path: Path | None = None) -> Embedder:
    chosen, reason = choose_embedder(setting, model_path)
    if chosen is None:
        raise SettingsError(f"embedder {setting}: {reason}")
    return chosen.build()
