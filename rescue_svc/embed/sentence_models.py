"""Any model of the library sentence-transformers: `sentence-transformers:NAME_OR_FOLDER`, from local files only.

Its vectors are named by a digest of its files: a model that was trained on has other vectors than before. How many
dimensions they have, the library alone knows, once it has built the model.
"""

import hashlib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from rescue_svc.embed.hub import hub_folders, stay_offline
from rescue_svc.embed.types import Vectors
from rescue_svc.errors import EmbedderUnavailableError

KIND = "sentence-transformers"
MODULES = "modules.json"  # of every such model: what it is made of
OTHER_BACKENDS = {"onnx", "openvino"}  # the same weights once more, which torch does not read


def find_folder(name: str) -> Path:
    """Return the folder that `name` is, or of that repository in the hub's cache; no owner is the library's own.

    Raises EmbedderUnavailableError where there is none, the library is missing, or the weights are pickled.
    """
    if not name:
        raise EmbedderUnavailableError(f"embedder {KIND} names no model; write {KIND}:NAME_OR_FOLDER")
    named = Path(name).expanduser()
    repository = name if "/" in name else f"{KIND}/{name}"
    found = [folder for folder in ([named] if named.is_dir() else hub_folders(repository)) if _is_model(folder)]
    if not found:
        raise EmbedderUnavailableError(
            f"{name} is neither a folder with a {MODULES} nor in the hub's cache; "
            f"`hf download {repository}`, or name a folder that sentence-transformers saved"
        )
    if find_spec("sentence_transformers") is None:
        raise EmbedderUnavailableError("sentence-transformers is not installed; `pip install 'mlx-tq[embed-any]'`")
    for file in found[0].rglob("*.bin"):
        if file.parent.name not in OTHER_BACKENDS and not any(file.parent.glob("*.safetensors")):
            raise EmbedderUnavailableError(f"{file} is pickled, which can hold a program; save it as safetensors")
    return found[0].absolute()


def name_vectors(folder: Path) -> str:
    """Return the name of this model's vectors: a digest of all files that they depend on."""
    digest = hashlib.sha256()
    for file in _files(folder):
        with file.open("rb") as content:
            digest.update(f"{file.relative_to(folder)}\0".encode() + hashlib.file_digest(content, "sha256").digest())
    return f"st-{digest.hexdigest()[:16]}"


class SentenceTransformersEmbedder:
    """As many dimensions and word pieces as the model has; questions and texts each with the prompt it wants."""

    floor: float | None = None  # each model has cosines of its own

    def __init__(self, model_path: Path | None) -> None:
        assert model_path is not None  # noqa: S101 - `find_folder` gave it; this tells the type checker
        stay_offline()
        self.model = name_vectors(model_path)
        import torch  # seconds of imports: in the child only
        from sentence_transformers import SentenceTransformer  # likewise

        # As for MiniLM: threads that wait for each other are slow where other programs want the processor.
        torch.set_num_threads(1)
        self._model = SentenceTransformer(str(model_path), device="cpu", local_files_only=True)
        self.dim = len(self.embed([""])[0])

    def embed(self, texts: list[str]) -> Vectors:
        """Return one unit vector a text, [N, D]."""
        return self._unit(self._model.encode_document(texts, show_progress_bar=False))

    def embed_questions(self, texts: list[str]) -> Vectors:
        """Return one unit vector a question, [N, D]."""
        return self._unit(self._model.encode_query(texts, show_progress_bar=False))

    def _unit(self, vectors: Vectors) -> Vectors:
        matrix: Vectors = np.array(vectors, np.float32)
        matrix /= np.maximum(np.linalg.norm(matrix, axis=1, keepdims=True), np.finfo(np.float32).tiny)
        return matrix


def _is_model(folder: Path) -> bool:
    return (folder / MODULES).is_file()


def _files(folder: Path) -> Iterator[Path]:
    """Yield the files that the library may read, in an order that is the same everywhere."""
    for file in sorted(folder.rglob("*")):
        parts = file.relative_to(folder).parts
        hidden = any(part.startswith(".") for part in parts)
        if file.is_file() and not hidden and not OTHER_BACKENDS.intersection(parts) and file.suffix != ".md":
            yield file
