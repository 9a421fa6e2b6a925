"""A whole model on the simulator: every kernel serves, and the tokens are those of mlx's own operations."""

from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from statistics import mean
from unittest import mock

import mlx.core as mx
import numpy as np
import pytest
from cases import random
from mlx_lm.generate import generate_step
from simulated import simulated

from benchmarks.studies.layers import Side, measure_layers
from mlx_tq.cache.layer import CompressedKVCache
from mlx_tq.cache.spec import CacheSpec
from mlx_tq.config import BLOCK, EvictConfig, KVConfig
from mlx_tq.evaluate.arms import parse_arm
from mlx_tq.kernels import backend, build, thresholds
from mlx_tq.kernels.thresholds import KernelThresholds
from mlx_tq.models import load
from mlx_tq.prompt_cache.compressed import compressed, make_prompt_cache
from mlx_tq.prompt_cache.passes import compressed_caches

PROMPT, ANSWER = 216, 6
DIM, HEAVY = 128, 16 << 20
CONFIG = KVConfig(key="q8", value="tq4", sinks=8, window=8)
TEXT = "The access code of the north gate is 417295. The harbour is quiet at night, and the boats lie still. " * 6


def tokens_of(model, ids, caches):
    with compressed(model):
        steps = generate_step(ids, model, prompt_cache=caches, max_tokens=ANSWER, prefill_step_size=32)
        return [int(token) for token, _ in steps]


@contextmanager
def watched(see):
    """Call `see(kernel name, inputs by name)` before each kernel runs on the simulator."""
    with simulated():
        run = build.run

        def seen(kernel, *, inputs, **call):
            named = dict(zip([*kernel.inputs, *kernel.sources], inputs, strict=True))
            for name in kernel.sources:  # mlx would copy what is not contiguous
                assert np.array(named[name].view(mx.uint8), copy=False).flags.c_contiguous, name
            see(kernel.name, named)
            return run(kernel, inputs=inputs, **call)

        with mock.patch.object(build, "run", seen):
            yield


def address(array: mx.array) -> int:
    return np.array(array.view(mx.uint8), copy=False).ctypes.data


def test_a_generation_calls_the_kernels_and_says_the_same(embedded):
    model, tokenizer = embedded
    ids, layers, calls = mx.array(tokenizer.encode(TEXT)[:PROMPT]), len(model.layers), Counter()
    with backend.using("reference"):
        expected = tokens_of(model, ids, make_prompt_cache(model, CONFIG))
    with thresholds.using(KernelThresholds(short=ids.size + 2)), watched(lambda name, _: calls.update([name])):
        found = tokens_of(model, ids, make_prompt_cache(model, CONFIG))
    assert found == expected
    # The last three chunks before the last token leave blocks; the second and third of them attend to what is packed.
    assert calls["encode"] == 3 * layers
    assert calls["dequantize"] == 2 * layers
    assert calls["wht"] == (2 * 2 + 3) * layers  # queries, and the output; means that encode subtracts
    assert calls["attend_short"] == 3 * layers  # of the prompt's last token and two more
    assert calls["attend"] == calls["merge"] == (ANSWER - 2) * layers


def test_eviction_scores_and_compacts_with_kernels(embedded):
    """The tokens are the same; and every kernel that reads packed rows reads those of a cache, no copy."""
    model, tokenizer = embedded
    config = replace(CONFIG, evict=EvictConfig("triattention:warmup=32:trigger=8:granularity=1", 128, "off"))
    ids, read = mx.array(tokenizer.encode(TEXT)[:PROMPT]), Counter()
    with backend.using("reference"):
        expected = tokens_of(model, ids, make_prompt_cache(model, config))
    caches = make_prompt_cache(model, config)

    def see(name, inputs):
        if "packed_rows" in inputs:
            read[name.removesuffix("_short")] += 1
            own = {address(cache._body.arrays[-1]) for cache in compressed_caches(caches)}
            assert address(inputs["packed_rows"]) in own, name

    with watched(see):
        assert tokens_of(model, ids, caches) == expected
    assert read.keys() == {"attend", "dequantize", "score", "compact"}
    assert min(read.values()) >= len(model.layers)


def some(tokens: int, heads: int = 2) -> list[mx.array]:
    """Keys and values as models make them: transposed."""
    return [random((1, tokens, heads, DIM), seed=seed).swapaxes(1, 2) for seed in (0, 1)]


def cache_of(tokens: int) -> CompressedKVCache:
    """One that has learned from their queries by what to normalize keys."""
    cache = CompressedKVCache(CacheSpec.for_layer(CONFIG, 0, CONFIG.key, CONFIG.value))
    mx.eval(cache.append(*some(tokens)).attend(some(tokens, heads=4)[0], 0.1, "causal", None))
    return cache


@pytest.mark.parametrize("length", [1, 3])
def test_steps_read_the_caches_own_memory(length):
    """No step copies the body, or what lies beside it, to hand it over; nor one in which a block is packed.

    mlx copies nothing (`ensure_row_contiguous=False`); here the addresses show that neither wrappers nor the cache do.
    """
    cache = cache_of(180)
    started, calls, queries = cache.body_tokens, [], some(length, heads=4)[0]
    with watched(lambda name, inputs: calls.append((name, {n: address(x) for n, x in inputs.items()}))):
        while cache.body_tokens < started + 2 * BLOCK:
            before, packed = [address(x) for x in cache._full], cache.body_tokens
            calls.clear()
            cache.append(*some(length)).attend(queries, 0.1, "causal", None)
            found = {name.removesuffix("_short"): places for name, places in calls}  # of two attentions the last
            assert found["attend"]["packed_rows"] == address(cache._body.arrays[-1])
            assert found["attend"]["full_keys"] == address(cache._full[0])
            assert found["attend"]["full_values"] == address(cache._full[1])
            assert ("encode" in found) == (cache.body_tokens > packed)
            if "encode" in found:
                behind_prefix = 2 * CONFIG.sinks * DIM
                assert found["encode"]["keys"] == before[0] + behind_prefix
                assert found["encode"]["values"] == before[1] + behind_prefix


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.full)])
def test_layers_agree_with_mlx_operations(embedded, dtype):
    """Code for code and layer for layer: bf16 rounds what each path makes of the same sums, fp32 hides nothing."""
    model, tokenizer = embedded
    if dtype == "float32":
        model, _ = load()
        model.set_dtype(mx.float32)
    arm = parse_arm("tq4/tq4", sinks=8, window=8)
    with simulated() as counters:
        rows, _ = measure_layers(Side(model, arm), Side(model, arm, "reference"), tokenizer.encode(TEXT)[:184], step=8)
    assert len(counters) > 2 * len(rows)
    assert len(rows) == len(model.layers)
    assert min(row.least for row in rows) >= 0.9999
    assert (rows[0].keys, rows[0].values) == (100, 100)  # the same inputs
    shares = [share for row in rows for share in (row.keys, row.values)]
    assert mean(shares) >= (99.3 if dtype == "bfloat16" else 99.99)


@pytest.fixture(params=["reference", "kernels"])
def implementation(request, monkeypatch):
    """mlx's operations; or kernels that are called and give zeros, since the simulator has to wait for its inputs."""

    def zeros(output_shapes, output_dtypes, inputs, **call):
        return [mx.depends(mx.zeros(*made), inputs) for made in zip(output_shapes, output_dtypes, strict=True)]

    if request.param == "kernels":
        monkeypatch.setattr(build, "gpu_backend", lambda: "metal")
        monkeypatch.setattr(build, "built", lambda kernel, where, constants: zeros)
    with backend.using("reference" if request.param == "reference" else "metal"):
        yield


def lazily(heads):
    """A vector for each head that needs 16 MB to be computed."""
    return (mx.random.uniform(shape=(1, heads, 1, HEAVY // 4 // heads)) - 0.5)[..., :DIM].astype(mx.float16)


def test_a_step_waits_for_nothing(implementation):
    """Appending and attending, also where a block is packed, only build a graph."""
    with backend.using("reference"):
        cache = cache_of(196)
    mx.eval(cache.append(lazily(2), lazily(2)).attend(lazily(4), 0.1, None, None), cache.state)
    packed = cache.body_tokens
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    outputs = [cache.append(lazily(2), lazily(2)).attend(lazily(4), 0.1, None, None) for _ in range(8)]
    assert cache.body_tokens == packed + BLOCK
    assert mx.get_peak_memory() - before < HEAVY
    mx.eval(outputs)
    assert mx.get_peak_memory() - before >= HEAVY, "so one evaluation would have been seen"
