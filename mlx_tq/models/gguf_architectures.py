"""Architectures of GGUF files: hyperparameters as mlx-lm's configuration, and the names of tensors.

What a key means, and which numbers llama.cpp has in its code because no file has them, is taken from llama.cpp's
convert_hf_to_gguf.py and src/llama-model.cpp.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_tq.errors import UnsupportedModelError
from mlx_tq.models.gguf_file import GgufFile, damaged

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
FREQUENCY_FACTORS = "rope_freqs.weight"
_LOW, _HIGH, _TRAINED = 1.0, 4.0, 8192
_SCALING_KEYS = {"none": (), "linear": ("factor",), "yarn": ("factor", "original_context_length")}
_IGNORED_SCALING_KEYS = ("type", "finetuned")


class _Keys:
    """The hyperparameters of a file, which are stored under its architecture's name."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self.architecture = file.metadata.get("general.architecture")

    def number(self, key: str, default: float | None = None) -> Any:
        name = f"{self.architecture}.{key}"
        value = self.file.metadata.get(name, default)
        if value is None:
            raise damaged(self.file.path, f"it has no {name}")
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise damaged(self.file.path, f"{name} is {str(value)[:40]}, not one number above 0")
        return value

    def refuse(self, *keys: str) -> None:
        """Raise UnsupportedModelError if the file has one of these keys with another value than 0."""
        for key in keys:
            if value := self.file.metadata.get(f"{self.architecture}.{key}"):
                raise UnsupportedModelError(
                    f"the model {str(self.file.path)!r} has {self.architecture}.{key} = {str(value)[:40]}, which "
                    f"mlx-lm's {self.architecture} does not compute."
                )


@dataclass(frozen=True)
class Architecture:
    """How a GGUF file of one architecture maps to mlx-lm's model."""

    layer: Mapping[str, str]  # names of a layer's tensors in the file, and in mlx-lm
    own_config: Callable[[_Keys, Config], Config]  # the part of the configuration that only this architecture has
    interleaved: bool = False  # rows of q and k are in pairs (x0, x64, x1, x65 ...); mlx-lm has halves
    norm_offset: float = 0.0  # added to the weights of norms in the file, which mlx-lm's model adds itself

    def mlx_name(self, tensor: str) -> str | None:
        """Return mlx-lm's name of a tensor of the file, without its last part, or None for an unknown tensor."""
        if match := re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", tensor):
            name = self.layer.get(match[2])
            return name and f"model.layers.{match[1]}.{name}"
        return _OUTSIDE.get(tensor.removesuffix(".weight"))

    def interleaved_heads(self, name: str, config: Config) -> int:
        """Return the number of heads whose rows of a weight are interleaved, or 0."""
        key = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.rpartition(".")[2])
        return int(config[key]) if self.interleaved and key else 0


def _llama(keys: _Keys, config: Config) -> Config:
    keys.refuse("attention.sliding_window")
    return {"tie_word_embeddings": "output.weight" not in keys.file.tensors}


def _gemma3(keys: _Keys, config: Config) -> Config:
    # llama.cpp tells the 27B model by its 62 layers; it alone scales queries by the width that a head would have.
    is_27b = config["num_hidden_layers"] == 62
    return {
        "model_type": "gemma3_text",
        "rope_local_base_freq": keys.number("rope.freq_base_swa", 10_000.0),
        "query_pre_attn_scalar": (
            config["hidden_size"] // config["num_attention_heads"] if is_27b else config["head_dim"]
        ),
        "sliding_window": keys.number("attention.sliding_window"),
        "sliding_window_pattern": keys.number("attention.sliding_window_pattern", 6),
    }


ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        "llama": Architecture(_LAYER | _TWO_NORMS, _llama, interleaved=True),
        "qwen3": Architecture(_LAYER | _TWO_NORMS | _HEAD_NORMS, _llama),
        "gemma3": Architecture(_LAYER | _FOUR_NORMS | _HEAD_NORMS, _gemma3, norm_offset=1.0),
    }
)


def architecture_of(file: GgufFile) -> Architecture:
    """Return the architecture of a file, or raise UnsupportedModelError if mlx-lm does not have it."""
    name = str(file.metadata.get("general.architecture"))
    if name not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"the model {str(file.path)!r} cannot be loaded: its architecture is {name[:40]!r}; GGUF files of "
            f"{', '.join(ARCHITECTURES)} can. Convert it for mlx-lm, or take a folder from mlx-community on the hub."
        )
    architecture = ARCHITECTURES[name]
    for tensor in file.tensors:
        if tensor != FREQUENCY_FACTORS and architecture.mlx_name(tensor) is None:
            raise UnsupportedModelError(
                f"the model {str(file.path)!r} cannot be loaded: mlx-lm's {name} has no place for its tensor {tensor}."
            )
    return architecture


def make_config(file: GgufFile) -> Config:
    """Return the configuration of mlx-lm's model, with the file's numbers, or llama.cpp's defaults."""
    architecture, keys = architecture_of(file), _Keys(file)
    keys.refuse(*_UNSUPPORTED)
    if "token_embd.weight" not in file.tensors:
        raise damaged(file.path, "it has no token_embd.weight")
    layers = len({name.split(".")[1] for name in file.tensors if name.startswith("blk.")})
    if layers != keys.number("block_count"):
        raise damaged(file.path, f"it says that it has {keys.number('block_count')} layers, and has {layers}")
    hidden, heads = keys.number("embedding_length"), keys.number("attention.head_count")
    head_dim = keys.number("attention.key_length", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if (value := keys.number(key, head_dim)) != head_dim:
            raise UnsupportedModelError(
                f"the model {str(file.path)!r} has {keys.architecture}.{key} = {value} and heads of {head_dim}; "
                f"mlx-lm's {keys.architecture} has one number for both."
            )
    config = {
        "model_type": keys.architecture,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": keys.number("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.number("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "max_position_embeddings": keys.number("context_length"),
        "rope_theta": keys.number("rope.freq_base", 10_000.0),
    }
    return config | {"rope_scaling": _rope_scaling(file, config)} | architecture.own_config(keys, config)


def _rope_scaling(file: GgufFile, config: Config) -> Config | None:
    prefix = f"{file.metadata['general.architecture']}.rope.scaling."
    scaling = {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)}
    kind = scaling.get("type", "none")
    if kind not in _SCALING_KEYS or (FREQUENCY_FACTORS in file.tensors and kind != "none"):
        raise _unknown(file, f"RoPE scaling {str(kind)[:40]!r}", f"{', '.join(_SCALING_KEYS)} and llama3")
    required = _SCALING_KEYS[kind]
    if unknown := scaling.keys() - {*required, *_IGNORED_SCALING_KEYS}:
        raise _unknown(file, f"{prefix}{min(unknown)} with RoPE scaling {kind!r}", ", ".join(required) or "none")
    if missing := [key for key in required if not isinstance(scaling.get(key), int | float)]:
        raise damaged(file.path, f"it has no {prefix}{missing[0]}")
    if kind == "none":
        return _llama3_scaling(file, config) if FREQUENCY_FACTORS in file.tensors else None
    original = {"original_max_position_embeddings": scaling[required[1]]} if kind == "yarn" else {}
    return {"type": kind, "factor": scaling["factor"], **original}


def _llama3_scaling(file: GgufFile, config: Config) -> Config:
    factors = np.array(file.read(file.tensors[FREQUENCY_FACTORS], mx.float32)["weight"], dtype=np.float64)
    exponents = np.arange(0, config["head_dim"], 2) / config["head_dim"]
    turns = _TRAINED / (2 * math.pi * config["rope_theta"] ** exponents)  # of each pair over the trained context
    share = np.clip((turns - _LOW) / (_HIGH - _LOW), 0, 1)
    largest = float(factors.max())
    if factors.shape != share.shape or not np.allclose(factors, 1 / ((1 - share) / largest + share), rtol=1e-3):
        raise _unknown(file, f"factors in {FREQUENCY_FACTORS}", "those of Llama 3.1 to 3.3")
    return {
        "rope_type": "llama3",
        "factor": largest,
        "low_freq_factor": _LOW,
        "high_freq_factor": _HIGH,
        "original_max_position_embeddings": _TRAINED,
    }


def _unknown(file: GgufFile, what: str, valid: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"the model {str(file.path)!r} has an unknown {what}; valid are {valid}.")
