"""The patch of the forward pass: a callback gets the whole cache list before each pass of its model."""

import threading
from contextlib import ExitStack, suppress
from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm import batch_generate
from mlx_lm.generate import generate_step
from mlx_lm.models.llama import Model as Llama
from zoo import build

from mlx_tq import compressed, compressed_attention, make_prompt_cache
from mlx_tq.config import EvictConfig, KVConfig
from mlx_tq.errors import CacheFormatError
from mlx_tq.integration.patches import capture_queries, find_call, patch_forward, patch_rope, recorded_calls
from mlx_tq.integration.probe import model_facts
from mlx_tq.prompt_cache.layer_group import begin_pass, layer_group_of

EVICT = EvictConfig("knorm:trigger=8:granularity=1", budget=60)
NO_EVICTION = KVConfig(key="q8", value="tq4", sinks=4, window=24)
FP16 = KVConfig(key="fp16", value="fp16", sinks=4, window=24, evict=EVICT)
EVICTS = KVConfig("q8", "tq4", sinks=4, window=24, normalize=False, evict=EVICT)
TOKENS = [(7 * i * i + 3 * i) % 160 for i in range(120)]
PROMPT = mx.array([TOKENS])


class Recorder:
    """A callback that records its arguments, and then does what that of `compressed` does."""

    def __init__(self):
        self.caches, self.counts = [], []

    def __call__(self, caches, count):
        self.caches.append(list(caches))
        self.counts.append(count)
        return begin_pass(caches, count)


@pytest.fixture(autouse=True)
def check_restored():
    """Check that the test leaves the class as it was."""
    before = vars(Llama)["__call__"]
    yield
    assert vars(Llama)["__call__"] is before


def plain_caches(model):
    return make_prompt_cache(model, KVConfig(key="fp16", value="fp16"))


def test_generation():
    model, recorder = build("llama"), Recorder()
    with compressed(model, EVICTS), patch_forward(model, recorder):
        caches = make_prompt_cache(model, EVICTS)
        assert len(list(generate_step(PROMPT[0], model, max_tokens=5, prompt_cache=caches, prefill_step_size=64))) == 5
    assert all(list(map(id, seen)) == list(map(id, caches)) for seen in recorder.caches)
    assert recorder.counts == [64, 55, 1, 1, 1, 1, 1, 1]


def test_tokens_are_counted_by_their_embeddings():
    """Models of mlx-vlm may have many embeddings for the token of an image, and take caches as `**kwargs`."""

    class Model(nn.Module):
        def __call__(self, inputs, inputs_embeds=None, **options):
            return inputs

    model, counts = Model(), []
    with patch_forward(model, lambda caches, count: bool(counts.append(count))):
        model(mx.zeros((1, 3)), inputs_embeds=mx.zeros((1, 7, 4)), cache=[])
        model(inputs=mx.zeros((1, 3)), cache=[])
    assert counts == [7, 3]


def test_batch_generation():
    """Each pass has a cache for every layer, with a row for every prompt that is not done."""
    model, rows = build("llama"), []

    def record(caches, count):
        rows.append([len(layer.rows) for layer in caches])
        return begin_pass(caches, count)

    model_facts(model)
    with compressed(model, EVICTS), patch_forward(model, record):
        tokenizer = SimpleNamespace(eos_token_ids=[], decode=str)
        prompts = [TOKENS[:90], TOKENS[20:50], TOKENS[:70]]
        batch_generate(model, tokenizer, prompts, max_tokens=[4, 2, 4])
    assert all(len(layers) == len(model.layers) and len(set(layers)) == 1 for layers in rows)
    assert {layers[0] for layers in rows} == {2, 3}


class Vision(nn.Module):
    """Contains a language model that may be called by itself, as vision models do."""

    def __init__(self):
        super().__init__()
        self.language_model = build("llama")
        self.args = self.language_model.args

    @property
    def layers(self):
        return self.language_model.layers

    def __call__(self, tokens, cache=None):
        return self.language_model(tokens, cache=cache)


def test_a_part_of_a_model_that_is_called_by_itself():
    """A cache that evicts would miss its round, so it raises before anything changes; others do not mind."""
    model = Vision()
    with compressed_attention(model):
        for part in (model.language_model, model.language_model.model):
            evicts, keeps = (make_prompt_cache(model, config) for config in (EVICTS, NO_EVICTION))
            with pytest.raises(CacheFormatError, match=r"did not announce itself.* Call the model itself, not one"):
                part(PROMPT, cache=evicts)
            assert all(cache.empty() for cache in evicts)
            mx.eval(part(PROMPT, cache=keeps), model(PROMPT, cache=evicts))
            assert {cache.offset for cache in (*evicts, *keeps)} == {120}
            with pytest.raises(CacheFormatError, match="did not announce itself"):
                part(PROMPT[:, :1], cache=evicts)
    with compressed_attention(model.language_model):
        mx.eval(model(PROMPT, cache=make_prompt_cache(model, EVICTS)))


def test_caches_are_found_however_they_are_passed():
    model, recorder = build("llama"), Recorder()
    with patch_forward(model, recorder):
        caches = plain_caches(model)
        mx.eval(model(PROMPT, caches), model(inputs=PROMPT[:, :3], cache=caches))
        mx.eval(model(PROMPT), model(PROMPT, cache=None))
    assert recorder.caches == [caches, caches]
    assert recorder.counts == [120, 3]


def test_the_newest_open_context_of_a_model_counts():
    """Two models of one class have their own callbacks; contexts end in any order."""
    model, other = build("llama"), build("llama", seed=1)
    recorders, contexts = [Recorder() for _ in range(3)], [ExitStack() for _ in range(3)]

    def run(count):
        for each in (model, other):
            mx.eval(each(PROMPT[:, :count], cache=plain_caches(each)))

    for context, owner, recorder in zip(contexts, (model, model, other), recorders, strict=True):
        context.enter_context(patch_forward(owner, recorder))
    for count, context in zip((1, 2, 3), (contexts[1], contexts[0], contexts[2]), strict=True):
        run(count)
        context.close()
    run(4)
    assert [recorder.counts for recorder in recorders] == [[2], [1], [1, 2, 3]]


class Inherits(Llama):
    """Has no `__call__` of its own."""


def test_a_class_that_inherits_its_call():
    model = build("llama")
    model.__class__ = Inherits
    recorder, caches = Recorder(), plain_caches(model)
    with patch_forward(model, recorder):
        assert "__call__" in vars(Inherits)
        model(PROMPT, cache=caches)
        build("llama")(PROMPT)  # the base class is not patched
    assert "__call__" not in vars(Inherits)
    assert recorder.counts == [120]


def test_a_model_in_one_shard():
    model = build("llama")
    plain = model(PROMPT)
    group = mx.distributed.init()
    if group.size() != 1:
        pytest.skip("a group of several processes; this test is about one")
    model.shard(group)
    with compressed_attention(model):
        caches = make_prompt_cache(model, FP16)
        assert mx.allclose(model(PROMPT, cache=caches), plain, atol=1e-4)
        model(PROMPT, cache=caches)
    assert layer_group_of(caches).stats.rounds == 1


# Queries before RoPE

X = mx.ones((1, 1, 3, 64))


def rope_of(model):
    return model.layers[0].self_attn.rope


@pytest.mark.parametrize("wanted", [True, False])
def test_queries_are_captured_during_the_pass_if_the_callback_wants_them(wanted):
    model, counts = build("llama"), []
    with compressed_attention(model), patch_forward(model, lambda caches, count: wanted):
        attention = model.layers[1].self_attn

        def spy(x, mask=None, cache=None):
            out = type(attention).__call__(attention, x, mask, cache)
            counts.append(len(recorded_calls()))
            return out

        model.layers[1].self_attn = spy
        model(PROMPT, cache=plain_caches(model))
        assert not recorded_calls()
    assert counts == [4 if wanted else 0]


def test_a_call_is_found_by_the_identity_of_its_output():
    """Neither the order of calls nor equal values are enough."""
    model = build("llama")
    dims = rope_of(model).dims
    with patch_rope(lambda tokens, cache=None: tokens), patch_rope(model), capture_queries():
        assert rope_of(model).dims == dims
        with pytest.raises(AttributeError):
            _ = rope_of(model).nothing
        keys, queries = X + 1, X + 2
        rotated = [rope_of(model)(x, offset=5) for x in (keys, queries)]
        assert [find_call(output).source for output in rotated] == [keys, queries]
        assert find_call(rotated[0]).module is rope_of(model).module
        assert find_call(mx.array(rotated[0])) is None
        recorded_calls().clear()
        assert find_call(rotated[0]) is None


def test_the_last_four_calls_are_recorded_in_their_thread_only():
    model, seen = build("llama"), []
    with patch_rope(model):
        with capture_queries():
            rope_of(model)(X)
            thread = threading.Thread(target=lambda: seen.append((rope_of(model)(X), list(recorded_calls()))))
            thread.start()
            thread.join()
            assert len(recorded_calls()) == 1
        assert seen[0][1] == []
        with capture_queries():
            rotated = [rope_of(model)(X) for _ in range(6)]
            assert [call.output for call in recorded_calls()] == rotated[2:]
        rope_of(model)(X)
        assert not recorded_calls()


def test_rope_modules_are_restored_when_the_last_context_ends():
    model = build("llama")
    before = [(layer.self_attn, dict(layer.self_attn), dict(vars(layer.self_attn))) for layer in model.layers]

    with suppress(ValueError), patch_rope(model):
        with patch_rope(model):
            assert all(not isinstance(layer.self_attn.rope, nn.RoPE) for layer in model.layers)
        assert not isinstance(rope_of(model), nn.RoPE)
        raise ValueError
    for attention, items, attributes in before:
        assert dict(attention) == items
        assert vars(attention) == attributes
