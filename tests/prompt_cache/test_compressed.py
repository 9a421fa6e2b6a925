"""One way to begin: what `compressed` and `make_prompt_cache` take, and what they say of what they do not."""

import re
import warnings

import mlx.core as mx
import mlx_lm
import pytest
import zoo
from mlx_lm.models.cache import KVCache
from mlx_lm.models.cache import make_prompt_cache as mlx_lm_cache

from mlx_tq import EvictConfig, KVConfig, Session, compressed, compressed_attention, make_prompt_cache
from mlx_tq.config import PROFILES
from mlx_tq.errors import CacheFormatError, ConfigError, UncalibratedWarning
from prompt_cache.driving import MODEL

PROMPT = "The sky is blue. " * 40


def kinds(caches):
    """The formats and window of compressed caches, and the classes of others."""
    return {(c.spec.key, c.spec.value, c.spec.window) if hasattr(c, "spec") else type(c) for c in caches}


def served():
    return kinds(mlx_lm_cache(MODEL))


@pytest.mark.parametrize(
    ("config", "settings", "wanted"),
    [
        (None, {"key": "tq3", "value": "turbo2", "window": 40}, {("tq3", "tq2", 40)}),
        (None, {"window": 40}, {("q8", "tq4", 40)}),
        (KVConfig(key="tq3", window=40), {}, {("tq3", "tq4", 40)}),
        (None, {}, {("q8", "tq4", 128)}),
        (None, {"profile": "small"}, {("stcq4", "tq4", 128)}),
        (None, {"profile": "small", "value": "tq3", "window": 40}, {("stcq4", "tq3", 40)}),
        (None, {"profile": "off"}, {KVCache}),
        (PROFILES["off"], {}, {KVCache}),
        (None, {"key": "fp16", "value": "fp16"}, {KVCache}),
    ],
)
def test_a_configuration_or_its_settings(config, settings, wanted):
    with compressed(MODEL, config, **settings):
        assert served() == wanted
    assert served() == {KVCache}
    assert kinds(make_prompt_cache(MODEL, config, **settings)) == wanted
    with compressed(MODEL, sinks=4, window=24, evict=EvictConfig("knorm:granularity=1", 60)):
        assert all(cache.group is not None for cache in mlx_lm_cache(MODEL))


@pytest.mark.parametrize(
    ("config", "settings", "message"),
    [
        (KVConfig(), {"key": "q8"}, r"both a config and key were given\. Give one of them, or dataclasses\.replace"),
        (KVConfig(), {"profile": "small"}, r"both a config and profile were given\. Give one of them"),
        (None, {"profile": "balance"}, r"profile 'balance' is unknown; valid are off, .* Did you mean balanced\?"),
        (None, {"profile": 4}, "profile 4 is unknown; valid are off, "),
        (None, {"key": "q9"}, "format 'q9' is unknown"),
        (None, {"window": -1}, "window is -1; it must be 0 or more"),
        ("small", {}, r"config is 'small'; it must be a KVConfig, such as mlx_tq\.KVConfig\.from_profile\('small'\)"),
        ({"key": "q8"}, {}, r"it must be a KVConfig, such as mlx_tq\.KVConfig"),
        (4, {}, r"it must be a KVConfig, such as mlx_tq\.KVConfig"),
    ],
)
def test_what_cannot_be_met(config, settings, message):
    with pytest.raises(ConfigError, match=message), compressed(MODEL, config, **settings):
        raise AssertionError
    with pytest.raises(ConfigError, match=message):
        make_prompt_cache(MODEL, config, **settings)
    assert served() == {KVCache}
    for none in (lambda: make_prompt_cache(None), compressed(None).__enter__, compressed_attention(None).__enter__):
        with pytest.raises(ConfigError, match=r"model is None; it must be a model of mlx-lm, as `mlx_tq\.load"):
            none()


@pytest.mark.full
def test_caches_that_are_passed_in_keep_their_configuration(embedded):
    """In either context; only `compressed` changes the caches that mlx-lm makes."""
    model, tokenizer = embedded
    logits = []
    for context, made in ((compressed, {("q8", "tq4", 128)}), (compressed_attention, {KVCache})):
        cache = make_prompt_cache(model, profile="small", sinks=0, window=16)
        with context(model):
            assert kinds(mlx_lm_cache(model)) == made
            for reply in mlx_lm.stream_generate(model, tokenizer, PROMPT, max_tokens=2, prompt_cache=cache):
                logits.append(reply.logprobs)
        assert kinds(cache) == {("stcq4", "tq4", 16)}
    with compressed_attention(model):
        native = next(mlx_lm.stream_generate(model, tokenizer, PROMPT, prompt_cache=mlx_lm_cache(model))).logprobs
    assert len(logits) == 4
    assert mx.array_equal(mx.stack(logits[:2]), mx.stack(logits[2:]))
    assert not mx.array_equal(logits[0], native)


def test_a_size_of_mlx_lms_own_rotating_caches_is_refused(embedded):
    """mlx-lm drops it silently where a model makes its own caches. Other models, and whoever sets none, are served."""
    model, tokenizer = embedded
    sized = {"max_tokens": 2, "max_kv_size": 64}
    with compressed(model, KVConfig()):
        with pytest.raises(ConfigError, match=r"max_kv_size is 64, .* KVConfig\(evict=.*budget=64"):
            mlx_lm.generate(model, tokenizer, "Hello", **sized)
        assert mlx_lm.models.cache.make_prompt_cache(MODEL, 64)
        assert mlx_lm.generate(model, tokenizer, "Hello", max_tokens=2)
    assert mlx_lm.generate(model, tokenizer, "Hello", **sized)
    assert mlx_lm.models.cache.make_prompt_cache is mlx_lm_cache


@pytest.mark.parametrize("evict", [None, EvictConfig("knorm:granularity=1", 300)])
@pytest.mark.parametrize("stored", [40, 400])
def test_a_cache_of_another_model(stored, evict):
    """Of another head size, of another number of layers; the model's own is served as before."""
    tokens = mx.arange(40)[None]
    models = {name: zoo.build(name) for name in ("llama", "qwen3", "smollm3")}
    for name in models:
        cache = make_prompt_cache(models[name], KVConfig(evict=evict))
        with compressed_attention(models[name]):
            mx.eval(models[name](mx.arange(stored)[None] % 160, cache=cache))
        for other in models:
            with compressed_attention(models[other]):
                if other == name:
                    mx.eval(models[other](tokens, cache=cache))
                    continue
                with pytest.raises(CacheFormatError, match=f"is of another model than this {other}: .*Make a new one"):
                    models[other](tokens, cache=cache)


def test_eviction_without_a_calibration_warns(embedded):
    """At the caller's line; not with a policy that needs none, nor with one that was told to learn from the prompt."""
    evicts = KVConfig(evict=EvictConfig("triattention"))

    def caught(run):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            run()
        assert {warning.filename for warning in found} <= {__file__}
        return [str(warning.message) for warning in found if warning.category is UncalibratedWarning]

    def enter():
        with compressed(MODEL, evicts):
            pass

    expected = r"triattention finds no calibration of llama: .* before 1,\d+ tokens, .* Run mlx_tq.calibrate with"
    for run in (enter, lambda: make_prompt_cache(MODEL, evicts)):
        (message,) = caught(run)
        assert re.match(expected, message)
    for policy in ("knorm", "triattention:calibration=text"):
        assert caught(lambda policy=policy: make_prompt_cache(MODEL, KVConfig(evict=EvictConfig(policy)))) == []
    model, tokenizer = embedded
    assert caught(lambda: Session(model, tokenizer, evicts).close()) == []  # it comes with one
    assert (
        len(caught(lambda: Session(model, tokenizer, KVConfig(evict=EvictConfig("expected_attention"))).close())) == 1
    )
