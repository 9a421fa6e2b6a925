"""What fits into a memory, against the bytes of caches that were filled."""

import mlx.core as mx
import pytest
from zoo import build

from mlx_tq import compressed_attention, make_prompt_cache
from mlx_tq.config import PROFILES
from mlx_tq.prompt_cache.memory import (
    PREFILL_STEP,
    capacities,
    other_bytes,
    sequence_bytes,
    transient_bytes,
    weights_nbytes,
)

TOKENS = 320


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_next", "falcon_h1", "minimax_m3_vl"])
@pytest.mark.parametrize("profile", ["off", "small"])
def test_bytes_are_those_of_filled_caches(name, profile):
    """Plain caches, sliding windows and states whose size never changes."""
    model, config = build(name), PROFILES[profile]
    caches = make_prompt_cache(model, config)
    with compressed_attention(model):
        for size in [64] * (TOKENS // 64 - 1) + [63, 1]:  # a sliding window is whole again once an answer begins
            mx.eval(model(mx.arange(size)[None], cache=caches))
    held = sum(cache.nbytes for cache in caches)
    assert held <= sequence_bytes(model, config, other_bytes(model))(TOKENS) <= 1.05 * held


def test_the_longest_context_fits_and_one_token_more_does_not():
    model = build("llama")
    count = sequence_bytes(model, PROFILES["small"], other_bytes(model))
    transient = transient_bytes(model, PROFILES["small"], PREFILL_STEP)
    available = count(300) + transient(300)
    (found,) = capacities(model, {"small": PROFILES["small"]}, available, contexts=[100, 300], streams=[1, 2])
    assert found.nbytes == {100: count(100), 300: count(300)}
    assert found.streams == {100: (available - transient(100)) // count(100), 300: 1}
    for together, longest in found.longest.items():
        fits, exceeds = (together * count(n) + transient(n) for n in (longest, longest + 1))
        assert fits <= available < exceeds


def test_nothing_fits():
    model = build("llama")
    (found,) = capacities(model, {"off": PROFILES["off"]}, 10, contexts=[64], streams=[1])
    assert (found.longest, found.streams) == ({1: 0}, {64: 0})


def test_bytes_of_weights():
    model = build("llama")
    assert weights_nbytes(model) == sum(leaf.nbytes for leaf in _leaves(model.parameters()))


def _leaves(tree):
    if isinstance(tree, mx.array):
        return [tree]
    return [leaf for part in (tree.values() if isinstance(tree, dict) else tree) for leaf in _leaves(part)]
