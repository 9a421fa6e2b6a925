"""Architectures of GGUF files that mlx-lm has: hyperparameters as its configuration, and what tensors are called.

What a key means, and which numbers llama.cpp holds in its code because no file has them, is taken from llama.cpp's
convert_hf_to_gguf.py and src/llama-model.cpp.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from mlx_tq.errors import UnsupportedModelError
from mlx_tq.models.gguf.file import GgufFile, damaged
from mlx_tq.models.gguf.rope import FREQUENCY_FACTORS, rope_scaling

Config = dict[str, Any]

# Of a layer, behind blk.N. in the file and behind model.layers.N. in mlx-lm.
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
# Where one of these is there and not 0, the model computes something that mlx-lm's model of this name does not.
_FOREIGN = (
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


class Keys:
    """The hyperparameters of a file, under its architecture's name.

    Args:
        file: to read from.
    """

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self.architecture = file.metadata.get("general.architecture")

    def number(self, key: str, default: float | None = None) -> Any:
        """A number, or the default, where there is one.

        Raises:
            ConfigError: it is missing, not one number, or not above 0.
        """
        name = f"{self.architecture}.{key}"
        found = self.file.metadata.get(name, default)
        if found is None:
            raise damaged(self.file.path, f"it has no {name}")
        if isinstance(found, bool) or not isinstance(found, int | float) or found <= 0:
            raise damaged(self.file.path, f"{name} is {str(found)[:40]}, not one number above 0")
        return found

    def refuse(self, *keys: str) -> None:
        """Raise where one of these is there and not 0.

        Raises:
            UnsupportedModelError: it is, named with its value.
        """
        for key in keys:
            if found := self.file.metadata.get(f"{self.architecture}.{key}"):
                raise UnsupportedModelError(
                    f"the model {str(self.file.path)!r} has {self.architecture}.{key} = {str(found)[:40]}, which "
                    f"mlx-lm's {self.architecture} does not compute."
                )


@dataclass(frozen=True)
class Architecture:
    """What a GGUF file of one architecture is to mlx-lm.

    Attributes:
        layer: names of a layer's tensors in the file, and in mlx-lm.
        config: the part of mlx-lm's configuration that only this architecture has.
        interleaved: rows of q and k lie in pairs (x0, x64, x1, x65 ...), as llama.cpp rotates them; mlx-lm has halves.
        norm_offset: what the file has added to the weights of norms, and mlx-lm's model adds itself.
    """

    layer: Mapping[str, str]
    config: Callable[[Keys, Config], Config]
    interleaved: bool = False
    norm_offset: float = 0.0

    def name(self, tensor: str) -> str | None:
        """What mlx-lm calls a tensor of the file, without its last part; None where it knows no such tensor."""
        if found := re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", tensor):
            inner = self.layer.get(found[2])
            return inner and f"model.layers.{found[1]}.{inner}"
        return _OUTSIDE.get(tensor.removesuffix(".weight"))

    def heads(self, name: str, config: Config) -> int:
        """The number of heads whose rows of a weight are interleaved; 0 where none are."""
        role = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.rpartition(".")[2])
        return int(config[role]) if self.interleaved and role else 0

    def added(self, name: str) -> float:
        """What the file has added to a weight."""
        return self.norm_offset if name.endswith("norm") else 0.0


def _llama(keys: Keys, config: Config) -> Config:
    keys.refuse("attention.sliding_window")
    return {"tie_word_embeddings": "output.weight" not in keys.file.tensors}


def _qwen3(keys: Keys, config: Config) -> Config:
    return _llama(keys, config)


def _gemma3(keys: Keys, config: Config) -> Config:
    # llama.cpp knows the 27B model by its 62 layers; it alone scales queries by the width a head would have.
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
        "qwen3": Architecture(_LAYER | _TWO_NORMS | _HEAD_NORMS, _qwen3),
        "gemma3": Architecture(_LAYER | _FOUR_NORMS | _HEAD_NORMS, _gemma3, norm_offset=1.0),
    }
)


def architecture_of(file: GgufFile) -> Architecture:
    """The architecture of a file.

    Raises:
        UnsupportedModelError: it is none that can be read, or the file has tensors that it does not have.
    """
    found = str(file.metadata.get("general.architecture"))
    if found not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"the model {str(file.path)!r} cannot be loaded: its architecture is {found[:40]!r}; GGUF files of "
            f"{', '.join(ARCHITECTURES)} can. Convert it for mlx-lm, or take a folder from mlx-community on the hub."
        )
    unknown = [name for name in file.tensors if name != FREQUENCY_FACTORS and ARCHITECTURES[found].name(name) is None]
    if unknown:
        raise UnsupportedModelError(
            f"the model {str(file.path)!r} cannot be loaded: mlx-lm's {found} has no place for its tensor {unknown[0]}."
        )
    return ARCHITECTURES[found]


def config_of(file: GgufFile) -> Config:
    """The configuration of mlx-lm's model; every number is the file's, or what llama.cpp takes where it has none.

    Raises:
        ConfigError: a number is missing or none.
        UnsupportedModelError: an architecture, a RoPE scaling or another part that mlx-lm's model does not compute.
    """
    architecture, keys = architecture_of(file), Keys(file)
    keys.refuse(*_FOREIGN)
    if "token_embd.weight" not in file.tensors:
        raise damaged(file.path, "it has no token_embd.weight")
    layers = len({name.split(".")[1] for name in file.tensors if name.startswith("blk.")})
    if layers != keys.number("block_count"):
        raise damaged(file.path, f"it says that it has {keys.number('block_count')} layers, and has {layers}")
    hidden, heads = keys.number("embedding_length"), keys.number("attention.head_count")
    head_dim = keys.number("attention.key_length", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if (found := keys.number(key, head_dim)) != head_dim:
            raise UnsupportedModelError(
                f"the model {str(file.path)!r} has {keys.architecture}.{key} = {found} and heads of {head_dim}; "
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
    return config | {"rope_scaling": rope_scaling(file, config)} | architecture.config(keys, config)
