"""A whole model on the simulator: it uses every kernel, and its tokens are those of the reference implementation."""

import json
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from io import StringIO
from statistics import mean
from unittest import mock

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generate_step

from benchmarks.studies.layers import Side, measure_layers
from kernels.cases import random
from kernels.metal.simulated import launching, simulated, zeros
from mlx_tq.__main__ import main
from mlx_tq.cache.layer import CompressedKVCache
from mlx_tq.cache.spec import CacheSpec
from mlx_tq.config import BLOCK, EvictConfig, KVConfig
from mlx_tq.evaluate.arms import parse_arm
from mlx_tq.kernels import backend, gpu, thresholds
from mlx_tq.kernels.gpu import Kernel
from mlx_tq.kernels.thresholds import KernelThresholds
from mlx_tq.models import load
from mlx_tq.prompt_cache.build import build_caches
from mlx_tq.prompt_cache.compressed import compressed_attention, make_prompt_cache, plan_caches
from mlx_tq.prompt_cache.layer_group import compressed_caches
from mlx_tq.prompt_cache.warm_up import compile_kernels

PROMPT, ANSWER = 216, 6
DIM, HEAVY = 128, 16 << 20
CONFIG = KVConfig(key="q8", value="tq4", sinks=8, window=8)
TEXT = "The access code of the north gate is 417295. The harbour is quiet at night, and the boats lie still. " * 6


def tokens_of(model, ids, caches):
    with compressed_attention(model):
        steps = generate_step(ids, model, prompt_cache=caches, max_tokens=ANSWER, prefill_step_size=32)
        return [int(token) for token, _ in steps]


@contextmanager
def watched(callback):
    """Call `callback(kernel name, inputs by name)` before each kernel runs on the simulator."""
    with simulated():
        run = Kernel.run

        def watched_run(kernel, *, inputs, constants, **call):
            names = [name.removesuffix("_0") for name in kernel.input_names(constants)]
            arrays = dict(zip(names, inputs, strict=True))
            for name in kernel.sources:  # mlx would copy an array that is not contiguous
                assert np.array(arrays[name].view(mx.uint8), copy=False).flags.c_contiguous, name
            callback(kernel.name, arrays)
            return run(kernel, inputs=inputs, constants=constants, **call)

        with mock.patch.object(Kernel, "run", watched_run):
            yield


def address(array: mx.array) -> int:
    return np.array(array.view(mx.uint8), copy=False).ctypes.data


def test_generation_calls_the_kernels_and_has_the_same_tokens(embedded):
    model, tokenizer = embedded
    ids, layers, calls = mx.array(tokenizer.encode(TEXT)[:PROMPT]), len(model.layers), Counter()
    with backend.using("reference"):
        expected = tokens_of(model, ids, make_prompt_cache(model, CONFIG))
    with thresholds.using(KernelThresholds(short_tokens=ids.size + 2)), watched(lambda name, _: calls.update([name])):
        assert tokens_of(model, ids, make_prompt_cache(model, CONFIG)) == expected
    # The last three chunks before the last token pack blocks; the second and third of them attend to packed tokens.
    assert calls["encode"] == 3 * layers
    assert calls["dequantize"] == 2 * layers
    assert calls["wht"] == (2 * 2 + 3) * layers  # queries and the output; means that encode subtracts
    assert calls["attend_short"] == 3 * layers  # the prompt's last token and two more
    assert calls["attend"] == calls["merge"] == (ANSWER - 2) * layers


@pytest.mark.parametrize("max_threads", [448, 64, 32])
def test_generation_with_few_threads_has_the_same_tokens(embedded, max_threads):
    """A limit of 448 threads, of an M1 Max, changes nothing; smaller ones divide the work differently."""
    model, tokenizer = embedded
    ids = mx.array(tokenizer.encode(TEXT)[:PROMPT])
    with backend.using("reference"):
        expected = tokens_of(model, ids, make_prompt_cache(model, CONFIG))
    with (
        mock.patch.dict(gpu.thread_limits, clear=True),
        thresholds.using(KernelThresholds(short_tokens=ids.size + 2)),
        simulated(max_threads=max_threads),
    ):
        assert tokens_of(model, ids, make_prompt_cache(model, CONFIG)) == expected
        assert ("attend_short" in gpu.thread_limits) == (max_threads < 448)


@contextmanager
def compiling():
    """Yield the names of the kernels that are compiled on the simulator."""
    with simulated():
        compiled, compile_kernel = [], gpu.compile_kernel

        @cache
        def compile_named(kernel, device, constants):
            compiled.append(kernel.name)
            return compile_kernel(kernel, device, constants)

        with mock.patch.object(gpu, "compile_kernel", compile_named):
            yield compiled


@pytest.mark.parametrize("normalize", [False, True])
def test_no_answer_waits_for_a_compiler(embedded, normalize):
    model, tokenizer = embedded
    ids, config = mx.array(tokenizer.encode(TEXT)[:PROMPT]), replace(CONFIG, normalize=normalize)
    with compiling() as compiled:
        compile_kernels(model, plan_caches(model, config))
        assert {"encode", "wht", "dequantize", "attend", "merge", "attend_short"} == set(compiled)
        compiled.clear()
        for short_tokens in (0, ids.size + 2):
            with thresholds.changed(short_tokens=short_tokens):
                tokens_of(model, ids, make_prompt_cache(model, config))
        assert not compiled


def test_no_verify_pass_or_batch_waits_for_a_compiler(embedded):
    model, tokenizer = embedded
    prompts = [tokenizer.encode(TEXT)[start : start + 150] for start in (0, 20)]
    plan = plan_caches(model, CONFIG)
    with compiling() as compiled, compressed_attention(model):
        compile_kernels(model, plan, lengths=range(1, 5), batches=True)
        sequences = [build_caches(plan) for _ in prompts]
        for ids, caches in zip(prompts, sequences, strict=True):
            mx.eval(model(mx.array([ids]), cache=caches))
        assert sequences[0][0].packed_tokens
        compiled.clear()
        for length in (4, 3, 2, 1):
            mx.eval(model(mx.array([prompts[0][:length]]), cache=sequences[0]))
        batch = [rows[0].merge(list(rows)) for rows in zip(*sequences, strict=True)]
        mx.eval(model(mx.array([[1], [2]]), cache=batch))
        assert not compiled


def test_nothing_is_compiled_without_a_gpu(embedded, monkeypatch):
    model, _ = embedded
    plan = plan_caches(model, CONFIG)
    monkeypatch.setattr(type(model), "__call__", lambda *_: pytest.fail("the model ran"))
    compile_kernels(model, plan, batches=True)
    compile_kernels(model, None)


def test_eviction_with_kernels_has_the_same_tokens(embedded):
    """Every kernel that reads packed rows reads the buffer of a cache, not a copy."""
    model, tokenizer = embedded
    config = replace(CONFIG, evict=EvictConfig("triattention:warmup=32:trigger=8:granularity=1", 128, "off"))
    ids, calls = mx.array(tokenizer.encode(TEXT)[:PROMPT]), Counter()
    with backend.using("reference"):
        expected = tokens_of(model, ids, make_prompt_cache(model, config))
    caches = make_prompt_cache(model, config)

    def check(name, inputs):
        if "packed_rows" in inputs:
            calls[name.removesuffix("_short")] += 1
            stored = {address(array) for cache in compressed_caches(caches) for array in cache.arrays()}
            assert address(inputs["packed_rows"]) in stored, name

    with watched(check):
        assert tokens_of(model, ids, caches) == expected
    assert calls.keys() == {"attend", "dequantize", "score", "compact"}
    assert min(calls.values()) >= len(model.layers)


def transposed(tokens: int, heads: int = 2) -> list[mx.array]:
    """Make keys and values with the strides that models give them."""
    return [random((1, tokens, heads, DIM), seed=seed).swapaxes(1, 2) for seed in (0, 1)]


def make_cache(tokens: int) -> CompressedKVCache:
    """Make a cache that has learned its key scale from the tokens' queries."""
    cache = CompressedKVCache(CacheSpec.for_layer(CONFIG, 0, CONFIG.key, CONFIG.value))
    mx.eval(cache.append(*transposed(tokens)).attend(transposed(tokens, heads=4)[0], 0.1, "causal", None))
    return cache


@pytest.mark.parametrize("length", [1, 3])
def test_steps_read_the_buffers_of_the_cache(length):
    """No step copies packed rows or full-precision tokens for a kernel, also when it packs a block.

    mlx copies nothing (`ensure_row_contiguous=False`); the addresses show that wrappers and cache do not either.
    """
    cache = make_cache(180)
    first, calls, queries = cache.packed_tokens, {}, transposed(length, heads=4)[0]

    def record(name, inputs):  # of two attentions, the last remains
        calls[name.removesuffix("_short")] = {name: address(array) for name, array in inputs.items()}

    with watched(record):
        while cache.packed_tokens < first + 2 * BLOCK:
            keys, values = (address(array) for array in cache.arrays()[:2])
            packed = cache.packed_tokens
            calls.clear()
            cache.append(*transposed(length)).attend(queries, 0.1, "causal", None)
            stored = [address(array) for array in cache.arrays()]
            assert (calls["attend"]["full_keys"], calls["attend"]["full_values"]) == tuple(stored[:2])
            assert calls["attend"]["packed_rows"] in stored[2:]
            assert ("encode" in calls) == (cache.packed_tokens > packed)
            if "encode" in calls:
                sink_bytes = 2 * CONFIG.sinks * DIM
                assert calls["encode"]["keys"] == keys + sink_bytes
                assert calls["encode"]["values"] == values + sink_bytes


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.full)])
def test_layers_agree_with_the_reference(embedded, dtype):
    """Codes agree in each layer; in bfloat16 both paths round the same sums, which hides differences."""
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


def heavy(heads):
    """Make one vector per head whose computation needs 16 MB."""
    return (mx.random.uniform(shape=(1, heads, 1, HEAVY // 4 // heads)) - 0.5)[..., :DIM].astype(mx.float16)


@pytest.mark.parametrize("use_kernels", [False, True])
def test_a_step_does_not_synchronize(use_kernels):
    """Appending, attending and packing a block only build a graph."""

    def run_lazily(kernel, *, inputs, constants, **call):  # the simulator would wait for the inputs
        return [mx.depends(array, inputs) for array in zeros(**call)]

    cache = make_cache(196)
    with launching(run_lazily) if use_kernels else backend.using("reference"):
        mx.eval(cache.append(heavy(2), heavy(2)).attend(heavy(4), 0.1, None, None), cache.state)
        packed = cache.packed_tokens
        mx.clear_cache()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        outputs = [cache.append(heavy(2), heavy(2)).attend(heavy(4), 0.1, None, None) for _ in range(8)]
        assert cache.packed_tokens == packed + BLOCK
        assert mx.get_peak_memory() - before < HEAVY
        mx.eval(outputs)
        assert mx.get_peak_memory() - before >= HEAVY, "an evaluation shows"


@pytest.mark.parametrize(
    "words",
    [("generate", "-p", "hi", "-m", "2"), ("chat", "-m", "2")],
    ids=["generate", "chat"],
)
def test_commands_compile_kernels_that_their_answer_does_not_need(words, monkeypatch, capsys):
    """A short context takes one kernel, and packs nothing. Kernels of verify passes wait for the first drafts."""
    monkeypatch.setattr("sys.stdin", StringIO("hi\n"))
    with compiling() as compiled:
        assert main([*words]) == 0
        assert {"encode", "dequantize", "attend", "merge", "attend_short"} <= set(compiled)
        assert compiled.count("attend") == 1
    ran = "ran on metal kernels; prefill: mlx attention; decode: mlx attention"
    assert f"{ran}; in full precision: layers 0-5 (compression starts at 288 tokens)" in capsys.readouterr().err


@pytest.mark.parametrize(("short_tokens", "kernels"), [(4096, ["attend_short"]), (0, ["attend", "merge"])])
def test_an_answer_reports_the_kernels_that_ran(short_tokens, kernels, capsys):
    """Those of a verify pass are apart, and those that were only compiled are not named."""
    words = ["generate", "-p", TEXT, "-m", "4", "--ignore-chat-template", "--prefill-step-size", "64", "--json"]
    words += ["--kv-sinks", "8", "--kv-window", "8", "--kv-key", "fp16", "--draft-model", "needle"]
    with simulated(), thresholds.using(KernelThresholds(short_tokens=short_tokens, matrix_queries=64)):
        assert main([*words, "--num-draft-tokens", "2"]) == 0
    ran = json.loads(capsys.readouterr().out)["ran"]
    assert ran["backend"] == "metal kernels"
    assert ran["phases"]["short passes"] == kernels
    assert set(ran["phases"]["decode"]) == set(kernels)
    assert set(ran["phases"]["prefill"]) == {"mlx attention", "dequantize", "wht"}
    assert ran["full_precision"] == [{"layers": [*range(6)], "reason": "the format of keys is fp16"}]
