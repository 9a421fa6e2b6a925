"""Make a folder with a random model that reads long prompts: 2 layers, 131,072 positions, SmolLM2's tokenizer.

python -m benchmarks.models.random_long FOLDER
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models import llama

from mlx_tq.models import load

SHAPE = {
    "model_type": "llama",
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 131_072,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
}


def make(folder: Path) -> None:
    """Write config, weights in float32 and tokenizer."""
    _, tokenizer = load("smollm2")
    tokenizer.save_pretrained(folder)
    args = llama.ModelArgs(**SHAPE, vocab_size=len(tokenizer.get_vocab()))
    mx.random.seed(0)
    model = llama.Model(args)
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())), {"format": "mlx"})
    config = {**asdict(args), "architectures": ["LlamaForCausalLM"], "eos_token_id": tokenizer.eos_token_id}
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    make(Path(sys.argv[1]))
