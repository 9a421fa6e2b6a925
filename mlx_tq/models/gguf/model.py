"""A GGUF file as mlx-lm's model and tokenizer."""

from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx
from mlx.nn.layers.quantized import quantize

from mlx_tq.codec.dtypes import dtype_of
from mlx_tq.errors import ConfigError
from mlx_tq.models.gguf.architectures import Config, architecture_of, config_of
from mlx_tq.models.gguf.file import GgufFile, read_header
from mlx_tq.models.gguf.rope import FREQUENCY_FACTORS
from mlx_tq.models.gguf.tokenizer import write_tokenizer
from mlx_tq.models.gguf.weights import GROUP, by_halves, packed_bits, plain_type, read_tensor


def load_gguf(
    path: Path,
    *,
    dtype: str | None = None,
    tokenizer_config: dict[str, Any] | None = None,
    model_config: dict[str, Any] | None = None,
    adapter_path: str | Path | None = None,
    trust_remote_code: bool = False,
) -> tuple[Any, Any, Config]:
    """Load a model of mlx-lm, its tokenizer and its configuration from a GGUF file.

    Args:
        path: of the file.
        dtype: to compute in, or None for `default_type`.
        tokenizer_config: of `mlx_lm.load`, as the next three.
        model_config: changes to the configuration.
        adapter_path: folder of adapters that mlx_lm.lora made.
        trust_remote_code: means nothing here; a file holds no code.

    Raises:
        ConfigError: the file is damaged, or a package is missing.
        UnsupportedModelError: an architecture, a tokenizer or a kind of tensor that cannot be read.
        ValueError: tensors whose shapes are not those of the configuration.
    """
    from mlx_lm.utils import load_adapters, load_tokenizer  # transformers comes with it: a second

    if (model_config or {}).get("quantize_activations"):
        raise ConfigError(
            "--quantize-activations needs nvfp4 or mxfp8 weights; those of a GGUF file are neither. Drop it."
        )
    file = read_header(path)
    config = config_of(file) | (model_config or {})
    with TemporaryDirectory() as name:
        folder = Path(name)
        config["eos_token_id"] = write_tokenizer(file, folder)
        tokenizer = load_tokenizer(folder, tokenizer_config, eos_token_ids=config["eos_token_id"])
    tokenizer.name_or_path = str(path)
    model = _build(file, config, default_type(file) if dtype is None else dtype_of(dtype))
    if adapter_path is not None:
        model = load_adapters(model, str(adapter_path))
        model.eval()
    return model, tokenizer, config


def default_type(file: GgufFile) -> mx.Dtype:
    """The type of a file's numbers; where they are quantised bfloat16, or float32 for packed ones on a CPU.

    A CPU multiplies packed bfloat16 ten times slower than packed float32.
    """
    embedding = file.tensors["token_embd.weight"]
    if (plain := plain_type(embedding)) is not None:
        return plain
    is_packed = any(packed_bits(tensor) for tensor in file.tensors.values())
    return mx.float32 if is_packed and mx.default_device() == mx.cpu else mx.bfloat16


def _build(file: GgufFile, config: Config, dtype: mx.Dtype) -> Any:
    """mlx-lm's model with the file's weights; `config` learns which of them are packed."""
    architecture = architecture_of(file)
    weights: dict[str, mx.array] = {}
    packed: dict[str, dict[str, int]] = {}
    for tensor in file.tensors.values():
        if tensor.name == FREQUENCY_FACTORS:
            continue
        name = str(architecture.name(tensor.name))
        arrays = read_tensor(file, tensor, dtype, minus=architecture.added(name))
        if heads := architecture.heads(name, config):
            arrays = {part: by_halves(array, heads) for part, array in arrays.items()}
        weights |= {f"{name}.{part}": array for part, array in arrays.items()}
        if bits := packed_bits(tensor):
            packed[name] = {"group_size": GROUP, "bits": bits}
    module = import_module(f"mlx_lm.models.{config['model_type']}")
    model = module.Model(module.ModelArgs.from_dict(config))
    if hasattr(model, "sanitize"):
        weights = model.sanitize(weights)
    if packed:
        config["quantization"] = {"group_size": GROUP, "bits": 4, **packed}
        quantize(model, class_predicate=lambda path, _: packed.get(path, False))
    model.eval()
    model.load_weights(list(weights.items()))
    mx.eval(model.parameters())
    return model
