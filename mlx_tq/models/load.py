"""Load a model: a folder, a name on the hub, a GGUF file, SmolLM2 by its name, or the small one inside the package."""

import json
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from mlx_tq.codec.dtypes import dtype_of
from mlx_tq.distributed.group import ALONE, Ranks
from mlx_tq.errors import ConfigError, UnsupportedModelError
from mlx_tq.models.gguf.model import load_gguf
from mlx_tq.models.named import SMOLLM2, embedded_path, smollm2_path
from mlx_tq.models.sharding import check_heads, divide
from mlx_tq.policies.options import unknown

DTYPES = ("float32", "float16", "bfloat16")
_REMEDY = (
    "Give a folder with config.json and safetensors, a .gguf file, a hub name such as mlx-community/Qwen3-4B-4bit, "
    f"{SMOLLM2}, or nothing for the embedded model."
)
_LONGEST = 240  # characters of another library's message that are worth reading
_GGUF = ".gguf"


def load(
    model: str | Path | None = None,
    *,
    dtype: str | None = None,
    dequantize: bool = False,
    ranks: Ranks = ALONE,
    **options: Any,
) -> tuple[Any, Any]:
    """Load a model and its tokenizer.

    Args:
        model: a folder, a .gguf file, a hub name, "smollm2", or None for the model inside the package.
        dtype: to compute in, one of DTYPES, or None for that of the weights; packed weights of a GGUF file have none:
            bfloat16, and float32 on a CPU, which multiplies packed bfloat16 ten times slower.
        dequantize: make packed weights dense.
        ranks: each of which gets its part of the model.
        options: of `mlx_lm.load`, such as `adapter_path` or `tokenizer_config`.

    Raises:
        ConfigError: no such folder, file or hub model, or a damaged one; another dtype; a package that is not
            installed, or ranks that do not divide the model's KV heads.
        UnsupportedModelError: mlx-lm does not know the architecture or cannot divide it, or a GGUF file holds what
            cannot be read.
        RankError: ranks have different models.
    """
    loaded, tokenizer, _ = load_with_config(model, dtype=dtype, dequantize=dequantize, ranks=ranks, **options)
    return loaded, tokenizer


def load_with_config(
    model: str | Path | None = None,
    *,
    dtype: str | None = None,
    dequantize: bool = False,
    ranks: Ranks = ALONE,
    **options: Any,
) -> tuple[Any, Any, dict[str, Any]]:
    """As `load`, with the model's configuration."""
    if dtype is not None and dtype not in DTYPES:
        raise unknown("dtype", dtype, DTYPES)
    where = _checked(_located(model), options.get("adapter_path"))
    if not ranks.is_alone:
        check_heads(where, ranks)
    if Path(where).suffix == _GGUF:
        exact = "float32" if dequantize else dtype  # rounded once, when it is dense
        loaded, tokenizer, config = _from_file(Path(where), exact, options)
    else:
        loaded, tokenizer, config = _from_folder(where, {**options, "lazy": not ranks.is_alone})
    if dequantize:
        _make_dense(loaded)
        config.pop("quantization", None)
    if dtype is not None:
        loaded.set_dtype(dtype_of(dtype))
    if not ranks.is_alone:
        divide(loaded, ranks)
    tokenizer.model_max_length = sys.maxsize  # else transformers warns of its own of what is refused or said by us
    return loaded, tokenizer, config


def _located(model: str | Path | None) -> str:
    """The folder, file or hub name of what was asked for."""
    if model is None:
        return str(embedded_path())
    return str(smollm2_path()) if model == SMOLLM2 else str(model)


def _checked(where: str, adapter: str | Path | None) -> str:
    """The name of a model, unless it or its adapter cannot be one."""
    if not where.strip():
        raise ConfigError(f"the model's name is empty. {_REMEDY}")
    path = Path(where)
    if path.is_file() and path.suffix != _GGUF:
        raise ConfigError(f"the model {where!r} is a file, and no .gguf file. {_REMEDY}")
    if path.suffix == _GGUF and not path.is_file():
        raise ConfigError(f"there is no model file {where!r}. {_REMEDY}")
    if adapter is not None and not (Path(adapter) / "adapter_config.json").is_file():
        raise ConfigError(
            f"the adapter {str(adapter)!r} has no adapter_config.json. Give a folder that mlx_lm.lora made."
        )
    return where


def _from_file(path: Path, dtype: str | None, options: dict[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
    try:
        return load_gguf(path, dtype=dtype, **options)
    except ConfigError:  # a ValueError too
        raise
    except ValueError as error:
        raise ConfigError(
            f"the model {str(path)!r} cannot be loaded: {_one_line(str(error))}. Download or convert it again."
        ) from error


def _from_folder(where: str, options: dict[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, StrictDataclassError  # 0.1 s
    from mlx_lm import load as load_model  # transformers comes with it: a second

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
    return loaded, tokenizer, config


def _make_dense(model: Any) -> None:
    """Dequantise in float32, and round the result to the type that the model had."""
    from mlx_lm.utils import dequantize_model  # transformers comes with it: a second

    weights: dict[str, mx.array] = dict(tree_flatten(model.parameters()))
    types = {weight.dtype for weight in weights.values()} & {mx.float16, mx.bfloat16}
    model.set_dtype(mx.float32)
    dequantize_model(model)
    model.set_dtype(types.pop() if types else mx.float32)
    mx.eval(model.parameters())


def _one_line(text: str) -> str:
    """Text without line breaks or a final full stop, cut where it goes on and on."""
    text = " ".join(text.split()).rstrip(".")
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
