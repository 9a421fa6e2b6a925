"""`ServedModel`: a model that a server may load. Only those of its flags exist: no request adds one."""

from dataclasses import dataclass
from pathlib import Path

from mlx_tq.cli.loading import needs_one_model
from mlx_tq.cli.options import Request
from mlx_tq.distributed.group import Ranks
from mlx_tq.errors import ConfigError, MlxTqError
from mlx_tq.models import context_length, local_path, read_config, short_name
from mlx_tq.models.gguf_file import part_files
from mlx_tq.policies import CalibratedPolicy

_CONFIG, _WEIGHTS, _GGUF = "config.json", "*.safetensors", ".gguf"


@dataclass(frozen=True)
class ServedModel:
    """A model of `--model`, by the `name` that requests use; `path` is what `models.load` takes.

    A single model is loaded immediately, so its size and context length stay unset.
    """

    name: str
    path: str | None
    nbytes: int = 0  # of its files
    context_length: int | None = None


def find_models(request: Request, ranks: Ranks) -> list[ServedModel]:
    """Return the models of `--model`, the default first; several are inspected, and downloaded if needed.

    Raises ConfigError for several models where one is needed, one that does not exist, and two of one name.
    """
    paths = [model for path in request.args.model or () for model in _expand(path)]
    if len(paths) < 2:
        path = paths[0] if paths else None
        if request.args.model_memory_limit:
            raise ConfigError("--model-memory-limit requires several models. Name another --model, or drop it.")
        return [ServedModel(request.args.served_model_name or short_name(path), path)]
    _check_several(request, len(paths), ranks)
    models: dict[str, ServedModel] = {}
    for path in paths:
        name = short_name(path)
        if name in models:
            raise ConfigError(
                f"two models are named {name!r}: {models[name].path} and {path}. Requests select a model by "
                "name; rename one of them, or drop one."
            )
        models[name] = _inspect(name, path)
    return list(models.values())


def _check_several(request: Request, count: int, ranks: Ranks) -> None:
    """Raise ConfigError for flags that support only one model."""
    args = request.args
    if args.served_model_name:
        raise ConfigError("--served-model-name names one model, and several are served by their own names. Drop it.")
    if args.draft_model:
        raise ConfigError(f"--draft-model drafts for one model, and {count} are served. Name one model, or drop it.")
    if not ranks.is_alone:
        raise ConfigError(f"{count} models need a single process, and {ranks.size} ranks were started. Name one model.")
    policy = None if request.config.evict is None else request.config.evict.policy
    of_one = {
        "--adapter-path": args.adapter_path is not None,
        "--chat-template": args.chat_template is not None,
        "--kv-calibration FILE": isinstance(policy, CalibratedPolicy) and policy.file is not None,
    }
    for flag, is_given in of_one.items():
        if is_given:
            raise needs_one_model(flag, count)


def _expand(path: str) -> list[str]:
    """Return the models in a folder that is not one itself, by name; else `path`, which loading will check.

    A split GGUF file is one model, named as its first part.
    """
    folder = Path(path)
    try:
        if not path.strip() or not folder.is_dir() or (folder / _CONFIG).exists():
            return [path]
        entries = sorted(folder.iterdir())
    except OSError:
        return [path]
    models = [
        str(entry)
        for entry in entries
        if (entry.suffix == _GGUF and part_files(entry)[0] == entry) or (entry / _CONFIG).is_file()
    ]
    return models or [path]


def _inspect(name: str, path: str) -> ServedModel:
    local = local_path(path)
    files = part_files(local) if local.is_file() else local.glob(_WEIGHTS)
    try:
        config = read_config(str(local))
    except MlxTqError:  # a damaged file; requests for the model get an error
        config = {}
    return ServedModel(name, path, sum(file.stat().st_size for file in files), context_length(config))
