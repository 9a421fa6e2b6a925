"""Shadow mode: answers are the model's own, and the report is what a compressed cache would have done."""

import copy
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import stream_generate
from zoo import build

from mlx_tq import EvictConfig, KVConfig, Session, compressed_attention, make_prompt_cache
from mlx_tq.errors import ConfigError
from mlx_tq.prompt_cache.compressed import plan_caches
from mlx_tq.session.shadow_mode import Shadow

CONFIG = KVConfig(key="tq3", value="tq3", sinks=8, window=8, normalize=False)
EVICT = EvictConfig("recency:trigger=8:granularity=1", 96, "off")
OFF = KVConfig("fp16", "fp16")
SAID = ("The access code is 417295. " * 8, "What is the access code?")


def prompt(count):
    return [(7 * i * i + 3 * i) % 100 for i in range(count)]


def answered(model, tokenizer, ids, caches, count=12):
    return list(stream_generate(model, tokenizer, ids, max_tokens=count, prompt_cache=caches))


@pytest.mark.parametrize("evict", [pytest.param(None, marks=pytest.mark.full), EVICT], ids=["all stay", "evicts"])
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gpt_oss"])
def test_the_answer_is_the_models_own(name, evict, exact):
    model, tokenizer, ids = build(name), exact[1], prompt(180)
    shadow = Shadow(model, plan_caches(model, KVConfig(**{**vars(CONFIG), "evict": evict})), every=4)
    with compressed_attention(model):
        own = [reply.token for reply in answered(model, tokenizer, ids, make_prompt_cache(model, OFF))]
        shadow.begin(ids[-1], len(ids) - 1)
        said = []
        for reply in stream_generate(model, tokenizer, ids, max_tokens=12, prompt_cache=shadow.caches):
            shadow.token(reply.token, reply.text, reply.logprobs)
            said.append(reply.token)
    report = shadow.report()
    assert said == own
    assert report.comparisons in (3, 4)
    assert report.packed >= 60
    assert all(-1 <= layer.least_cosine <= layer.cosine <= 1 for layer in report.layers)
    assert all(0 < layer.kld <= layer.most_kld for layer in report.layers)


def test_only_selected_tokens_are_compared(exact):
    """What an index hides from a query is hidden from both caches."""
    model, tokenizer, ids = build("minimax_m3_vl"), exact[1], prompt(180)
    shadow = Shadow(model, plan_caches(model, replace(CONFIG, key="q8", value="q8")), every=1)
    with compressed_attention(model):
        shadow.begin(ids[-1], len(ids) - 1)
        for reply in stream_generate(model, tokenizer, ids, max_tokens=6, prompt_cache=shadow.caches):
            shadow.token(reply.token, reply.text, reply.logprobs)
    report = shadow.report()
    assert len(report.layers) == 3
    assert all(layer.least_cosine > 0.999 and layer.most_kld < 1e-3 for layer in report.layers)


def test_weights_and_outputs_against_numpy(exact):
    """In float64, from the rows of both caches."""
    model, tokenizer, ids = build("llama"), exact[1], prompt(150)
    shadow = Shadow(model, plan_caches(model, CONFIG), every=1)
    heard = []
    with compressed_attention(model):
        answered(model, tokenizer, ids, shadow.caches, 4)
        cache = shadow.caches[0]
        view = cache.keys_and_values()[0].view
        queries = mx.random.normal((1, 4 * view.keys.shape[1], 1, view.keys.shape[3]))
        found = type(view)(view.compressed, view.keys, view.values, heard, cache.positions)
        found.attend(queries, 0.1, None, None)
    (cosine, divergence), groups = np.array(heard[0]), 4
    for head in range(queries.shape[1]):
        query = np.array(queries[0, head, 0], np.float64)
        outputs, weights = [], []
        for keys, values in ((view.keys, view.values), view.compressed.materialize()):
            scores = 0.1 * np.array(keys[0, head // groups], np.float64) @ query
            weights.append(np.exp(scores - scores.max()) / np.exp(scores - scores.max()).sum())
            outputs.append(weights[-1] @ np.array(values[0, head // groups], np.float64))
        exactly = (weights[1] * np.log(weights[1] / weights[0])).sum()
        assert divergence[head] == pytest.approx(exactly, rel=1e-3, abs=1e-6)
        cosines = outputs[0] @ outputs[1] / np.linalg.norm(outputs[0]) / np.linalg.norm(outputs[1])
        assert cosine[head] == pytest.approx(cosines, abs=1e-5)


def test_predictions_are_those_of_a_compressed_cache(exact):
    """The model's own cache prefilled the prompt."""
    model, tokenizer, ids = build("llama"), exact[1], prompt(180)
    shadow = Shadow(model, plan_caches(model, CONFIG), every=1)
    shadow.begin(ids[-1], len(ids) - 1)
    with compressed_attention(model):
        reply = next(stream_generate(model, tokenizer, ids, max_tokens=8, prompt_cache=shadow.caches))
        shadow.token(reply.token, reply.text, reply.logprobs)
        caches = make_prompt_cache(model, CONFIG)
        for shadowed, cache in zip(shadow.caches, caches, strict=True):
            view = shadowed.keys_and_values()[0].view
            keys, values = (part[:, :, : len(ids) - 1] for part in (view.keys, view.values))
            cache.append(keys, values)
        logits = model(mx.array([ids[-1:]]), cache=caches)[0, -1]
    compressed_log, own_log = (np.array(x, np.float64) for x in (logits - mx.logsumexp(logits), reply.logprobs))
    expected = (np.exp(own_log) * (own_log - compressed_log)).sum()
    assert shadow.report().tokens[0].position == len(ids)
    assert shadow.report().kld == pytest.approx(expected, rel=1e-3)


def test_copies_go_on_as_the_model_would(exact):
    model, tokenizer, ids = build("llama"), exact[1], prompt(150)
    shadow, own = Shadow(model, plan_caches(model, CONFIG), every=2), make_prompt_cache(model, OFF)
    with compressed_attention(model):
        for caches in (shadow.caches, own):
            answered(model, tokenizer, ids, caches, 1)
        said = [answered(model, tokenizer, prompt(9), each, 6) for each in (copy.deepcopy(shadow.caches), own)]
    assert [reply.token for reply in said[0]] == [reply.token for reply in said[1]]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"shadow": 0}, "1 or more"),
        ({"config": KVConfig(key="tq4~tq3")}, "one format"),
        ({"config": KVConfig(evict=EvictConfig(recall=96))}, "--kv-recall off"),
        ({"config": OFF}, "nothing is compressed"),
        ({"prefix_cache": "auto"}, "drop it"),
        ({"prompt_lookup": "on"}, 'shadow and prompt_lookup="on" cannot be combined'),
    ],
)
def test_what_cannot_be_shadowed(changes, says, exact, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = changes.pop("config", CONFIG)
    with pytest.raises(ConfigError, match=says):
        Session(*exact, config, **{"shadow": 8, **changes})


def test_a_conversation_says_the_same_and_is_not_saved(exact, tmp_path):
    said, evicts = [], replace(CONFIG, evict=replace(EVICT, recall="auto"))
    for every in (None, 4):
        with Session(*exact, evicts if every else OFF, max_tokens=8, shadow=every) as session:
            said.append(["".join(session.respond(text)) for text in SAID])
            if every:
                assert session.shadow.report().comparisons
                assert not session.config.evict.recalls  # auto is off where nothing has left
                with pytest.raises(ConfigError, match="cannot be saved"):
                    session.save(tmp_path / "conversation.safetensors")
    assert said[0] == said[1]
