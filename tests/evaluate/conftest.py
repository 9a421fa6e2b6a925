import mlx.core as mx
import pytest
from mlx_lm.models import llama

from mlx_tq.models import load


@pytest.fixture(scope="session")
def needle():
    """The embedded model and its tokenizer."""
    return load()


@pytest.fixture(scope="session")
def tiny():
    """A random model of two layers with the embedded model's vocabulary."""
    mx.random.seed(3)
    args = llama.ModelArgs(
        model_type="llama",
        hidden_size=64,
        num_hidden_layers=2,
        intermediate_size=96,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        rms_norm_eps=1e-5,
        vocab_size=4096,
        max_position_embeddings=4096,
    )
    return llama.Model(args)
