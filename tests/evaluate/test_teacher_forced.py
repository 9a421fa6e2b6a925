from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from zoo import build

from mlx_tq.cli.inputs import load_text
from mlx_tq.errors import ConfigError
from mlx_tq.evaluate.arms import OFF, parse_arm
from mlx_tq.evaluate.standard_error import CLUSTERS, cut_clusters, standard_error
from mlx_tq.evaluate.teacher_forced import (
    TokenScores,
    check_steps,
    cut_chunks,
    divergence,
    perplexity,
    score_text,
)
from mlx_tq.prompt_cache.measurements import kl_divergence, log_probabilities

LENGTH, STEP = 352, 160
REGIONS = {"sinks": 16, "window": 32}


@pytest.fixture(scope="module")
def chunks(embedded):
    return cut_chunks(embedded[1], load_text(), 1, LENGTH)


@pytest.fixture(scope="module")
def scores(exact, chunks):
    arms = [OFF, *(parse_arm(name, **REGIONS) for name in ("q8/q8", "tq4/tq4", "tq2/tq2"))]
    return score_text(exact[0], chunks, arms, STEP)


def test_perplexity_of_off_is_what_numpy_finds_in_the_logits_of_mlx_lm(exact, chunks):
    model, (ids,) = exact[0], chunks
    cache, logits = make_prompt_cache(model), []
    for start in range(0, LENGTH - 1, STEP):
        step = model(mx.array(ids[start : min(start + STEP, LENGTH - 1)])[None], cache=cache)[0]
        logits.append(np.array(step.astype(mx.float32), dtype=np.float64))
    joined = np.concatenate(logits)
    shifted = joined - joined.max(axis=-1, keepdims=True)
    log_p = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    nll = -log_p[np.arange(STEP, LENGTH - 1), ids[STEP + 1 :]]

    (scores,) = score_text(model, chunks, [], STEP)
    row = perplexity("off", scores, scores.nll)
    assert row["tokens"] == len(nll) == LENGTH - 1 - STEP
    assert row["ppl"] == pytest.approx(np.exp(nll.mean()), rel=1e-5)
    error = standard_error(nll, cut_clusters([len(nll)]))
    assert row["ppl_error"] == pytest.approx(np.exp(nll.mean()) * error, rel=1e-4)
    assert row.items() >= {"delta": 0, "delta_error": 0, "packed": 0, "kept": 1, "rounds": 0}.items()
    assert row["nbytes"] == sum(layer.nbytes for layer in cache)
    assert row["seconds"] > 0


def test_fewer_bits_diverge_more_and_a_second_uncompressed_cache_by_rounding(scores):
    control, q8, tq4, tq2 = (divergence("", score) for score in scores[1:])
    assert 0 < control["kld"] < 1e-10
    assert control["top1"] == 100
    assert 1e4 * control["kld"] < q8["kld"] < tq4["kld"] / 2 < tq2["kld"] / 10
    assert tq2["kld"] > 0.005
    assert q8["top1"] > tq2["top1"]
    assert q8["kld_median"] < q8["kld_99"]


def test_the_packed_share_and_the_bytes_are_counted(scores):
    attended = sum(range(STEP + 1, LENGTH))
    body = [(start - 32) // 32 * 32 - 16 for start in (STEP, 2 * STEP)]
    packed = body[0] * STEP + body[1] * (LENGTH - 1 - 2 * STEP)
    assert scores[2].packed == pytest.approx(packed / attended)
    assert scores[0].packed == 0
    assert scores[4].nbytes < scores[3].nbytes < scores[2].nbytes < scores[0].nbytes


@pytest.mark.full
def test_half_precision_rounds_by_more_than_q8_loses(tiny, embedded):
    """Which the floor shows, as float32 shows what q8 loses."""
    parts = cut_chunks(embedded[1], load_text(), 1, LENGTH)
    found = {}
    for dtype in (mx.float32, mx.bfloat16):
        tiny.set_dtype(dtype)
        found[dtype] = [
            score.kld.mean() for score in score_text(tiny, parts, [OFF, parse_arm("q8/q8", **REGIONS)], STEP)
        ]
    tiny.set_dtype(mx.float32)
    _, floor, q8 = found[mx.float32]
    _, rough_floor, rough_q8 = found[mx.bfloat16]
    assert 0 < floor < q8 / 100
    assert q8 < rough_floor / 10
    assert rough_q8 == pytest.approx(rough_floor, rel=0.5)


def scored(kld, nll=0.0):
    ones, clusters = np.ones(len(kld), bool), cut_clusters([len(kld)])
    return TokenScores(nll + np.zeros(len(kld)), kld, ones, ones, clusters, packed=0.5, nbytes=0)


def test_errors_of_differences_are_paired():
    rng = np.random.default_rng(1)
    baseline = rng.normal(3, 2, 1000)
    row = perplexity("x", scored(np.zeros(1000), baseline + rng.normal(0.01, 0.001, 1000)), baseline)
    assert row["delta"] == pytest.approx(100 * (np.exp(0.01) - 1), abs=0.02)
    assert row["delta_error"] < 0.01 < row["ppl_error"]
    row = divergence("x", scored(baseline + rng.normal(0.01, 0.001, 1000)), scored(baseline))
    assert row["kld_change"] == pytest.approx(0.01, abs=1e-3)
    assert row["kld_change_error"] < row["kld_error"] / 100


def test_the_text_is_cut_into_enough_clusters():
    assert cut_clusters([100] * CLUSTERS).tolist() == np.repeat(range(CLUSTERS), 100).tolist()
    parts = np.unique(cut_clusters([600, 600, 600]), return_counts=True)
    assert (len(parts[0]), set(parts[1])) == (18, {100}), "none spans two chunks"
    assert len(np.unique(cut_clusters([111]))) == 3, "of 32 tokens at least"
    assert len(np.unique(cut_clusters([5]))) == 2, "one would give no error"


def test_an_error_by_clusters_covers_tokens_that_depend_on_each_other():
    """Of 2,000 texts of 20 sequences, whose tokens share a term and follow the one before."""
    rng = np.random.default_rng(0)
    shape, sequences = (2000, 20, 64), np.repeat(range(20), 64)
    noise = rng.normal(size=shape)
    for token in range(1, shape[2]):
        noise[:, :, token] += 0.6 * noise[:, :, token - 1]
    texts = (noise + rng.normal(size=(2000, 20, 1))).reshape(2000, -1)
    true = texts.mean(axis=1).std()
    by_cluster = np.array([standard_error(text, sequences) for text in texts])
    naive = np.array([standard_error(text) for text in texts])
    assert np.sqrt(np.square(by_cluster).mean()) == pytest.approx(true, rel=0.05)
    assert naive.mean() < true / 3
    independent = rng.normal(size=1280)
    assert standard_error(independent) == pytest.approx(independent.std(ddof=1) / 1280**0.5)
    assert standard_error(independent, sequences) == pytest.approx(standard_error(independent), rel=0.4)


def test_divergence_follows_its_definition():
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 3, (2, 5, 40))
    p, q = (np.exp(x) / np.exp(x).sum(axis=-1, keepdims=True) for x in logits)
    expected = (p * np.log(p / q)).sum(axis=-1)
    np.testing.assert_allclose(np.array(kl_divergence(mx.array(np.log(p)), mx.array(np.log(q)))), expected, rtol=1e-4)
    close = logits[0] + rng.normal(0, 1e-4, (5, 40))
    close -= np.log(np.exp(close).sum(axis=-1, keepdims=True))
    expected = (p * (np.log(p) - close)).sum(axis=-1)
    assert expected.max() < 1e-7, "below the rounding of a log-probability"
    np.testing.assert_allclose(np.array(kl_divergence(mx.array(np.log(p)), mx.array(close))), expected, rtol=0.05)
    apart = mx.log(mx.array([[1.0, 1e-38], [1e-38, 1.0]])) - mx.array([[0.0, 100.0], [0.0, 0.0]])
    assert float(kl_divergence(apart[0], apart[1])) == pytest.approx(-np.log(1e-38), rel=1e-3), "exp(187) overflows"


def test_logits_in_half_precision_become_log_probabilities_in_float32():
    model, ids = build("llama", mx.bfloat16), list(range(5, 37))
    logits = model(mx.array([ids]), cache=make_prompt_cache(model))[0]
    assert logits.dtype == mx.bfloat16
    expected = np.array(logits.astype(mx.float32), dtype=np.float64)
    expected -= np.log(np.exp(expected).sum(axis=-1, keepdims=True))
    found = log_probabilities(model, ids, make_prompt_cache(model))
    np.testing.assert_allclose(np.array(found), expected, atol=1e-5)


def test_a_pass_that_would_measure_nothing_is_refused(embedded):
    model, tokenizer = embedded
    parts = cut_chunks(tokenizer, load_text(), 3, 50)
    assert [len(part) for part in parts] == [50, 50, 50]
    tokens = tokenizer.encode(load_text()[:2000], add_special_tokens=False)
    assert [token for part in parts for token in part] == tokens[:150]
    with pytest.raises(ConfigError, match="chunks is 0"):
        cut_chunks(tokenizer, "text", 0, 10)
    with pytest.raises(ConfigError, match=r"the text has \d+ tokens; 3 chunks of 100 need 300"):
        cut_chunks(tokenizer, "a few words", 3, 100)
    balanced = parse_arm("balanced")
    for length, step, message in (
        (5000, 512, "the model allows 4,096 positions"),
        (512, 512, "--length above 513"),
        (2048, 0, "step is 0"),
        (300, 128, "never read a packed one with sinks 128 and window 128"),
    ):
        with pytest.raises(ConfigError, match=message):
            score_text(model, [[1] * length], [balanced], step)
    check_steps(model, 513 + 200, 256, [balanced])
    check_steps(model, 300, 128, [OFF])
    short = parse_arm("balanced", sinks=8, window=16)
    with pytest.raises(ConfigError, match="--kv-normalize off: normalized keys pack none before 136 tokens"):
        check_steps(model, 200, 128, [short])
    check_steps(model, 200, 128, [replace(short, config=replace(short.config, normalize=False))])
