"""Load a GGUF file, llama.cpp's format, as mlx-lm's model and tokenizer."""

from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx
from mlx.nn.layers.quantized import quantize

from mlx_tq.codec.formats.base import dtype_of
from mlx_tq.errors import ConfigError
from mlx_tq.models.gguf_architectures import FREQUENCY_FACTORS, Config, architecture_of, make_config
from mlx_tq.models.gguf_file import GROUP_SIZE, GgufFile, read_gguf
from mlx_tq.models.gguf_tokenizer import write_tokenizer


def load_gguf(
    path: Path,
    *,
    dtype: str | None = None,
    tokenizer_config: dict[str, Any] | None = None,
    model_config: dict[str, Any] | None = None,
    adapter_path: str | Path | None = None,
    trust_remote_code: bool = False,
) -> tuple[Any, Any, Config]:
    """Load a model of mlx-lm, its tokenizer and its configuration; options are those of `mlx_lm.load`.

    `trust_remote_code` has no effect, since a GGUF file contains no code. Raises ValueError if shapes of tensors do not
    fit the configuration.
    """
    from mlx_lm.utils import load_adapters, load_tokenizer  # imports transformers, which takes a second

    if (model_config or {}).get("quantize_activations"):
        raise ConfigError(
            "--quantize-activations needs nvfp4 or mxfp8 weights; those of a GGUF file are neither. Drop it."
        )
    file = read_gguf(path)
    config = make_config(file) | (model_config or {})
    with TemporaryDirectory() as name:
        folder = Path(name)
        config["eos_token_id"] = write_tokenizer(file, folder)
        tokenizer = load_tokenizer(folder, tokenizer_config, eos_token_ids=config["eos_token_id"])
    tokenizer.name_or_path = str(path)
    model = _build_model(file, config, _default_dtype(file) if dtype is None else dtype_of(dtype))
    if adapter_path is not None:
        model = load_adapters(model, str(adapter_path))
        model.eval()
    return model, tokenizer, config


def _default_dtype(file: GgufFile) -> mx.Dtype:
    """Return the type of dense weights; for quantized ones bfloat16, or float32 on a CPU if any stay packed.

    A CPU multiplies packed bfloat16 ten times slower than packed float32.
    """
    if (dtype := file.tensors["token_embd.weight"].dense_dtype) is not None:
        return dtype
    is_packed = any(tensor.packed_bits for tensor in file.tensors.values())
    return mx.float32 if is_packed and mx.default_device() == mx.cpu else mx.bfloat16


def _build_model(file: GgufFile, config: Config, dtype: mx.Dtype) -> Any:
    """Return mlx-lm's model with the file's weights; adds the quantization to `config`."""
    architecture = architecture_of(file)
    weights: dict[str, mx.array] = {}
    packed: dict[str, dict[str, int]] = {}
    for tensor in file.tensors.values():
        if tensor.name == FREQUENCY_FACTORS:
            continue
        name = str(architecture.mlx_name(tensor.name))
        arrays = file.read(tensor, dtype, minus=architecture.norm_offset if name.endswith("norm") else 0.0)
        if heads := architecture.interleaved_heads(name, config):
            arrays = {part: _pairs_to_halves(array, heads) for part, array in arrays.items()}
        weights |= {f"{name}.{part}": array for part, array in arrays.items()}
        if bits := tensor.packed_bits:
            packed[name] = {"group_size": GROUP_SIZE, "bits": bits}
    module = import_module(f"mlx_lm.models.{config['model_type']}")
    model = module.Model(module.ModelArgs.from_dict(config))
    if hasattr(model, "sanitize"):
        weights = model.sanitize(weights)
    if packed:
        config["quantization"] = {"group_size": GROUP_SIZE, "bits": 4, **packed}
        quantize(model, class_predicate=lambda path, _: packed.get(path, False))
    model.eval()
    model.load_weights(list(weights.items()))
    mx.eval(model.parameters())
    return model


def _pairs_to_halves(rows: mx.array, heads: int) -> mx.array:
    """Reorder rows [heads, D / 2, 2] of a weight, its scales or biases to [heads, 2, D / 2]."""
    return rows.reshape(heads, -1, 2, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape)
