"""Make a folder that mlx-lm loads from a trained state.

python -m benchmarks.models.export STATE TOKENIZER_FOLDER FOLDER

TOKENIZER_FOLDER holds tokenizer.json and tokenizer_config.json.
"""

import json
import shutil
import sys
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import save_file

from benchmarks.models.hybrid import Shape
from benchmarks.models.latent import LatentShape

TOKENIZER = ("tokenizer.json", "tokenizer_config.json")


HYBRID = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "tie_word_embeddings": True,
    "num_experts": 0,
    "num_experts_per_tok": 0,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 0,
    "shared_expert_intermediate_size": 0,
}
LATENT = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "tie_word_embeddings": False,
    "q_lora_rank": None,
    "rope_scaling": None,
}


def export(state: Path, tokenizer: Path, folder: Path, positions: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    weights = torch.load(state)["model"]
    layers = 1 + max(int(name.split(".")[1]) for name in weights if name.startswith("layers."))
    sizes = {"vocab_size": len(weights["embed_tokens.weight"]), "num_hidden_layers": layers}
    is_latent = any("kv_b_proj" in name for name in weights)
    shape: Shape | LatentShape = LatentShape(**sizes) if is_latent else Shape(**sizes)
    # mlx keeps a convolution's channels last.
    stored = {
        f"model.{name}": weight.transpose(1, 2) if weight.ndim == 3 else weight for name, weight in weights.items()
    }
    if is_latent:  # whose file in mlx-lm ties no weights
        stored["lm_head.weight"] = weights["embed_tokens.weight"].clone()
    half = {name: weight.detach().to(torch.bfloat16).contiguous() for name, weight in stored.items()}
    save_file(half, folder / "model.safetensors", metadata={"format": "mlx"})
    config = {
        **(LATENT if is_latent else HYBRID),
        **asdict(shape),
        "max_position_embeddings": positions,
        "attention_bias": False,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "bos_token_id": None,
        "eos_token_id": [2, 0],
        "pad_token_id": 0,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    for name in TOKENIZER:
        shutil.copyfile(tokenizer / name, folder / name)


if __name__ == "__main__":
    export(*map(Path, sys.argv[1:4]), positions=4096)
