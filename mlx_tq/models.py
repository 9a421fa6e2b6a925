"""Load a model: a path, a name on the Hugging Face hub, or the small one inside the package."""

import hashlib
from importlib.resources import files
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from mlx_tq.errors import ConfigError, UnsupportedModelError

# A 7M-parameter model that finds facts in long text; see the README.md beside its weights.
EMBEDDED = "needle"


def embedded_path() -> Path:
    """Folder of the model inside the package."""
    return Path(str(files("mlx_tq") / "assets" / EMBEDDED))


def load(model: str | Path | None = None, **options: Any) -> tuple[Any, Any]:
    """Load a model and its tokenizer.

    Args:
        model: a folder, a hub name, or None for the model inside the package.
        options: of `mlx_lm.load`, such as `adapter_path` or `tokenizer_config`.

    Raises:
        ConfigError: no such folder or hub model.
        UnsupportedModelError: mlx-lm does not know the architecture.

    """
    loaded, tokenizer, _ = load_with_config(model, **options)
    return loaded, tokenizer


def load_with_config(model: str | Path | None = None, **options: Any) -> tuple[Any, Any, dict[str, Any]]:
    """As `load`, with the model's configuration."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError  # 0.1 s, only for a load
    from mlx_lm import load as load_model

    where = str(embedded_path() if model is None else model)
    try:
        loaded, tokenizer, config = load_model(where, return_config=True, **options)
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise ConfigError(
            f"the model {where!r} cannot be loaded: {str(error).strip().splitlines()[0]} Give a folder with "
            "config.json and safetensors, a hub name such as mlx-community/Qwen3-4B-4bit, or nothing for the embedded "
            "model."
        ) from error
    except ValueError as error:
        raise UnsupportedModelError(f"the model {where!r} cannot be loaded: {error}") from error
    return loaded, tokenizer, config


def fingerprint(model: Any) -> str:
    """16 hex digits that differ between models: names, shapes and types of all weights, values of the small ones."""
    digest = hashlib.sha256()
    weights: dict[str, mx.array] = dict(tree_flatten(model.parameters()))
    for name, weight in sorted(weights.items()):
        digest.update(f"{name} {weight.shape} {weight.dtype}".encode())
        if weight.ndim == 1:
            digest.update(np.array(weight.astype(mx.float32)).tobytes())
    return digest.hexdigest()[:16]
