"""Tiny random models of families of mlx-vlm."""

from importlib import import_module

import mlx.core as mx
from mlx.utils import tree_map_with_path
from mlx_vlm.utils import update_module_configs

IMAGE, IMAGE_START, VIDEO = 150, 151, 152  # tokens; image features take the place of the first
_TEXT = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "vocab_size": 160,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
_VISION = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_SLIDING = {"num_hidden_layers": 4, "sliding_window": 32, "sliding_window_pattern": 2}
_MROPE = {"rope_scaling": {"type": "mrope", "mrope_section": [8, 12, 12]}}
_PATCHES = {"depth": 1, "embed_dim": 64, "num_heads": 2, "mlp_ratio": 2.0, "out_hidden_size": 128}  # of Qwen's vision
_GEMMA4 = {"num_hidden_layers": 6, "num_kv_shared_layers": 2, "global_head_dim": 64, "hidden_size_per_layer_input": 0}
_CONV = {"layer_types": ["conv", "full_attention"], "block_dim": 128, "conv_dim": 128, "conv_dim_out": 128}
_GATED = {
    "num_hidden_layers": 4, "full_attention_interval": 2,
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {
        "type": "default", "mrope_section": [3, 3, 2], "rope_theta": 10000.0, "partial_rotary_factor": 0.25,
    },
}  # fmt: skip

# By the name of its module in mlx-vlm: what the text and vision parts have besides `_TEXT` and `_VISION`, and a letter
# for each cache: K is plain, and compressed; R is a sliding window, A holds arrays.
FAMILIES = {
    "llava": ({"model_type": "llama"}, {"model_type": "clip_vision_model"}, "KK"),
    "qwen2_vl": (
        {"model_type": "qwen2_vl", **_MROPE},
        {"model_type": "qwen2_vl", **_PATCHES, "hidden_size": 128},
        "KK",
    ),
    "qwen2_5_vl": ({"model_type": "qwen2_5_vl", **_MROPE}, {"model_type": "qwen2_5_vl", **_PATCHES}, "KK"),
    "qwen3_vl": ({"model_type": "qwen3_vl_text", **_MROPE}, {"model_type": "qwen3_vl", **_PATCHES}, "KK"),
    "gemma3": (
        {"model_type": "gemma3_text", **_SLIDING, "mm_tokens_per_image": 1},
        {"model_type": "siglip_vision_model"},
        "RKRK",
    ),
    "gemma4": ({"model_type": "gemma4_text", **_SLIDING, **_GEMMA4}, {"model_type": "gemma4_vision"}, "RKRK"),
    "idefics3": ({"model_type": "llama"}, {"model_type": "idefics3"}, "KK"),
    "internvl_chat": ({"model_type": "qwen2"}, {"model_type": "intern_vit_6b"}, "KK"),
    "aya_vision": (
        {"model_type": "cohere2", **_SLIDING, "logit_scale": 1.0},
        {"model_type": "siglip_vision_model"},
        "RKRK",
    ),
    "pixtral": ({"model_type": "mistral"}, {"model_type": "pixtral"}, "KK"),
    "mistral3": ({"model_type": "mistral"}, {"model_type": "pixtral"}, "KK"),
    "lfm2_vl": ({"model_type": "lfm2", **_CONV}, {"model_type": "lfm2_vl"}, "AK"),
    "qwen3_5": ({"model_type": "qwen3_5_text", **_GATED}, {"model_type": "qwen3_5", **_PATCHES}, "AKAK"),
    # Refused.
    "phi3_v": ({"model_type": "phi3_v"}, {"model_type": "phi3_v"}, "KK"),
    "gemma3n": (
        {
            "model_type": "gemma3n_text", "num_hidden_layers": 4, "num_kv_shared_layers": 2, "sliding_window": 32,
            "layer_types": ["sliding_attention", "full_attention"] * 2, "hidden_size_per_layer_input": 32,
            "vocab_size_per_layer_input": 160, "altup_num_inputs": 2, "laurel_rank": 8, "intermediate_size": [192] * 4,
            "activation_sparsity_pattern": [0.0] * 4,
        },
        {"model_type": "gemma3n_vision"},
        "RKRK",
    ),
}  # fmt: skip


def build(name, *, spread=True):
    """Return a model of mlx-vlm with random weights, with `spread` such that its logits depend on all of the context.

    Without it, what is not used is not computed: the vision towers of some families have one size.
    """
    text, vision, _ = FAMILIES[name]
    text, vision = {**_TEXT, **text}, {**_VISION, **vision}
    config = {
        **text,
        "model_type": name,
        "image_token_id": IMAGE,
        "image_token_index": IMAGE,
        "vision_start_token_id": IMAGE_START,
        "video_token_id": VIDEO,
        "text_config": text,
        "vision_config": vision,
        **({"audio_config": {}} if name == "gemma3n" else {}),
    }
    module = import_module(f"mlx_vlm.models.{name}")
    arguments = module.ModelConfig.from_dict(dict(config))
    arguments = update_module_configs(arguments, module, config, ["text", "vision", "audio"])
    mx.random.seed(0)
    model = module.Model(arguments)

    def randomize(path, weight):
        if not mx.issubdtype(weight.dtype, mx.floating):
            return weight
        if mx.all(weight == weight.flatten()[0]):
            weight = weight + 0.2 * mx.random.normal(weight.shape)
        elif weight.ndim > 1 and "emb" not in path:
            weight = weight * 3**0.5
        # Gemma 4 does not divide scores by the root of the head size.
        return weight / 64**0.5 if name == "gemma4" and path.endswith("q_norm.weight") else weight

    if spread:
        model.update(tree_map_with_path(randomize, model.parameters()))
    model.set_dtype(mx.float32)
    model.eval()
    return model
