"""Compaction of a document: which rows are kept, and that questions after it are answered over those."""

import copy

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from zoo import build

import mlx_tq
from mlx_tq.config import EvictConfig, KVConfig
from mlx_tq.errors import ConfigError
from mlx_tq.prompt_cache.compressed import compressed_attention, make_prompt_cache
from mlx_tq.prompt_cache.recording import record_attention
from mlx_tq.prompt_cache.row_weights import row_weights
from mlx_tq.session.compaction import choose_rows
from mlx_tq.session.restore import prefill

MODEL = build("llama")
IDS = np.random.default_rng(5).integers(0, 160, 400).tolist()
CONFIG = KVConfig(key="q8", value="q8", sinks=4, window=24, normalize=False)


class Tokenizer:
    """Of the zoo's models, which have none."""

    def encode(self, text, *, add_special_tokens):
        assert not add_special_tokens
        return [7, 8, 9]


def document(config=CONFIG, ids=IDS):
    caches = make_prompt_cache(MODEL, config)
    with compressed_attention(MODEL):
        prefill(MODEL, caches, ids, 128)
    return caches


def compacted(share, caches=None):
    return mlx_tq.compact_prompt_cache(MODEL, Tokenizer(), caches or document(), IDS, share)


def logits(caches, ids=(3, 4, 5)):
    with compressed_attention(MODEL):
        return MODEL(mx.array([ids]), cache=copy.deepcopy(caches))


@pytest.mark.parametrize("sinks", [None, np.linspace(-2.0, 3.0, 4)], ids=["plain", "attention-sink logits"])
def test_weights_are_those_of_float64(sinks):
    (attended, *_) = record_attention(MODEL, IDS[:90], 30)
    assert attended.queries.shape[1] == 4
    logits = None if sinks is None else mx.array(sinks.astype(np.float32))
    weights = np.array(row_weights(attended.queries, attended.keys, attended.scale, logits))
    q, k = (np.array(x[0].astype(mx.float32), np.float64) for x in (attended.queries, attended.keys))
    extra = np.zeros(4) if sinks is None else np.exp(sinks)
    for head, keys in enumerate(k):
        best = np.zeros(90)
        for query_head, of_sink in np.split(np.array([*zip(q, extra, strict=True)], object), len(k))[head]:
            for number, query in enumerate(query_head):
                scores = np.exp(keys[: 61 + number] @ query * attended.scale)
                best[: 61 + number] = np.maximum(best[: 61 + number], scores / (scores.sum() + of_sink))
        np.testing.assert_allclose(weights[head], best, rtol=1e-4, atol=1e-7)


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 6)), min_size=1, max_size=4), st.data())
def test_the_best_rows_of_all_heads_are_chosen(shapes, data):
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    weights = [rng.random(shape) for shape in shapes]
    total = sum(layer.size for layer in weights)
    count = data.draw(st.integers(0, total))
    chosen = choose_rows(weights, count)
    kept = [
        w
        for layer, rows in zip(weights, chosen, strict=True)
        for head, index in zip(layer, rows, strict=True)
        for w in head[index]
    ]
    assert sorted(kept) == sorted(np.concatenate([layer.reshape(-1) for layer in weights]))[total - count :]
    assert all((np.diff(index) > 0).all() for rows in chosen for index in rows)


@pytest.mark.parametrize("share", [0.25, 0.6])
def test_the_share_counts_all_rows(share):
    caches = compacted(share)
    held = [len(positions) for layer in caches for positions in layer.positions]
    assert share - 1 / sum(held) <= sum(held) / (len(held) * len(IDS)) <= share
    assert len({*held}) > 2, "heads keep what they need"
    assert sum(layer.nbytes for layer in caches) < (share + 0.25) * sum(layer.nbytes for layer in document())


def test_a_head_whose_sink_takes_all_weight_keeps_no_packed_rows():
    model = build("gpt_oss")
    attention = model.layers[1].self_attn
    attention.sinks = mx.array([40.0, 40.0, 0.0, 0.0])  # of the query heads of two KV heads
    caches = make_prompt_cache(model, CONFIG)
    with compressed_attention(model):
        prefill(model, caches, IDS, 128)
    result = mlx_tq.compact_prompt_cache(model, Tokenizer(), caches, IDS, 0.4)
    first, second = map(len, result[1].positions)
    assert first == len(IDS) - caches[1].packed_tokens < second


def test_all_rows_answer_as_before():
    before = document()
    assert mx.allclose(logits(compacted(1.0)), logits(before), atol=2e-5)
    state = [layer.state for layer in before]
    compacted(0.3, before)
    assert all(mx.array_equal(layer.state["rows"], old["rows"]) for layer, old in zip(before, state, strict=True)), (
        "what is compacted is a copy"
    )


def test_a_saved_document_is_asked_again(tmp_path):
    caches = compacted(0.4)
    mlx_tq.save_prompt_cache(tmp_path / "x.safetensors", caches, model=MODEL, config=CONFIG)
    loaded = mlx_tq.load_prompt_cache(tmp_path / "x.safetensors", model=MODEL, config=CONFIG).caches
    assert mx.array_equal(logits(loaded), logits(caches))
    with compressed_attention(MODEL):
        prefill(MODEL, loaded, IDS[:100], 32)
        prefill(MODEL, caches, IDS[:100], 32)
    assert mx.array_equal(logits(loaded), logits(caches))


def test_what_cannot_be_compacted_is_named():
    evicting = KVConfig(key="q8", value="q8", evict=EvictConfig("knorm", 4096, "off"))
    for caches, ids, share, says in (
        (make_prompt_cache(MODEL, profile="off"), IDS, 0.5, "which the profile off does not make. Use another profile"),
        (document(evicting), IDS, 0.5, r"--kv-evict keeps some of them\. Drop it"),
        (document(KVConfig(key="tq4~tq3", value="q8")), IDS, 0.5, "one key format, .* Use --kv-key q8"),
        (document(), IDS[:9], 0.5, "hold 400 tokens, not the 9 of the document"),
        (document(), IDS, 1.5, "above 0, and at most 1"),
        (document(), IDS, 0.05, r"rows are in full precision, which is more than the 5% to keep\. Lower --kv-sinks"),
        (document(ids=IDS * 6), IDS * 6, 0.5, r"takes 4,803 positions, and the model allows .* Use a shorter text"),
    ):
        with pytest.raises(ConfigError, match=says):
            mlx_tq.compact_prompt_cache(MODEL, Tokenizer(), caches, ids, share)
