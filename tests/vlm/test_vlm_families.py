"""Models of mlx-vlm on compressed caches, through mlx-vlm's own generate functions."""

import sys
from types import SimpleNamespace

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache as mlx_lm_caches

pytest.importorskip("mlx_vlm", reason="mlx-vlm is not installed; make test-vlm runs this in an environment of its own")
from mlx_vlm.generate import BatchGenerator, PromptCacheState, generate_step, stream_generate
from mlx_vlm.models import base
from mlx_vlm.models import cache as native
from mlx_vlm.tokenizer_utils import NaiveStreamingDetokenizer
from mlx_vlm.utils import StoppingCriteria
from tiny_vlms import FAMILIES, IMAGE, IMAGE_START, build
from zoo import build as build_mlx_lm

import mlx_tq
from mlx_tq.cache.layer import CompressedKVCache
from mlx_tq.config import KVConfig
from mlx_tq.errors import ConfigError, UnsupportedModelError
from mlx_tq.integration.module_families import language_model
from mlx_tq.prompt_cache.build import build_caches
from mlx_tq.prompt_cache.compressed import plan_caches

REFUSED = ["phi3_v", "gemma3n"]
SERVED = [name for name in FAMILIES if name not in REFUSED]
TOKENS = [(7 * i * i + 3 * i) % 140 for i in range(160)]
COUNT = 12
LIMITS = {"q8": 1e-4, "tq4": 2e-2}  # KL divergence in nats
CLASSES = {"K": CompressedKVCache, "R": native.RotatingKVCache, "A": native.ArraysCache}


def sized(formats):
    return KVConfig(key=formats, value=formats, sinks=4, window=24)


def generate(model, tokens=TOKENS, pixels=None, forced=None, **options):
    """Return tokens and log probabilities of mlx-vlm's generate, greedy or of the tokens that are `forced`."""
    if forced is not None:
        remaining = iter([*forced, 0])  # it samples one token ahead
        options["sampler"] = lambda _: mx.array([next(remaining)])
    inputs = mx.array([tokens]), model, pixels, None
    steps = list(generate_step(*inputs, max_tokens=COUNT, temperature=0.0, prefill_step_size=64, **options))
    return [token for token, _ in steps], mx.stack([logprobs for _, logprobs in steps])


def divergence(a, b):
    return (mx.exp(a) * (a - b)).sum(axis=-1).mean().item()


def bindings():
    """Return the functions that mlx_tq replaces, in every module of mlx-vlm and mlx-lm."""
    names = ("scaled_dot_product_attention", "make_prompt_cache")
    modules = [(name, module) for name, module in list(sys.modules.items()) if name.startswith(("mlx_vlm", "mlx_lm"))]
    return {(name, part): vars(module)[part] for name, module in modules for part in names if part in vars(module)}


@pytest.fixture(autouse=True)
def check_restored():
    build("llava"), build("qwen2_vl")
    before = bindings()
    calls = {module: module.LanguageModel.__call__ for module in language_modules()}
    yield
    after = bindings()
    assert {key: after[key] for key in before} == before
    assert all(bound.__module__.startswith(("mlx_vlm", "mlx_lm")) for bound in after.values())
    assert all(module.LanguageModel.__call__ is call for module, call in calls.items())


def language_modules():
    return [sys.modules[f"mlx_vlm.models.{name}.language"] for name in ("llava", "qwen2_vl")]


@pytest.mark.parametrize("name", SERVED)
def test_a_family(name):
    model = build(name)
    tokens, logprobs = generate(model)
    with mlx_tq.compressed_attention(model):
        exact = build_caches(plan_caches(language_model(model), sized("fp16")))
        assert [type(cache) for cache in exact] == [CLASSES[letter] for letter in FAMILIES[name][2]]
        same, exact_logprobs = generate(model, prompt_cache=exact)
    assert same == tokens
    assert all(cache.packed_tokens > 90 for cache in exact if isinstance(cache, CompressedKVCache))
    # fp16 rows hold the model's own bits, so only the order of float32 sums differs.
    assert (mx.abs(exact_logprobs - logprobs).max() / logprobs.std()).item() < 1e-3
    for formats, limit in LIMITS.items():
        with mlx_tq.compressed(model, sized(formats)):
            caches = native.make_prompt_cache(model.language_model)
            assert {type(cache) for cache in caches} == {type(cache) for cache in exact}
            lossy = divergence(logprobs, generate(model, forced=tokens)[1])
        assert 1e-8 < lossy < limit, formats
    with mlx_tq.compressed(model, profile="off"):
        off_tokens, off_logprobs = generate(model)
    assert off_tokens == tokens
    assert mx.array_equal(off_logprobs, logprobs)


@pytest.mark.parametrize(
    ("name", "line"),
    [("phi3_v", r"phi3_v\.py: output = mx\.fast\.scaled_dot"), ("gemma3n", r"language\.py: state = cache\.state")],
)
def test_a_family_that_reads_keys_itself_is_refused(name, line):
    model = build(name, spread=False)
    tokens, _ = generate(model)
    with pytest.raises(UnsupportedModelError, match=line), mlx_tq.compressed(model, sized("q8")):
        raise AssertionError
    assert generate(model)[0] == tokens


def test_an_image():
    """Qwen's positions of an image have three dimensions, and the model keeps them between its passes."""
    model = build("qwen2_vl")
    pixels = [mx.random.normal((16, 3 * 2 * 14 * 14), key=mx.random.key(seed)) for seed in range(2)]
    prompt = [*TOKENS[:60], IMAGE_START, *[IMAGE] * 4, *TOKENS[60:]]
    grid = {"image_grid_thw": mx.array([[1, 4, 4]])}
    (tokens, logprobs), (_, others) = (generate(model, prompt, pixel, **grid) for pixel in pixels)
    assert divergence(logprobs, others) > 0.01
    for formats, limit in LIMITS.items():
        with mlx_tq.compressed(model, sized(formats)):
            lossy = divergence(logprobs, generate(model, prompt, pixels[0], forced=tokens, **grid)[1])
        assert 1e-8 < lossy < limit, formats


def test_probing_leaves_the_positions_of_a_prompt():
    model = build("qwen2_vl")
    generate(model)
    before = {**model.language_model, **vars(model.language_model)}
    with mlx_tq.compressed(model, sized("q8")):
        pass
    after = {**model.language_model, **vars(model.language_model)}
    assert after.keys() == before.keys()
    assert all(after[name] is before[name] for name in ("_rope_deltas", "_position_ids"))


def test_contexts_nest_with_one_of_mlx_lm():
    model, other, text = build("llava"), build("qwen2_vl"), build_mlx_lm("llama")
    original = base.scaled_dot_product_attention
    with mlx_tq.compressed(model, sized("q8")):
        with mlx_tq.compressed(text, sized("tq4")), mlx_tq.compressed(model, sized("tq4")):
            assert {cache.spec.key for cache in native.make_prompt_cache(model.language_model)} == {"tq4"}
            assert {cache.spec.key for cache in native.make_prompt_cache(model)} == {"tq4"}
            assert {cache.spec.key for cache in mlx_lm_caches(text)} == {"tq4"}
            assert {type(cache) for cache in native.make_prompt_cache(other.language_model)} == {native.KVCache}
        assert {cache.spec.key for cache in native.make_prompt_cache(model.language_model)} == {"q8"}
        assert base.scaled_dot_product_attention is not original
    assert base.scaled_dot_product_attention is original
    assert {type(cache) for cache in native.make_prompt_cache(model.language_model)} == {native.KVCache}


def test_eviction():
    model = build("llava")
    config = KVConfig(key="q8", value="q8", sinks=4, window=24, evict=mlx_tq.EvictConfig(policy="knorm", budget=96))
    with mlx_tq.compressed(model, config):
        caches = native.make_prompt_cache(model.language_model)
        tokens, _ = generate(model, TOKENS * 4, prompt_cache=caches)
    assert len(tokens) == COUNT
    assert all(cache.offset >= 4 * len(TOKENS) > 2 * cache.size() for cache in caches)


def converse(model):
    """Return the tokens and cached tokens of two turns over one cache; the second drops the end of the first answer."""
    tokenizer = SimpleNamespace(stopping_criteria=StoppingCriteria([]), decode=str)
    processor = SimpleNamespace(tokenizer=tokenizer, detokenizer=NaiveStreamingDetokenizer(tokenizer))
    state, prompt, turns = PromptCacheState(), TOKENS, []
    for _ in range(2):
        inputs = {"input_ids": mx.array([prompt]), "prompt_cache_state": state, "max_tokens": COUNT}
        *_, last = stream_generate(model, processor, "", temperature=0.0, **inputs)
        turns.append((last.token_ids, last.cached_tokens))
        prompt = [*prompt, *last.token_ids[:8], *TOKENS[:20]]
    return turns


@pytest.mark.parametrize("name", ["llava", "qwen2_vl"])
def test_a_conversation_over_one_cache(name):
    model = build(name)
    plain = converse(model)
    assert plain[1][1] > len(TOKENS)
    with mlx_tq.compressed(model, KVConfig(key="q8", value="q8", sinks=4, window=400)):  # all in full precision
        assert converse(model) == plain
    with mlx_tq.compressed(model, sized("q8")):
        assert [cached for _, cached in converse(model)] == [cached for _, cached in plain]


def decode_together(model, **options):
    """Return what mlx-vlm's batch generator answers to two prompts."""
    tokenizer, prompts = SimpleNamespace(stopping_criteria=StoppingCriteria([])), [TOKENS, TOKENS[:90]]
    batch = BatchGenerator(model.language_model, tokenizer, max_tokens=COUNT, **options)
    features = [model.get_input_embeddings(mx.array([prompt]), None).to_dict() for prompt in prompts]
    inputs = [{name: value for name, value in parts.items() if value is not None} for parts in features]
    answers = {uid: [] for uid in batch.insert(prompts, prompt_kwargs=inputs)}
    while batch.has_work:
        for response in batch.next()[1]:
            answers[response.uid].append(int(response.token))
    return list(answers.values())


def test_a_batch_gives_each_prompt_what_it_gets_alone_or_is_refused():
    model = build("llava")
    with mlx_tq.compressed(model, sized("q8")):
        alone = [generate(model, tokens)[0] for tokens in (TOKENS, TOKENS[:90])]
        assert decode_together(model, prefill_batch_size=1) == alone
        with pytest.raises(UnsupportedModelError, match=r"prefills 2 prompts together, .* prefill_batch_size=1"):
            decode_together(model)
    stateful = build("qwen2_vl")
    plain = decode_together(stateful)
    with mlx_tq.compressed(stateful, sized("q8")), pytest.raises(UnsupportedModelError, match="positions of its last"):
        decode_together(stateful, prefill_batch_size=1)
    with mlx_tq.compressed(stateful, profile="off"):
        assert decode_together(stateful) == plain


def test_a_size_that_mlx_vlm_would_ignore_is_refused():
    model = build("llava")
    with mlx_tq.compressed(model, sized("q8")), pytest.raises(ConfigError, match="max_kv_size is 64"):
        generate(model, max_kv_size=64)
