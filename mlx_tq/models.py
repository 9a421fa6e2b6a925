"""Load a model: a path, a name on the Hugging Face hub, or the small one inside the package."""

from importlib.resources import files
from pathlib import Path
from typing import Any

from mlx_tq.errors import ConfigError, UnsupportedModelError

# A 7M-parameter model that finds facts in long text; see its README.md.
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
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled
    from mlx_lm import load as load_model

    path = embedded_path() if model is None else Path(model)
    where = str(path) if path.exists() else str(model)
    try:
        return load_model(where, **options)  # type: ignore[no-any-return]
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled, OSError) as error:
        raise ConfigError(
            f"model {where!r} cannot be loaded: {str(error).strip().splitlines()[0]} Give a folder with config.json "
            "and safetensors, a hub name such as mlx-community/Qwen3-4B-4bit, or nothing for the embedded model."
        ) from error
    except ValueError as error:
        if "not supported" not in str(error):
            raise
        raise UnsupportedModelError(f"model {where!r}: {error} Upgrade mlx-lm, or take another model.") from error
