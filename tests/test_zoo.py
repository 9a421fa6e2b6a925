"""The zoo's models are alive, and the facts it declares about mlx-lm's attention are what running them shows."""

import sys
from dataclasses import dataclass, field

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import base
from mlx_lm.models.cache import CacheList, KVCache, make_prompt_cache
from zoo import ARCHITECTURES, build

BUILDABLE = [name for name, arch in ARCHITECTURES.items() if arch.buildable]
SERVABLE = [name for name, arch in ARCHITECTURES.items() if arch.servable]
REFUSED = [name for name in BUILDABLE if name not in SERVABLE]
LETTERS = {"KVCache": "K", "RotatingKVCache": "R", "ArraysCache": "A", "CacheList": "L"}
PROMPT = [(7 * i * i + 3 * i) % 160 for i in range(24)]  # longer than the zoo's sliding windows of 16


def last_logits(model, tokens):
    """Prefill in two chunks, then one step of decoding, through mlx-lm's default cache."""
    cache = make_prompt_cache(model)
    for chunk in (tokens[:20], tokens[20:-1], tokens[-1:]):
        logits = model(mx.array([chunk]), cache=cache)
    return logits[0, -1].astype(mx.float32)


@pytest.mark.parametrize("name", BUILDABLE)
def test_model_is_alive(name):
    model = build(name)
    logits = last_logits(model, PROMPT)
    assert mx.isfinite(logits).all()
    assert 0.1 < logits.std() < 5
    if ARCHITECTURES[name].plain_layers:  # a recurrent state forgets
        changed = last_logits(model, [*PROMPT[:3], PROMPT[3] + 1, *PROMPT[4:]])
        assert mx.abs(changed - logits).max() > 0.05


@pytest.mark.parametrize("name", BUILDABLE)
def test_seed_decides_weights(name):
    first, again, other = (dict(tree_flatten(build(name, seed=seed).parameters())) for seed in (1, 1, 2))
    assert all(mx.array_equal(first[key], again[key]) for key in first)
    assert not all(mx.array_equal(first[key], other[key]) for key in first)


@pytest.mark.parametrize("name", BUILDABLE)
def test_cache_layers(name):
    cache = make_prompt_cache(build(name))
    assert "".join(LETTERS[type(entry).__name__] for entry in cache) == ARCHITECTURES[name].layers


@pytest.mark.parametrize("name", [name for name in BUILDABLE if not ARCHITECTURES[name].sparse])
def test_bfloat16(name):
    assert mx.isfinite(last_logits(build(name, mx.bfloat16), PROMPT)).all()


def test_unbuildable_says_why():
    with pytest.raises(ValueError, match="ai2-olmo"):
        build("olmo")


@dataclass
class Seen:
    """What a run showed of the layers with a plain KVCache."""

    masks: list = field(default_factory=list)  # made by the caches
    rotated: list = field(default_factory=list)  # what rope returned
    uses: set = field(default_factory=set)  # attributes read on a fetched array
    calls: list = field(default_factory=list)  # (keyword arguments, queries, keys, values) of attention


class Handle:
    """Stands for a fetched array: mlx cannot take it, and each attribute that a model reads is noted."""

    def __init__(self, fetched, seen):
        self._fetched, self._seen = fetched, seen

    def __getattr__(self, name):
        self._seen.uses.add(name)
        return getattr(self._fetched, name)


class SpyCache(KVCache):
    """A KVCache that hands out handles."""

    def __init__(self, seen):
        super().__init__()
        self.seen = seen

    def keys_and_values(self):
        return tuple(Handle(fetched, self.seen) for fetched in super().keys_and_values())

    def make_mask(self, *args, **kwargs):
        self.seen.masks.append(super().make_mask(*args, **kwargs))
        return self.seen.masks[-1]


def observe(name, seen, monkeypatch):
    """Prefill and decode with handles instead of fetched arrays; attention is the one place that opens them."""
    model, real = build(name), base.scaled_dot_product_attention

    def attention(queries, keys, values, cache, scale, mask, sinks=None):
        if isinstance(values, Handle):
            seen.calls.append({"q": queries, "v": values, "cache": cache, "mask": mask, "sinks": sinks})
            keys, values = (x._fetched if isinstance(x, Handle) else x for x in (keys, values))
            seen.calls[-1]["dims"] = keys.shape[-1], values.shape[-1]
        return real(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks)

    for module in [m for key, m in sys.modules.items() if key.startswith("mlx_lm.models.")]:
        if getattr(module, "scaled_dot_product_attention", None) is real:
            monkeypatch.setattr(module, "scaled_dot_product_attention", attention)

    def tapped(rope):
        return lambda *args, **kwargs: seen.rotated.append(rope(*args, **kwargs)) or seen.rotated[-1]

    for _, layer in model.named_modules():
        if "rope" in layer:
            layer.rope = tapped(layer.rope)

    def spied(entry):
        if isinstance(entry, CacheList):
            return CacheList(*map(spied, entry.caches))
        return SpyCache(seen) if type(entry) is KVCache else entry

    cache = [spied(entry) for entry in make_prompt_cache(model)]
    for chunk in (PROMPT[:-1], PROMPT[-1:]):
        mx.eval(model(mx.array([chunk]), cache=cache))


def kind(mask):
    return "array" if isinstance(mask, mx.array) else mask


@pytest.mark.parametrize("name", SERVABLE)
def test_facts(name, monkeypatch):
    arch, seen = ARCHITECTURES[name], Seen()
    observe(name, seen, monkeypatch)
    fed = [call for call in seen.calls if call["cache"] is not None]
    assert len(fed) == 2 * arch.plain_layers
    assert len(seen.calls) - len(fed) == 2 * arch.shared
    assert {call["dims"] for call in seen.calls} == {arch.dims}
    assert {kind(call["mask"]) for call in seen.calls} == {arch.mask, None}
    assert all(any(call["mask"] is mask for mask in seen.masks) for call in seen.calls)
    assert {call["sinks"] is not None for call in seen.calls} == {arch.sinks}
    assert {any(call["q"] is out for out in seen.rotated) for call in seen.calls} == {arch.query == "rope"}
    assert seen.uses == set(arch.uses)


@pytest.mark.parametrize("name", REFUSED)
def test_refused_for_a_reason(name, monkeypatch):
    arch, seen = ARCHITECTURES[name], Seen()
    if arch.plain_layers:
        with pytest.raises(TypeError):
            observe(name, seen, monkeypatch)
        assert {kind(mask) for mask in seen.masks} == {arch.mask}
