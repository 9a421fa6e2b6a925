"""A decode step under `mx.compile`, the cache's state in and out: what mlx-lm's own cache allows, ours does.

The length of either is an int, so each length is a graph of its own: `mx.compile` gains nothing, but it may be tried.
"""

import mlx.core as mx
import pytest
from zoo import build

from mlx_tq import KVConfig, compressed_attention, make_prompt_cache
from mlx_tq.cache.region_map import SCALE_READY
from mlx_tq.config import BLOCK, PROFILES

pytestmark = pytest.mark.usefixtures("compiled")

# The steps pack what the prompt could not yet; few, as mlx's CPU calls a C++ compiler for every graph.
PLAIN = KVConfig(key="q8", value="q8", sinks=8, window=8, normalize=False)
PACKED, CODED = (KVConfig(key="q8", value=value, sinks=8, window=8) for value in ("q8", "tq4"))


def arrays(state):
    """The arrays of the caches' states, which also have numbers and text."""
    parts = [each.values() if isinstance(each, dict) else each for each in state]
    return [[part for part in each if isinstance(part, mx.array)] for each in parts]


@pytest.mark.parametrize(
    ("config", "prompt", "steps"),
    [
        pytest.param(PLAIN, 103, 1, id="plain"),
        *(
            pytest.param(config, SCALE_READY - 1, 2, marks=pytest.mark.full, id=name)
            for name, config in (("off", PROFILES["off"]), ("packed", PACKED), ("coded", CODED))
        ),
    ],
)
def test_a_step_compiles_once_a_length(config, prompt, steps):
    """Also where statistics are gathered and blocks are packed."""
    model, traced = build("llama"), []
    model.model.layers = model.model.layers[:1]
    ids = [(7 * i * i + 3 * i) % 160 for i in range(prompt + steps)]
    caches = make_prompt_cache(model, config)
    kinds = [type(cache) for cache in caches]

    @mx.compile
    def step(token, state):
        traced.append(state[0])
        restored = [kind.from_state(parts) for kind, parts in zip(kinds, state, strict=True)]
        return model(token, cache=restored), arrays(cache.state for cache in restored)

    with compressed_attention(model):
        model(mx.array(ids[:prompt])[None], cache=caches)
        packed = 0 if config.is_off else caches[0].packed_tokens
        for number, token in enumerate(ids[prompt:], start=1):
            state, token = [cache.state for cache in caches], mx.array([[token]])
            compiled = [step(token, state) for _ in range(2)]
            assert len(traced) == number
            logits, after = model(token, cache=caches), arrays(cache.state for cache in caches)
            for found_logits, found in compiled:
                assert mx.allclose(found_logits, logits, rtol=1e-3, atol=1e-3)
                assert [[x.shape for x in parts] for parts in found] == [[x.shape for x in parts] for parts in after]
    if not config.is_off:
        assert caches[0].packed_tokens >= max(2 * BLOCK, packed + BLOCK)
