"""Tiny random models of many mlx-lm architectures, with the facts a cache author must know about each.

Each fact is checked by `test_zoo.py`, which runs every model (of `query`, whether it is "rope"); `why` and `note` say
what was read in mlx-lm's source.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map_with_path
from mlx_lm.utils import MODEL_REMAPPING


@dataclass(frozen=True)
class Arch:
    """One architecture: its configuration and how its attention treats the cache.

    The facts are about the layers that keep a plain `KVCache`, the only ones mlx_tq replaces.
    """

    name: str
    config: dict
    layers: str  # a letter per cache entry: K KVCache, R RotatingKVCache, A ArraysCache, L CacheList of A and K
    dims: tuple[int, int] = (64, 64)  # key and value dim
    mask: str = "causal"  # of a prefill: mlx-lm's word "causal", or "array"
    sinks: bool = False
    # What reaches attention: "rope" is the very array that rope returned; else "nope" (unrotated), "cast", "scaled",
    # "normed" or "concat" (a rotated part beside an unrotated one).
    query: str = "rope"
    uses: tuple[str, ...] = ()  # attributes read on the fetched keys and values before or after attention
    shared: int = 0  # later layers that attend, with cache=None, to the pair which an earlier layer fetched
    servable: bool = True
    buildable: bool = True
    why: str = ""  # of a model that is not servable
    note: str = ""
    query_gain: float = 1.0  # on q_norm.weight, where the model has no 1/sqrt(dim) of its own

    @property
    def plain_layers(self) -> int:
        return self.layers.count("K") + self.layers.count("L")

    @property
    def sparse(self) -> bool:
        """Has a mixture of experts, which mlx's CPU backend computes in float32 only."""
        return "num_experts_per_tok" in self.config


WIDE = {
    "vocab_size": 160, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096, "rope_theta": 10000.0, "tie_word_embeddings": True,
    "attention_bias": False, "mlp_bias": False,
}  # fmt: skip
# Where the model takes its head dim from hidden_size / num_attention_heads.
NARROW = {**WIDE, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": None}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
SPARSE = {"decoder_sparse_step": 1, "mlp_only_layers": [], "shared_expert_intermediate_size": 64}
LINEAR = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 32,
    "linear_value_head_dim": 32, "linear_conv_kernel_dim": 4, "full_attention_interval": 2,
}  # fmt: skip
MAMBA = {
    "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_n_groups": 1,
    "mamba_proj_bias": False, "mamba_conv_bias": True, "mamba_expand": 2,
}  # fmt: skip
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024, "mscale": 1.0, "mscale_all_dim": 1.0}
DEEPSEEK = {
    "num_key_value_heads": 4, "moe_intermediate_size": 64, "n_shared_experts": 1, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "kv_lora_rank": 64, "q_lora_rank": 48, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
    "rope_scaling": YARN,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}  # fmt: skip
MINISTRAL = {
    "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 10000.0,
    "llama_4_scaling_beta": 0.1,
}  # fmt: skip
INTERNLM3 = {"hidden_size": 224, "qkv_bias": True, "rope_scaling": {"rope_type": "dynamic", "factor": 6.0}}
MUP = {"scale_depth": 1.4, "scale_emb": 12.0, "dim_model_base": 64}
MINICPM3 = {
    **MUP, "kv_lora_rank": 64, "q_lora_rank": 48, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32,
    "rope_scaling": {"original_max_position_embeddings": 1024},
}  # fmt: skip
GRANITE = {
    "attention_multiplier": 1 / 8, "embedding_multiplier": 12.0, "residual_multiplier": 0.5, "logits_scaling": 1.0,
}  # fmt: skip
SLIDING = {"num_hidden_layers": 4, "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"] * 2}
PATTERN = {"num_hidden_layers": 4, "sliding_window": 16, "sliding_window_pattern": 2}
GEMMA4 = {
    **PATTERN, "num_hidden_layers": 6, "num_kv_shared_layers": 2, "global_head_dim": 512,
    "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 160,
}  # fmt: skip
LFM2 = {
    "num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2, "norm_eps": 1e-5, "conv_bias": False,
    "conv_L_cache": 3, "block_dim": 128, "block_ff_dim": 192, "block_multiple_of": 32,
    "block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": False,
}  # fmt: skip
FALCON = {**MAMBA, "mamba_d_ssm": 128, "embedding_multiplier": 1.0, "lm_head_multiplier": 1.0}
JAMBA = {
    **MAMBA, **EXPERTS, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
    "expert_layer_offset": 1,
}  # fmt: skip
AFM7 = {"hidden_dim": 128, "num_layers": 4, "num_kv_reuse_layers": 2, "num_heads": 2, "num_kv_heads": 1}
PLAMO2 = {"hidden_size_per_head": 64, "mamba_num_heads": 4, "mamba_d_state": 16}
MAMBA2 = {
    "num_heads": 4, "head_dim": 32, "state_size": 16, "conv_kernel": 4, "n_groups": 1, "layer_norm_epsilon": 1e-5,
    "use_bias": False, "use_conv_bias": True, "time_step_limit": (0.001, 100.0), "time_step_rank": "auto",
}  # fmt: skip
RWKV7 = {
    "norm_eps": 1e-5, "a_low_rank_dim": 16, "v_low_rank_dim": 16, "gate_low_rank_dim": 16, "decay_low_rank_dim": 16,
}  # fmt: skip


def wide(name: str, layers: str = "KK", base: dict = WIDE, changes: dict | None = None, **facts) -> Arch:
    """An entry whose config is `base` with `changes`; the name is mlx-lm's model type unless `changes` has one."""
    return Arch(name, {**base, "model_type": name, **(changes or {})}, layers, **facts)


def narrow(name: str, layers: str = "KK", changes: dict | None = None, **facts) -> Arch:
    return wide(name, layers, NARROW, changes, **facts)


def refused(arch: Callable[..., Arch], name: str, why: str, layers: str = "KK", **facts) -> Arch:
    return arch(name, layers, servable=False, why=why, **facts)


_ENTRIES = [
    wide("llama"),
    wide("llama3_rope", changes={"model_type": "llama", "rope_scaling": LLAMA3, "attention_bias": True}),
    narrow("qwen2", note="q, k and v have biases"),
    narrow("qwen2_moe", changes={**EXPERTS, **SPARSE}),
    wide("qwen3", changes={"head_dim": 128}, dims=(128, 128)),
    wide("qwen3_moe", changes={**EXPERTS, **SPARSE}),
    wide("qwen3_next", "AK", changes={**EXPERTS, **SPARSE, **LINEAR, "partial_rotary_factor": 0.25}),
    wide("qwen3_5", "AKAK", changes={**LINEAR, "num_hidden_layers": 4, "head_dim": 256}, dims=(256, 256)),
    wide("mistral", changes={"sliding_window": 16}, note="is llama; sliding_window counts only with layer_types"),
    wide(
        "ministral3",
        "RKRK",
        changes={**SLIDING, "rope_parameters": MINISTRAL},
        query="scaled",
        note="each query is scaled by its position after rope",
    ),
    narrow("mixtral", changes={"num_local_experts": 4, "num_experts_per_tok": 2}),
    wide("gemma", changes={"num_key_value_heads": 1, "head_dim": 256}, dims=(256, 256)),
    wide("gemma3_text", "RKRK", changes={**PATTERN, "query_pre_attn_scalar": 64}),
    wide(
        "gemma4_text",
        "RKRK",
        changes=GEMMA4,
        dims=(512, 512),
        shared=1,
        query_gain=1 / 16,
        note="make_cache is shorter than layers; rotates K before Q; the offset is an mx.array; attention scale 1",
    ),
    narrow("phi3", changes={"hidden_size": 192}, dims=(96, 96)),
    narrow(
        "phi",
        changes={"hidden_size": 160, "partial_rotary_factor": 0.4},
        dims=(80, 80),
        query="cast",
        uses=("dtype",),
        note="float32 queries meet keys of the model's dtype",
    ),
    wide("gpt_oss", "RKRK", changes={**SLIDING, "num_local_experts": 4, "num_experts_per_tok": 2}, sinks=True),
    wide("deepseek_v2", changes=DEEPSEEK, dims=(192, 128), query="concat", note="the cache holds full keys per head"),
    narrow("minicpm3", changes=MINICPM3, dims=(96, 64), query="concat", note="the cache holds full keys per head"),
    wide(
        "glm4", changes={"partial_rotary_factor": 0.5, "attention_bias": True}, note="interleaved rope of half a head"
    ),
    wide("olmo2"),
    wide(
        "cohere2",
        "RKRK",
        changes={**PATTERN, "hidden_size": 256, "layer_norm_eps": 1e-5, "logit_scale": 1.0},
        query="nope",
    ),
    narrow(
        "stablelm",
        changes={"partial_rotary_factor": 0.25, "use_qkv_bias": True, "layer_norm_eps": 1e-5},
        query="cast",
        uses=("astype", "dtype"),
        note="casts the fetched keys to float32: a whole copy at each step",
    ),
    narrow("starcoder2", changes={"hidden_size": 96}, dims=(48, 48)),
    narrow("granite", changes=GRANITE),
    wide("exaone4", "RKRK", changes={**PATTERN, "sliding_window_pattern": "LG", "rope_scaling": None}, query="nope"),
    wide("smollm3", "KKKK", changes={"num_hidden_layers": 4}, note="rope of the last layer is an identity"),
    narrow("gpt_neox", changes={"layer_norm_eps": 1e-5, "rotary_emb_base": 10000, "rotary_pct": 0.25}),
    narrow("internlm3", changes=INTERNLM3, dims=(112, 112), note="rope's base grows with the offset"),
    wide("ernie4_5", changes={"use_bias": False}, note="interleaved rope"),
    wide("seed_oss", changes={"attention_bias": True}),
    narrow("helium", note="interleaved rope"),
    narrow("nemotron", changes={"hidden_act": "relu2", "norm_eps": 1e-5}),
    narrow("minicpm", changes=MUP),
    wide("hunyuan_v1_dense", query="normed", note="Q and K are normed after rope"),
    narrow("lfm2", "AKAK", changes=LFM2),
    wide("falcon_h1", "LL", changes=FALCON),
    narrow("granitemoehybrid", "AK", changes={**MAMBA, **GRANITE, "layer_types": ["mamba", "attention"]}),
    narrow("jamba", "AK", changes=JAMBA, query="nope"),
    wide(
        "afm7",
        changes=AFM7,
        query="normed",
        uses=("shape",),
        shared=2,
        note="later layers call cache.keys_and_values() and take their rope offset from the number of keys",
    ),
    refused(wide, "gemma2", "computes its own softmax", mask="array"),
    refused(wide, "olmo", "needs ai2-olmo: without it importing mlx_lm.models.olmo ends the process", buildable=False),
    refused(wide, "deepseek_v3", "caches an MLA latent", mask="array", changes=DEEPSEEK),
    refused(wide, "glm4_moe_lite", "caches an MLA latent", mask="array", changes=DEEPSEEK),
    refused(narrow, "plamo", "tiles the fetched keys and values", changes={"n_shared_head": 2}),
    refused(wide, "plamo2", "calls mx.fast.scaled_dot_product_attention itself", "AK", changes=PLAMO2),
    refused(wide, "mamba2", "has no KV cache", "AA", changes=MAMBA2),
    refused(wide, "rwkv7", "has no KV cache", "AA", changes=RWKV7),
]
ARCHITECTURES: dict[str, Arch] = {arch.name: arch for arch in _ENTRIES}


def build(name: str, dtype: mx.Dtype = mx.float32, seed: int = 0) -> nn.Module:
    """The model with random weights; equal seeds give equal weights. Raises ValueError if it cannot be built here."""
    arch = ARCHITECTURES[name]
    if not arch.buildable:
        raise ValueError(f"{name}: {arch.why}")
    model_type = arch.config["model_type"]
    module = import_module(f"mlx_lm.models.{MODEL_REMAPPING.get(model_type, model_type)}")
    mx.random.seed(seed)
    model = module.Model(module.ModelArgs.from_dict(arch.config))

    def wake(path: str, weight: mx.array) -> mx.array:
        """Noise on what starts constant (biases, sinks, norms), and a gain of one for what starts as a matrix."""
        if mx.all(weight == weight.flatten()[0]):
            weight = weight + 0.2 * mx.random.normal(weight.shape)
        elif weight.ndim > 1 and "emb" not in path:
            weight = weight * 3**0.5
        return weight * arch.query_gain if path.endswith("q_norm.weight") else weight

    model.update(tree_map_with_path(wake, model.parameters()))
    model.set_dtype(dtype)
    model.eval()
    mx.eval(model.parameters())
    return model
