"""What a kernel reads is the cache's own memory: no step copies the body, or what lies beside it, to hand it over.

mlx copies nothing (`ensure_row_contiguous=False`); here the addresses show that neither wrappers nor the cache do.
"""

from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import mlx.core as mx
import numpy as np
import pytest
from kernel_cases import random
from mlx_lm.generate import generate_step
from simulated import simulated

from mlx_tq.cache import CompressedKVCache
from mlx_tq.cache.factory import compressed_caches
from mlx_tq.cache.spec import CacheSpec
from mlx_tq.config import BLOCK, EvictConfig, KVConfig
from mlx_tq.dispatch import attention, make_prompt_cache
from mlx_tq.haystack import load_text
from mlx_tq.kernels import build

DIM = 64
CONFIG = KVConfig(key="q8", value="tq4", prefix=8, window=8)


def address(array: mx.array) -> int:
    return np.array(array.view(mx.uint8), copy=False).ctypes.data


@contextmanager
def watched(see):
    """Call `see(kernel name, inputs by name)` before each kernel runs."""
    with simulated():
        run = build.run

        def seen(kernel, *, inputs, **call):
            see(kernel.name, dict(zip(kernel.inputs, inputs, strict=True)))
            return run(kernel, inputs=inputs, **call)

        with mock.patch.object(build, "run", seen):
            yield


def some(tokens: int, seed: int = 0) -> tuple[mx.array, mx.array]:
    """Keys and values as models make them: transposed."""
    shape = (1, tokens, 2, DIM)
    return random(shape, "float16", seed).swapaxes(1, 2), random(shape, "float16", seed + 1).swapaxes(1, 2)


@pytest.mark.parametrize("length", [1, 3])
def test_steps_of_a_cache(length):
    """Also those in which a block is packed."""
    cache = CompressedKVCache(CacheSpec.for_layer(CONFIG, 0, CONFIG.key, CONFIG.value))
    cache.append(*some(100))
    started, calls = cache.body_tokens, []
    queries = random((1, length, 4, DIM), "float16", 2).swapaxes(1, 2)

    def see(name, inputs):
        calls.append((name.removesuffix("_short"), {n: address(x) for n, x in inputs.items()}))

    with watched(see):
        while cache.body_tokens < started + 2 * BLOCK:
            before, packed = [address(x) for x in cache._full], cache.body_tokens
            calls.clear()
            cache.append(*some(length)).attend(queries, 0.1, "causal", None)
            found = {}
            for name, places in calls:
                found.setdefault(name, places)  # the last tokens' attention comes second, where a block comes between
                found[f"last {name}"] = places
            assert found["last attend"]["packed_rows"] == address(cache._rows)
            assert found["last attend"]["full_keys"] == address(cache._full[0])
            assert found["last attend"]["full_values"] == address(cache._full[1])
            assert ("encode" in found) == (cache.body_tokens > packed)
            if "encode" in found:
                behind_prefix = 2 * CONFIG.prefix * DIM
                assert found["encode"]["keys"] == before[0] + behind_prefix
                assert found["encode"]["values"] == before[1] + behind_prefix


def test_a_generation_with_eviction(embedded):
    """Every kernel that reads packed rows reads those of a cache."""
    model, tokenizer = embedded
    config = replace(CONFIG, evict=EvictConfig(policy="knorm", budget=64, trigger=8))
    caches, read = make_prompt_cache(model, config), set()

    def see(name, inputs):
        if "packed_rows" in inputs:
            read.add(name.removesuffix("_short"))
            own = {address(cache._rows) for cache in compressed_caches(caches)}
            assert address(inputs["packed_rows"]) in own, name

    ids = mx.array(tokenizer.encode(load_text()[:600])[:120])
    with attention(model), watched(see):
        list(generate_step(ids, model, prompt_cache=caches, max_tokens=2, prefill_step_size=40))
    assert read >= {"attend", "dequantize", "compact"}
