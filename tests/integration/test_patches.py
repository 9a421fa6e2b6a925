"""Patches of attention and of the cache factory: nested, across threads, and restored exactly afterwards."""

import gc
import sys
import threading
from contextlib import ExitStack
from importlib import import_module
from types import ModuleType

import mlx.core as mx
import pytest
from mlx_lm.models import base
from mlx_lm.models.cache import KVCache
from mlx_lm.models.cache import make_prompt_cache as mlx_lm_cache
from zoo import build

from mlx_tq.cache.layer import CompressedKVCache
from mlx_tq.config import KVConfig
from mlx_tq.errors import ConfigError, UnsupportedModelError
from mlx_tq.integration.patches import Patched, scaled_dot_product_attention
from mlx_tq.prompt_cache.compressed import compressed, compressed_attention, make_prompt_cache

NAME = "scaled_dot_product_attention"
ORIGINAL = base.scaled_dot_product_attention
SMALL = KVConfig(key="tq4", value="tq4", sinks=4, window=24)
OTHER = KVConfig(key="q8", value="q8", sinks=4, window=24)


def bindings():
    """Return the function of this name in every module that has one."""
    return {name: module.__dict__[NAME] for name, module in sys.modules.copy().items() if NAME in vars(module)}


@pytest.fixture(autouse=True)
def check_restored():
    """Check that the test leaves all bindings as they were."""
    build("llama")
    before = bindings()
    assert before["mlx_lm.models.base"] is before["mlx_lm.models.llama"] is ORIGINAL
    yield
    after = bindings()
    assert {name: after[name] for name in before} == before
    assert all(after[name] is ORIGINAL for name in after if name.startswith("mlx_lm"))


def is_patched():
    patched = [name for name, function in bindings().items() if function is scaled_dot_product_attention]
    return "mlx_lm.models.base" in patched and "mlx_lm.models.llama" in patched


def cache_kinds(model):
    """Return the key formats of the compressed caches that mlx-lm makes now, and the classes of its own."""
    return {cache.spec.key if isinstance(cache, CompressedKVCache) else type(cache) for cache in mlx_lm_cache(model)}


def test_bindings_are_restored_after_an_exception_and_after_a_refusal():
    model = build("llama")
    assert not is_patched()
    with ExitStack() as stack:
        stack.enter_context(pytest.raises(ValueError, match="indices with invalid dtype"))
        stack.enter_context(compressed(model, SMALL))
        assert is_patched()
        assert all(bound is not ORIGINAL for name, bound in bindings().items() if name.startswith("mlx_lm.models."))
        model(mx.array([[0.5]]), cache=mlx_lm_cache(model))
    refused = build("gemma2")
    with pytest.raises(UnsupportedModelError), compressed(refused, SMALL):
        raise AssertionError
    with pytest.raises(ConfigError), compressed(refused, KVConfig(key="q9")):
        raise AssertionError
    assert not is_patched()
    assert "make_cache" not in {**vars(model), **vars(refused)}


def test_make_cache_of_an_instance_or_a_class_is_restored():
    model, other = build("llama"), build("gemma3_text")
    model.make_cache = make_cache = lambda: [KVCache(), KVCache()]
    before = [type(cache) for cache in mlx_lm_cache(other)]
    with compressed(model, SMALL), compressed(other, SMALL):
        assert cache_kinds(model) == {"tq4"}
        assert CompressedKVCache in [type(cache) for cache in mlx_lm_cache(other)]
    assert model.make_cache is make_cache
    assert "make_cache" not in vars(other)
    assert [type(cache) for cache in mlx_lm_cache(other)] == before


def test_what_was_deleted_inside_the_context_is_restored():
    model = build("llama")
    with compressed(model, SMALL):
        del model.make_cache
        assert cache_kinds(model) == {KVCache}
    assert "make_cache" not in vars(model)
    assert cache_kinds(model) == {KVCache}
    model.make_cache = make_cache = lambda: [KVCache(), KVCache()]
    with compressed(model, SMALL):
        del model.make_cache
    assert model.make_cache is make_cache


def test_a_module_that_is_imported_inside_the_context_is_patched_and_restored():
    name = "mlx_lm.models.gemma"
    sys.modules.pop(name, None)
    with compressed_attention(build("llama")):
        module = import_module(name)
        assert vars(module)[NAME] is scaled_dot_product_attention
    assert vars(module)[NAME] is ORIGINAL


def test_the_garbage_collector_may_import_modules_meanwhile(monkeypatch):
    collections = []

    def import_one(phase, info):
        collections.append(info)
        monkeypatch.setitem(sys.modules, f"imported_{len(collections)}", ModuleType("imported"))

    threshold = gc.get_threshold()
    gc.callbacks.append(import_one)
    gc.set_threshold(1)
    try:
        with compressed_attention(build("llama")):
            assert is_patched()
    finally:
        gc.callbacks.remove(import_one)
        gc.set_threshold(*threshold)
    assert collections


def test_contexts_nest():
    model, other = build("llama"), build("qwen3")
    with compressed(model, SMALL):
        with compressed_attention(other):
            assert is_patched()
            assert cache_kinds(other) == {KVCache}
        with compressed(model, OTHER):
            assert cache_kinds(model) == {"q8"}
        assert is_patched()
        assert cache_kinds(model) == {"tq4"}
    assert not is_patched()
    assert cache_kinds(model) == {KVCache}


@pytest.mark.parametrize("first_out", [0, 1])
def test_contexts_of_two_threads_end_in_any_order(first_out):
    model, seen = build("llama"), []
    entered, leave = ([threading.Event() for _ in range(2)] for _ in range(2))

    def work(turn, config):
        with compressed(model, config):
            entered[turn].set()
            assert leave[turn].wait(timeout=60)

    threads = [threading.Thread(target=work, args=pair) for pair in enumerate((SMALL, OTHER))]
    for thread, event in zip(threads, entered, strict=True):
        thread.start()
        assert event.wait(timeout=60)
    for turn in (first_out, 1 - first_out):
        assert is_patched()
        seen.append(cache_kinds(model))
        leave[turn].set()
        threads[turn].join(timeout=60)
    assert seen == [{"q8"}, {"tq4"} if first_out == 1 else {"q8"}]
    assert not is_patched()
    assert "make_cache" not in vars(model)


def test_equal_values_are_distinct_contexts():
    """The newest open context counts, also if an older one has an equal value."""
    undone = []
    patched, target = Patched(lambda target: lambda: undone.append(target)), object()
    outer, middle, inner = (patched.open(target, value) for value in (1, 2, 1))
    with outer:
        with middle:
            with inner:
                assert patched.newest(target) == 1
            assert patched.newest(target) == 2
        assert not undone
    assert undone == [target]
    assert patched.newest(target) is None


def test_arrays_are_passed_to_mlx_lm():
    queries, keys, values = (mx.random.normal((1, 2, 5, 64)) for _ in range(3))
    arguments = {"cache": None, "scale": 0.125, "mask": "causal", "sinks": mx.array([0.5, 1.0])}
    result = scaled_dot_product_attention(queries, keys, values, **arguments)
    assert mx.array_equal(result, ORIGINAL(queries, keys, values, **arguments))


def test_a_compressed_cache_outside_the_context_is_refused():
    model = build("llama")
    caches = make_prompt_cache(model, SMALL)
    with pytest.raises(ConfigError, match=r"outside of its attention. Run the model inside `with mlx_tq\.compressed"):
        model(mx.array([[1, 2, 3]]), cache=caches)
    assert caches[0].offset == 0


@pytest.mark.parametrize("place", ["mlx_lm.models.llama", "mlx_lm.models.base"])
def test_another_library_that_replaces_attention_meanwhile_is_named(place, monkeypatch):
    """One that calls the function before it is none of our business."""
    model, ids = build("llama"), mx.array([[5, 6, 7]])

    def wrapping(*args, **options):
        return scaled_dot_product_attention(*args, **options)

    def replacing(queries, keys, values, cache, scale, mask, sinks=None):
        return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask)

    with compressed(model, SMALL):
        for function in (wrapping, replacing):
            function.__module__ = "other_library"
        monkeypatch.setattr(f"{place}.{NAME}", wrapping)
        expected = model(ids, cache=mlx_lm_cache(model))
        monkeypatch.setattr(f"mlx_lm.models.llama.{NAME}", replacing)
        with pytest.raises(UnsupportedModelError, match=f"other_library has replaced mlx_lm.models.llama.{NAME}, and"):
            model(ids, cache=mlx_lm_cache(model))
        monkeypatch.setattr(f"mlx_lm.models.llama.{NAME}", ORIGINAL)  # restored by what had replaced it before
        with pytest.raises(UnsupportedModelError, match=f"has replaced mlx_lm.models.llama.{NAME}, and"):
            model(ids, cache=mlx_lm_cache(model))
        monkeypatch.undo()
        assert mx.array_equal(model(ids, cache=mlx_lm_cache(model)), expected)
