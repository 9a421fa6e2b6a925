"""A whole model on the simulator: every kernel serves, and the tokens are those of mlx's own operations."""

from collections import Counter
from dataclasses import replace
from statistics import mean
from unittest import mock

import mlx.core as mx
import pytest
from kernel_cases import random
from mlx_lm.generate import generate_step
from simulated import simulated

from mlx_tq.cache import CompressedKVCache
from mlx_tq.cache.spec import CacheSpec
from mlx_tq.config import BLOCK, EvictConfig, KVConfig
from mlx_tq.dispatch import attention, make_prompt_cache
from mlx_tq.evaluate.arms import parse_arm
from mlx_tq.evaluate.layers import Side, measure_layers
from mlx_tq.kernels import build, impl, phases
from mlx_tq.kernels.phases import Phases
from mlx_tq.models import load

PROMPT, ANSWER = 120, 6
DIM, HEAVY = 128, 16 << 20
CONFIG = KVConfig(key="q8", value="tq4", prefix=8, window=8)
TEXT = "The access code of the north gate is 417295. The harbour is quiet at night, and the boats lie still. " * 3


def tokens_of(model, ids, count, config):
    caches = make_prompt_cache(model, config)
    with attention(model):
        steps = generate_step(ids, model, prompt_cache=caches, max_tokens=count, prefill_step_size=32)
        return [int(token) for token, _ in steps]


def on_simulator(model, ids, count, config):
    """Tokens, and how often each kernel ran."""
    calls = Counter()
    with simulated():
        run = build.run

        def counted(kernel, **call):
            calls[kernel.name] += 1
            return run(kernel, **call)

        with mock.patch.object(build, "run", counted):
            return tokens_of(model, ids, count, config), calls


def test_a_generation_calls_the_kernels_and_says_the_same(embedded):
    model, tokenizer = embedded
    ids, layers = mx.array(tokenizer.encode(TEXT)[:PROMPT]), len(model.layers)
    with impl.using("ops"):
        expected = tokens_of(model, ids, ANSWER, CONFIG)
    with phases.using(Phases(short=ids.size + 2)):
        found, calls = on_simulator(model, ids, ANSWER, CONFIG)
    assert found == expected
    # The chunks before the last token leave 2, 1 and 1 blocks; the third and fourth attend to what is packed.
    assert calls["encode"] == 3 * layers
    assert calls["dequantize"] == 2 * layers
    assert calls["wht"] == 2 * 2 * layers  # queries, and the output
    assert calls["attend_short"] == 3 * layers  # of the prompt's last token and two more
    assert calls["attend"] == calls["merge"] == (ANSWER - 2) * layers


def test_eviction_scores_and_compacts_with_kernels(embedded):
    model, tokenizer = embedded
    config = replace(CONFIG, evict=EvictConfig(budget=64, warmup=32, trigger=8))
    ids, layers = mx.array(tokenizer.encode(TEXT)[:PROMPT]), len(model.layers)
    with impl.using("ops"):
        expected = tokens_of(model, ids, ANSWER, config)
    found, calls = on_simulator(model, ids, ANSWER, config)
    assert found == expected
    assert calls["score"] >= layers
    assert calls["compact"] >= layers


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.full)])
def test_layers_agree_with_mlx_operations(embedded, dtype):
    """Code for code and layer for layer: bf16 rounds what each path makes of the same sums, fp32 hides nothing."""
    model, tokenizer = embedded
    if dtype == "float32":
        model, _ = load()
        model.set_dtype(mx.float32)
    arm = parse_arm("tq4/tq4", prefix=8, window=8)
    with simulated() as counters:
        rows, _ = measure_layers(Side(model, arm), Side(model, arm, "ops"), tokenizer.encode(TEXT)[:88], step=8)
    assert len(counters) > 2 * len(rows)
    assert len(rows) == len(model.layers)
    assert min(row.least for row in rows) >= 0.9999
    assert (rows[0].keys, rows[0].values) == (100, 100)  # the same inputs
    shares = [share for row in rows for share in (row.keys, row.values)]
    assert mean(shares) >= (99.3 if dtype == "bfloat16" else 99.99)


@pytest.fixture(params=["ops", "kernels"])
def implementation(request, monkeypatch):
    """mlx's operations; or kernels that are called and give zeros, since the simulator has to wait for its inputs."""

    def zeros(output_shapes, output_dtypes, inputs, **call):
        return [mx.depends(mx.zeros(*made), inputs) for made in zip(output_shapes, output_dtypes, strict=True)]

    if request.param == "kernels":
        monkeypatch.setattr(build, "backend", lambda: "metal")
        monkeypatch.setattr(build, "built", lambda kernel, where, constants: zeros)
    with impl.using("ops" if request.param == "ops" else "metal"):
        yield


def lazily(heads):
    """A vector for each head that needs 16 MB to be computed."""
    return (mx.random.uniform(shape=(1, heads, 1, HEAVY // 4 // heads)) - 0.5)[..., :DIM].astype(mx.float16)


def test_a_step_waits_for_nothing(implementation):
    """Appending and attending, also where a block is packed, only build a graph."""
    cache = CompressedKVCache(CacheSpec.for_layer(CONFIG, 0, CONFIG.key, CONFIG.value))
    cache.append(random((1, 2, 100, DIM), "float16"), random((1, 2, 100, DIM), "float16", seed=1))
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


def test_attention_compiles(implementation):
    cache = CompressedKVCache(CacheSpec.for_layer(CONFIG, 0, CONFIG.key, CONFIG.value))
    view = cache.append(random((1, 2, 100, DIM), "float16"), random((1, 2, 100, DIM), "float16", seed=1))
    view = cache.append(random((1, 2, 1, DIM), "float16"), random((1, 2, 1, DIM), "float16", seed=1))

    def attend(queries):
        return view.attend(queries, 0.1, None, None)

    queries = random((1, 4, 1, DIM), "float16", seed=2)
    assert mx.allclose(mx.compile(attend)(queries), attend(queries), rtol=1e-2, atol=1e-3)
