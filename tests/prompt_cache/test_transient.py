"""What a prefill takes for a moment is at most what its plan says, measured and computed."""

import gc

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from zoo import build

from mlx_tq.cache.spec import CacheSpec
from mlx_tq.cli.inputs import load_text
from mlx_tq.cli.loading import check_memory
from mlx_tq.config import PROFILES, KVConfig
from mlx_tq.errors import ConfigError
from mlx_tq.integration.probe import SlotFacts, model_facts
from mlx_tq.kernels import backend, mlx_attention
from mlx_tq.kernels.mlx_attention import MemoryBounds
from mlx_tq.prompt_cache.build import build_caches
from mlx_tq.prompt_cache.compressed import compressed_attention, make_prompt_cache, plan_caches
from mlx_tq.prompt_cache.layer_group import begin_pass
from mlx_tq.prompt_cache.memory import other_bytes, sequence_bytes, transient_bytes
from mlx_tq.prompt_cache.plan import LayerPlan, Plan
from mlx_tq.prompt_cache.transient import selection_nbytes

DIM, STEP, CONTEXT = 256, 2048, 65536
SLOW = pytest.mark.full  # a minute or more of prefill on a CPU


def peak_of(compute):
    """Return the most bytes in use while `compute` runs, beyond those before."""
    gc.collect()
    mx.synchronize()
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    compute()
    mx.synchronize()
    return mx.get_peak_memory() - before


def needed_by(model, config, tokens, step):
    cache, transient = sequence_bytes(model, config, other_bytes(model), step), transient_bytes(model, config, step)
    return cache(tokens) + transient(tokens)


def prefill(model, config, ids, step):
    caches = make_prompt_cache(model, config)
    with compressed_attention(model):
        for start in range(0, len(ids), step):
            model(mx.array(ids[start : start + step])[None], cache=caches)
            mx.eval([cache.state for cache in caches])  # as mlx-lm, which computes no logits of a prompt


@pytest.mark.full
@pytest.mark.parametrize("profile", ["off", "balanced"])
def test_peak_memory_includes_token_selection(profile):
    model, ids = build("minimax_m3_vl", num_attention_heads=16), [i % 160 for i in range(2048)]
    peak = peak_of(lambda: prefill(model, PROFILES[profile], ids, 512))
    needed = needed_by(model, PROFILES[profile], len(ids), 512)
    slot = model_facts(model).slots[1]
    assert needed - selection_nbytes(slot, len(ids), 512) < peak < needed


FULL = [(profile, 4000, step) for profile in ("balanced", "small", "off") for step in (256, 512, 2048)]
CASES = [("balanced", 600, 256), *(pytest.param(*case, marks=SLOW) for case in FULL)]


@pytest.mark.full
@pytest.mark.parametrize(("profile", "tokens", "step"), CASES)
def test_a_prefill_of_the_embedded_model_takes_what_was_said(embedded, profile, tokens, step):
    model, tokenizer = embedded
    ids, config = tokenizer.encode(load_text())[:tokens], PROFILES[profile]
    prefill(model, config, ids[:300], step)  # what is made once: rotations, tables, codebooks
    needed = needed_by(model, config, tokens, step)
    assert 0.5 * needed <= peak_of(lambda: prefill(model, config, ids, step)) <= needed


@pytest.mark.full
@pytest.mark.parametrize("profile", ["balanced", "off"])
@pytest.mark.parametrize("name", ["cpu", "reference"])
def test_predicted_memory_of_a_latent_prefill(name, profile):
    """A model of MLA makes keys and values of 16 heads from them, and scores of rotated parts."""
    model = build("deepseek_v3", num_attention_heads=16, num_key_value_heads=16, kv_lora_rank=256)
    ids, config = [(7 * i * i + 3 * i) % 160 for i in range(3000)], PROFILES[profile]
    with backend.using(name):
        prefill(model, config, ids[:300], 256)
        for step in (256, 1024):
            needed = needed_by(model, config, len(ids), step)
            assert 0.3 * needed <= peak_of(lambda step=step: prefill(model, config, ids, step)) <= needed


def one_layer(query_heads=4, heads=1, dtype="float32"):
    config = KVConfig(key="q8", value="tq4")
    slot = SlotFacts(0, None, heads, DIM, DIM, dtype, 1.0, shared=False, query_heads=query_heads)
    layer = LayerPlan(slot, CacheSpec.for_layer(config, 0, config.key, config.value), "")
    return Plan("", config, [""], [layer], lambda: [None])


@pytest.mark.full
@pytest.mark.parametrize("context", [8192, pytest.param(CONTEXT, marks=SLOW)])
def test_peak_of_one_layer_with_heads_of_256(context):
    """Only the last step has all of its queries: the others take less."""
    plan = one_layer()
    caches = build_caches(plan)

    def fill():
        for start in range(0, context, STEP):
            keys, values, queries = (mx.random.normal((1, heads, STEP, DIM)) for heads in (1, 1, 4))
            begin_pass(caches, STEP)
            view = caches[0].append(keys, values)
            if start + STEP == context:
                out = view.attend(queries, DIM**-0.5, "causal", None)
                mx.eval(out)
            mx.eval(caches[0].state)

    unsplit = 4 * STEP * context * 4
    peak = peak_of(fill)
    assert peak <= plan.peak_nbytes(context, STEP)
    assert plan.peak_nbytes(context, STEP) < plan.cache_peak_nbytes(context, STEP) + unsplit


def test_a_prefill_of_64k_tokens_stays_within_the_bound_of_a_gpu():
    """Computed, for 24 query and 4 KV heads of 256, whose scores would take 6.4 GB and their softmax as much."""
    plan = one_layer(24, 4, "bfloat16")
    with mlx_attention.using(mlx_attention.GPU_BOUNDS), backend.using("reference"):
        transient = plan.transient_nbytes(CONTEXT, STEP)
    encoded, projected = STEP * 4 * 2 * DIM * 4, STEP * (24 + 4) * 2 * DIM * 2
    bounds = mlx_attention.GPU_BOUNDS
    assert bounds.scores < transient <= bounds.scores + 3 * bounds.decoded + 4 * encoded + 4 * projected


def test_free_memory_has_to_hold_the_prefill_too(embedded):
    plan, tokens = plan_caches(embedded[0], PROFILES["balanced"]), 10**9
    pattern = r"of KV cache and, in prefill steps of 512, \S+ MB for a moment; .* are available\. (About|Not)"
    with pytest.raises(ConfigError, match=pattern):
        check_memory(plan, tokens, None, 512)
    check_memory(plan, 4000, None, 512)


LITTLE = [MemoryBounds(scores=1 << 18, decoded=1 << 40), MemoryBounds(scores=1 << 40, decoded=1)]


@pytest.mark.parametrize(
    "bounds", [LITTLE[0], pytest.param(LITTLE[1], marks=pytest.mark.full)], ids=["pieces", "heads"]
)
def test_greedy_answers_are_equal_within_little_memory(embedded, bounds):
    model, tokenizer = embedded
    prompt = mx.array(tokenizer.encode(f"{load_text()[:300]} The access code is 417295. What is the access code?"))

    def answer():
        caches = make_prompt_cache(model, KVConfig(key="q8", value="tq4", sinks=16, window=32))
        with compressed_attention(model):
            steps = generate_step(prompt, model, prompt_cache=caches, max_tokens=8, prefill_step_size=64)
            return [token for token, _ in steps]

    expected = answer()
    with mlx_attention.using(bounds):
        assert answer() == expected
