"""The zoo's models are alive, and have the caches that it declares."""

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from zoo import ARCHITECTURES, build

LETTERS = {"KVCache": "K", "RotatingKVCache": "R", "ArraysCache": "A", "CacheList": "L"}
PROMPT = [(7 * i * i + 3 * i) % 160 for i in range(24)]  # longer than the zoo's sliding windows of 16


def last_logits(model, tokens):
    """Prefill in two chunks, then one step of decoding, through mlx-lm's default cache."""
    cache = make_prompt_cache(model)
    for chunk in (tokens[:20], tokens[20:-1], tokens[-1:]):
        logits = model(mx.array([chunk]), cache=cache)
    return logits[0, -1].astype(mx.float32)


@pytest.mark.parametrize("name", [name for name, arch in ARCHITECTURES.items() if arch.buildable])
def test_a_model_is_alive_and_of_its_seed(name):
    model = build(name)
    assert "".join(LETTERS[type(entry).__name__] for entry in make_prompt_cache(model)) == ARCHITECTURES[name].layers
    logits = last_logits(model, PROMPT)
    assert mx.isfinite(logits).all()
    assert 0.1 < logits.std() < 5
    if ARCHITECTURES[name].plain_layers:  # a recurrent state forgets
        changed = last_logits(model, [*PROMPT[:3], PROMPT[3] + 1, *PROMPT[4:]])
        assert mx.abs(changed - logits).max() > 0.05
    first, again, other = (dict(tree_flatten(each.parameters())) for each in (model, build(name), build(name, seed=2)))
    assert all(mx.array_equal(first[key], again[key]) for key in first)
    assert not all(mx.array_equal(first[key], other[key]) for key in first)


def test_unbuildable_says_why():
    with pytest.raises(ValueError, match="ai2-olmo"):
        build("olmo")
