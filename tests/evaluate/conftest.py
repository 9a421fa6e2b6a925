import mlx.core as mx
import pytest
from mlx_lm.models import llama


@pytest.fixture(scope="session")
def tiny():
    """A random model of two layers with the embedded model's vocabulary."""
    mx.random.seed(3)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96, "head_dim": 32, "vocab_size": 4096}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "max_position_embeddings": 4096}
    return llama.Model(llama.ModelArgs(model_type="llama", **sizes))
