"""The zoo's models compute with their context, and have the caches that it declares."""

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from zoo import ARCHITECTURES, architecture_files, build, cache_letters

PROMPT = [(7 * i * i + 3 * i) % 160 for i in range(24)]  # longer than the zoo's sliding windows of 16


def last_logits(model, tokens):
    """Return logits after a prefill in two chunks and one decode step, with mlx-lm's default cache."""
    cache = make_prompt_cache(model)
    for chunk in (tokens[:20], tokens[20:-1], tokens[-1:]):
        logits = model(mx.array([chunk]), cache=cache)
    return logits[0, -1, :160].astype(mx.float32)  # phi3small forbids tokens of its larger vocabulary


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name, arch in ARCHITECTURES.items() if arch.buildable])
def test_a_model_uses_its_context_and_depends_on_its_seed(name):
    model = build(name)
    assert "".join(map(cache_letters, make_prompt_cache(model))) == ARCHITECTURES[name].layers
    logits = last_logits(model, PROMPT)
    assert mx.isfinite(logits).all()
    assert 0.1 < logits.std() < 5
    if ARCHITECTURES[name].plain_layers:  # a recurrent state forgets
        changed = last_logits(model, [*PROMPT[:3], PROMPT[3] + 1, *PROMPT[4:]])
        assert mx.abs(changed - logits).max() > 0.02
    models = model, build(name), build(name, seed=2)
    first, same, other = (dict(tree_flatten(built.parameters())) for built in models)
    assert all(mx.array_equal(first[key], same[key]) for key in first)
    assert not all(mx.array_equal(first[key], other[key]) for key in first)


def test_every_architecture_file_of_mlx_lm_has_a_model():
    assert not set(architecture_files()) - {arch.file for arch in ARCHITECTURES.values()}


def test_an_architecture_that_cannot_be_built_raises_the_reason():
    with pytest.raises(ValueError, match="ai2-olmo"):
        build("olmo")
