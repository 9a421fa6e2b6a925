"""Load a model: a path, a name on the Hugging Face hub, or the small one inside the package."""

import hashlib
import json
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from mlx_tq.codec.dtypes import dtype_of
from mlx_tq.errors import ConfigError, UnsupportedModelError

DTYPES = ("float32", "float16", "bfloat16")
# A 7M-parameter model that finds facts in long text; see the README.md beside its weights.
EMBEDDED = "needle"
_REMEDY = (
    "Give a folder with config.json and safetensors, a hub name such as mlx-community/Qwen3-4B-4bit, or nothing for "
    "the embedded model."
)
_LONGEST = 240  # characters of another library's message that are worth reading


def embedded_path() -> Path:
    """Folder of the model inside the package."""
    return Path(str(files("mlx_tq") / "assets" / EMBEDDED))


def load(model: str | Path | None = None, *, dtype: str | None = None, **options: Any) -> tuple[Any, Any]:
    """Load a model and its tokenizer.

    Args:
        model: a folder, a hub name, or None for the model inside the package.
        dtype: to compute in, one of DTYPES, or None for that of the weights.
        options: of `mlx_lm.load`, such as `adapter_path` or `tokenizer_config`.

    Raises:
        ConfigError: no such folder or hub model, or a damaged one.
        UnsupportedModelError: mlx-lm does not know the architecture.
    """
    loaded, tokenizer, _ = load_with_config(model, **options)
    if dtype is not None:
        loaded.set_dtype(dtype_of(dtype))
    return loaded, tokenizer


def load_with_config(model: str | Path | None = None, **options: Any) -> tuple[Any, Any, dict[str, Any]]:
    """As `load`, with the model's configuration."""
    # 0.1 s, only for a load.
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, StrictDataclassError
    from mlx_lm import load as load_model

    where = _checked(str(embedded_path() if model is None else model), options.get("adapter_path"))
    try:
        loaded, tokenizer, config = load_model(where, return_config=True, **options)
    except HFValidationError as error:
        raise ConfigError(f"there is no model folder {where!r}, and it is no name on the hub. {_REMEDY}") from error
    except (HfHubHTTPError, OSError) as error:
        reason = _one_line(str(error).strip().partition("\n")[0])
        if not Path(where).exists():
            reason = f"there is no such folder, and the hub did not give it ({reason})"
        raise ConfigError(f"the model {where!r} cannot be loaded: {reason}. {_REMEDY}") from error
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"the model {where!r} cannot be loaded: a JSON file is damaged ({error}). {_REMEDY}"
        ) from error
    except (KeyError, TypeError, StrictDataclassError) as error:
        raise ConfigError(
            f"the model {where!r} cannot be loaded: its config.json does not fit ({_one_line(str(error))}). {_REMEDY}"
        ) from error
    except RuntimeError as error:  # safetensors that mlx cannot read
        raise ConfigError(
            f"the model {where!r} cannot be loaded: {_one_line(str(error))}. Download or convert it again."
        ) from error
    except ValueError as error:
        raise UnsupportedModelError(f"the model {where!r} cannot be loaded: {_one_line(str(error))}.") from error
    tokenizer.model_max_length = sys.maxsize  # else transformers warns of its own of what is refused or said by us
    return loaded, tokenizer, config


def _checked(where: str, adapter: str | Path | None) -> str:
    """The name of a model, unless it or its adapter cannot be one."""
    if not where.strip():
        raise ConfigError(f"the model's name is empty. {_REMEDY}")
    if Path(where).is_file():
        raise ConfigError(f"the model {where!r} is a file; models of mlx-lm are folders. {_REMEDY}")
    if adapter is not None and not (Path(adapter) / "adapter_config.json").is_file():
        raise ConfigError(
            f"the adapter {str(adapter)!r} has no adapter_config.json. Give a folder that mlx_lm.lora made."
        )
    return where


def _one_line(text: str) -> str:
    """Text without line breaks or a final full stop, cut where it goes on and on."""
    text = " ".join(text.split()).rstrip(".")
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def fingerprint(model: Any) -> str:
    """16 hex digits that differ between models: names, shapes and types of all weights, values of the small ones."""
    digest = hashlib.sha256()
    weights: dict[str, mx.array] = dict(tree_flatten(model.parameters()))
    for name, weight in sorted(weights.items()):
        digest.update(f"{name} {weight.shape} {weight.dtype}".encode())
        if weight.ndim == 1:
            digest.update(np.array(weight.astype(mx.float32)).tobytes())
    return digest.hexdigest()[:16]
