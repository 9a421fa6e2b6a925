"""What an answer says about the layers that stayed in full precision."""

import mlx.core as mx
import pytest
from zoo import build

from mlx_tq.config import KVConfig
from mlx_tq.kernels import backend, execution_record
from mlx_tq.prompt_cache.compressed import compressed_attention, make_prompt_cache, plan_caches
from mlx_tq.prompt_cache.run_summary import RunSummary

CONFIG = KVConfig(key="tq4", value="tq4", sinks=4, window=24)
INDEX = (
    "the model computes with its keys (minimax_m3_vl.py: scores = q.astype(mx.float32) @ "
    "k.astype(mx.float32).swapaxes(-1, -2))"
)


@pytest.mark.parametrize(
    ("name", "config", "tokens", "kept"),
    [
        ("llama", CONFIG, 200, "no layer"),
        ("llama", CONFIG, 40, "layers 0-1 (compression starts at 152 tokens)"),
        ("smollm3", KVConfig(key="fp16", value="tq4"), 500, "layers 0-3 (the format of keys is fp16)"),
        ("gemma3_text", CONFIG, 200, "layers 0, 2 (RotatingKVCache, not a plain KV cache)"),
        ("qwen3_5", CONFIG, 200, "layers 0, 2 (ArraysCache, not a plain KV cache)"),
        ("minimax_m3_vl", CONFIG, 200, f"layers 1-2 (part 1 of their caches: {INDEX})"),
    ],
)
def test_layers_in_full_precision_have_a_reason(name, config, tokens, kept):
    execution_record.clear()
    with backend.using("reference"):
        summary = RunSummary.of(plan_caches(build(name), config), tokens)
    assert str(summary) == f"ran on reference implementation (chosen); in full precision: {kept}"


def test_phases_are_those_of_the_passes():
    """A long pass is a part of a prompt, a short one attends to packed rows, and so does one token."""
    model = build("llama")
    caches = make_prompt_cache(model, CONFIG)
    with backend.using("reference"), compressed_attention(model):
        execution_record.clear()
        for length in (200, 40, 4, 1):
            mx.eval(model(mx.ones((1, length), mx.int32), cache=caches))
        phases = RunSummary.of(plan_caches(model, CONFIG), 245).phases
    attend = ["reference attend"]
    decode = ["mlx attention", "reference wht", "reference dequantize"]
    assert phases == {"prefill": decode, "short passes": attend, "decode": attend}
