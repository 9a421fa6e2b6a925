"""Load a GGUF file, llama.cpp's format, as mlx-lm's model and tokenizer.

What a hyperparameter means, and which numbers llama.cpp has in its code because no file has them, is taken from
llama.cpp's convert_hf_to_gguf.py and src/llama-model.cpp.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers.quantized import quantize

from mlx_tq.codec.formats.base import dtype_of
from mlx_tq.errors import ConfigError, UnsupportedModelError
from mlx_tq.models.dense import compute_weights
from mlx_tq.models.gguf_file import GROUP_SIZE, GgufFile, damaged, read_gguf, short
from mlx_tq.models.gguf_tokenizer import write_tokenizer

Config = dict[str, Any]

# Tensors of a layer, behind blk.N. in the file and behind model.layers.N. in mlx-lm.
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_TWO_NORMS = {"ffn_norm": "post_attention_layernorm"}
_FOUR_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_HEADS = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
_OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
# If one of these keys is not 0, the model computes something that mlx-lm's model of this name does not.
_UNSUPPORTED = (
    "expert_count",
    "attention.clamp_kqv",
    "attention.max_alibi_bias",
    "attention.scale",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "logit_scale",
    "residual_scale",
    "embedding_scale",
)
# Llama 3.1 and later: the factor on the wavelength of each pair of dims. The four numbers that made it are in no file;
# the first is the largest factor, the others are the same in all of Meta's models.
_FREQUENCY_FACTORS = "rope_freqs.weight"
_LOW, _HIGH, _TRAINED = 1.0, 4.0, 8192
_SCALING_KEYS = {"none": (), "linear": ("factor",), "yarn": ("factor", "original_context_length")}


@dataclass(frozen=True)
class _Architecture:
    """How a GGUF file of one architecture maps to mlx-lm's model."""

    layer: Mapping[str, str]  # names of a layer's tensors in the file, and in mlx-lm
    extra_config: Callable[[GgufFile, Config], Config]  # the part of the configuration that only this architecture has
    interleaved: bool = False  # rows of q and k are in pairs (x0, x64, x1, x65 ...); mlx-lm has halves
    norm_offset: float = 0.0  # added to the weights of norms in the file, which mlx-lm's model adds itself

    def mlx_name(self, tensor: str) -> str | None:
        """Return mlx-lm's name of a tensor of the file, without its last part, or None for an unknown tensor."""
        if match := re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", tensor):
            name = self.layer.get(match[2])
            return name and f"model.layers.{match[1]}.{name}"
        return _OUTSIDE.get(tensor.removesuffix(".weight"))


def _refuse(file: GgufFile, *keys: str) -> None:
    """Raise UnsupportedModelError if the file has one of these keys with another value than 0."""
    for key in keys:
        if value := file.metadata.get(f"{file.architecture}.{key}"):
            raise UnsupportedModelError(
                f"the model {str(file.path)!r} has {file.architecture}.{key} = {short(value)}, which mlx-lm's "
                f"{file.architecture} does not compute."
            )


def _llama(file: GgufFile, config: Config) -> Config:
    _refuse(file, "attention.sliding_window")
    return {"tie_word_embeddings": "output.weight" not in file.tensors}


def _gemma3(file: GgufFile, config: Config) -> Config:
    # llama.cpp tells the 27B model by its 62 layers; it alone scales queries by the width that a head would have.
    is_27b = config["num_hidden_layers"] == 62
    return {
        "model_type": "gemma3_text",
        "rope_local_base_freq": file.number("rope.freq_base_swa", 10_000.0),
        "query_pre_attn_scalar": (
            config["hidden_size"] // config["num_attention_heads"] if is_27b else config["head_dim"]
        ),
        "sliding_window": file.integer("attention.sliding_window"),
        "sliding_window_pattern": file.integer("attention.sliding_window_pattern", 6),
    }


_ARCHITECTURES = {
    "llama": _Architecture(_LAYER | _TWO_NORMS, _llama, interleaved=True),
    "qwen3": _Architecture(_LAYER | _TWO_NORMS | _HEAD_NORMS, _llama),
    "gemma3": _Architecture(_LAYER | _FOUR_NORMS | _HEAD_NORMS, _gemma3, norm_offset=1.0),
}


def _architecture_of(file: GgufFile) -> _Architecture:
    """Return the architecture of a file, or raise UnsupportedModelError if mlx-lm does not have it."""
    name = file.architecture
    if name not in _ARCHITECTURES:
        raise UnsupportedModelError(
            f"the model {str(file.path)!r} cannot be loaded: architecture {short(name)!r} is not supported; supported "
            f"are {', '.join(_ARCHITECTURES)}. Convert it for mlx-lm, or use a folder from mlx-community on the hub."
        )
    architecture = _ARCHITECTURES[name]
    for tensor in file.tensors:
        if tensor != _FREQUENCY_FACTORS and architecture.mlx_name(tensor) is None:
            raise UnsupportedModelError(
                f"the model {str(file.path)!r} cannot be loaded: mlx-lm's {name} has no place for its tensor "
                f"{short(tensor)}."
            )
    return architecture


def make_config(file: GgufFile) -> Config:
    """Return the configuration of mlx-lm's model, with the file's numbers, or llama.cpp's defaults."""
    architecture = _architecture_of(file)
    _refuse(file, *_UNSUPPORTED)
    if "token_embd.weight" not in file.tensors:
        raise damaged(file.path, "it has no token_embd.weight")
    layers = len({name.split(".")[1] for name in file.tensors if name.startswith("blk.")})
    if layers != file.integer("block_count"):
        raise damaged(file.path, f"it says that it has {file.integer('block_count')} layers, and has {layers}")
    hidden, heads = file.integer("embedding_length"), file.integer("attention.head_count")
    head_dim = file.integer("attention.key_length", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if (value := file.integer(key, head_dim)) != head_dim:
            raise UnsupportedModelError(
                f"the model {str(file.path)!r} has {file.architecture}.{key} = {value} and heads of {head_dim}; "
                f"mlx-lm's {file.architecture} has one number for both."
            )
    config = {
        "model_type": file.architecture,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": file.integer("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": file.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": file.number("attention.layer_norm_rms_epsilon"),
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "max_position_embeddings": file.integer("context_length"),
        "rope_theta": file.number("rope.freq_base", 10_000.0),
    }
    return config | {"rope_scaling": _rope_scaling(file, config)} | architecture.extra_config(file, config)


def _rope_scaling(file: GgufFile, config: Config) -> Config | None:
    prefix = f"{file.architecture}.rope.scaling."
    scaling = {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)}
    kind = scaling.get("type", "none")
    older = file.number("rope.scale_linear", 1.0)  # the name of the factor in files before 2024
    if not scaling and older != 1:
        return {"type": "linear", "factor": older}
    if (
        not isinstance(kind, str)
        or kind not in _SCALING_KEYS
        or (_FREQUENCY_FACTORS in file.tensors and kind != "none")
    ):
        raise _unknown(file, f"RoPE scaling {short(kind)!r}", f"{', '.join(_SCALING_KEYS)} and llama3")
    required = _SCALING_KEYS[kind]
    if unknown := scaling.keys() - {*required, "type", "finetuned"}:
        raise _unknown(
            file, f"{short(prefix + min(unknown))} with RoPE scaling {kind!r}", ", ".join(required) or "none"
        )
    numbers = {key: file.number(f"rope.scaling.{key}") for key in required}
    if kind == "none":
        return _llama3_scaling(file, config) if _FREQUENCY_FACTORS in file.tensors else None
    original = {"original_max_position_embeddings": numbers[required[1]]} if kind == "yarn" else {}
    return {"type": kind, "factor": numbers["factor"], **original}


def _llama3_scaling(file: GgufFile, config: Config) -> Config:
    factors = np.array(file.read(file.tensors[_FREQUENCY_FACTORS], mx.float32)["weight"], dtype=np.float64)
    exponents = np.arange(0, config["head_dim"], 2) / config["head_dim"]
    turns = _TRAINED / (2 * math.pi * config["rope_theta"] ** exponents)  # of each pair over the trained context
    share = np.clip((turns - _LOW) / (_HIGH - _LOW), 0, 1)
    largest = float(factors.max())
    if factors.shape != share.shape or not np.allclose(factors, 1 / ((1 - share) / largest + share), rtol=1e-3):
        raise _unknown(file, f"factors in {_FREQUENCY_FACTORS}", "those of Llama 3.1 to 3.3")
    return {
        "rope_type": "llama3",
        "factor": largest,
        "low_freq_factor": _LOW,
        "high_freq_factor": _HIGH,
        "original_max_position_embeddings": _TRAINED,
    }


def _unknown(file: GgufFile, what: str, valid: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"the model {str(file.path)!r} has an unknown {what}; valid are {valid}.")


def load_gguf(
    path: Path,
    *,
    dtype: str | None = None,
    tokenizer_config: dict[str, Any] | None = None,
    model_config: dict[str, Any] | None = None,
    adapter_path: str | Path | None = None,
    trust_remote_code: bool = False,  # without effect, since the file contains no code
) -> tuple[Any, Any, Config]:
    """Load a model, its tokenizer and its configuration; raise ValueError if the shape of a tensor does not fit."""
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
    model = _build_model(file, config, _choose_dtype(file, dtype))
    compute_weights(model)
    if adapter_path is not None:
        model = load_adapters(model, str(adapter_path))
        model.eval()
    return model, tokenizer, config


def outline_gguf(path: Path, dtype: str | None) -> Any:
    """Return the model of a file without its weights, which are not read."""
    file = read_gguf(path)
    return _build_model(file, make_config(file), _choose_dtype(file, dtype), outline=True)


def _choose_dtype(file: GgufFile, dtype: str | None) -> mx.Dtype:
    """Return the type to compute in, by default that of the embeddings if they are not quantized."""
    if dtype is not None:
        return dtype_of(dtype)
    dense = file.tensors["token_embd.weight"].dense_dtype
    if dense is not None:
        return dense
    # A CPU multiplies packed bfloat16 ten times slower than packed float32.
    is_packed = any(tensor.packed_bits for tensor in file.tensors.values())
    return mx.float32 if is_packed and mx.default_device() == mx.cpu else mx.bfloat16


def _build_model(file: GgufFile, config: Config, dtype: mx.Dtype, *, outline: bool = False) -> Any:
    """Return mlx-lm's model with the file's weights; adds the quantization to `config`."""
    architecture = _architecture_of(file)
    weights: dict[str, mx.array] = {}
    packed: dict[str, dict[str, int]] = {}
    for tensor in file.tensors.values():
        if tensor.name == _FREQUENCY_FACTORS:
            continue
        name = str(architecture.mlx_name(tensor.name))
        minus = architecture.norm_offset if name.endswith("norm") else 0.0
        arrays = file.outline(tensor, dtype) if outline else file.read(tensor, dtype, minus)
        if architecture.interleaved and (key := _HEADS.get(name.rpartition(".")[2])):
            for part, rows in arrays.items():  # from [heads, D / 2, 2] to [heads, 2, D / 2]
                arrays[part] = rows.reshape(config[key], -1, 2, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape)
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
    return model
