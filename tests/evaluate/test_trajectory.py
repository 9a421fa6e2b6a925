"""Answers that caches write themselves, against mlx-lm's own generation and NumPy."""

import json

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache
from zoo import build

from mlx_tq.__main__ import main
from mlx_tq.cli.inputs import load_text
from mlx_tq.config import EvictConfig
from mlx_tq.evaluate.arms import OFF, parse_arm
from mlx_tq.evaluate.teacher_forced import cut_chunks
from mlx_tq.evaluate.trajectory import Trajectories, compare_trajectories, run_trajectories
from mlx_tq.prompt_cache.compressed import compressed_attention
from mlx_tq.prompt_cache.compressed import make_prompt_cache as make_compressed

LENGTH, ANSWER, STEP = 160, 8, 80
REGIONS = {"sinks": 4, "window": 16}
ARMS = [OFF, *(parse_arm(name, **REGIONS) for name in ("q8/q8", "tq2/tq2"))]


@pytest.fixture(scope="module")
def prompts(embedded):
    return cut_chunks(embedded[1], load_text(), 2, LENGTH)


@pytest.fixture(scope="module")
def found(exact, prompts):
    return run_trajectories(exact[0], prompts, ARMS, answer=ANSWER, step=STEP)


def test_the_uncompressed_cache_writes_what_mlx_lm_writes(exact, prompts, found):
    for prompt, tokens in zip(prompts, found[0].tokens, strict=True):
        said = generate_step(mx.array(prompt), exact[0], max_tokens=ANSWER, prefill_step_size=STEP)
        assert tokens.tolist() == [token for token, _ in said]
    assert (found[0].kld == 0).all(), "the same passes over the same cache"
    assert 0 < found[1].kld.mean() < 1e-10, "another one rounds differently"
    assert (found[1].tokens == found[0].tokens).all()


def test_a_compressed_cache_writes_what_generate_writes(exact, prompts, found):
    model = exact[0]
    for prompt, tokens in zip(prompts, found[3].tokens, strict=True):
        with compressed_attention(model):
            options = {"prompt_cache": make_compressed(model, ARMS[2].config), "prefill_step_size": STEP}
            said = generate_step(mx.array(prompt), model, max_tokens=ANSWER, **options)
            assert tokens.tolist() == [token for token, _ in said]


def test_models_that_cannot_be_batched_write_one_answer_after_the_other():
    model, close = build("internlm3"), parse_arm("q8/q8", sinks=4, window=8, normalize=False)
    prompts = [np.random.default_rng(seed).integers(model.args.vocab_size, size=80).tolist() for seed in range(2)]
    reference, others = run_trajectories(model, prompts, [close], answer=ANSWER)
    for prompt, tokens in zip(prompts, reference.tokens, strict=True):
        assert tokens.tolist() == [token for token, _ in generate_step(mx.array(prompt), model, max_tokens=ANSWER)]
    assert (others.tokens == reference.tokens).all()


def test_each_answer_evicts_by_itself(exact, prompts):
    arm = parse_arm("q8/q8@50%", evict=EvictConfig("recency:trigger=16:granularity=1"), **REGIONS)
    _, both = run_trajectories(exact[0], prompts, [arm], answer=ANSWER, step=STEP)
    for number, prompt in enumerate(prompts):
        _, alone = run_trajectories(exact[0], [prompt], [arm], answer=ANSWER, step=STEP)
        assert (both.tokens[number] == alone.tokens[0]).all()
        assert np.allclose(both.kld[number], alone.kld[0], rtol=1e-3, atol=1e-8)


def test_divergence_is_along_the_answer_of_each_cache(exact, prompts, found):
    """As NumPy finds it in logits of both caches, which read the compressed cache's own answer."""
    model, read = exact[0], [*prompts[1], *found[3].tokens[1, :-1].tolist()]
    log_p = []
    with compressed_attention(model):
        for caches in (make_prompt_cache(model), make_compressed(model, ARMS[2].config)):
            steps = [read[start : min(start + STEP, LENGTH - 1)] for start in range(0, LENGTH - 1, STEP)]
            for step in steps:
                model(mx.array([step]), cache=caches)
            logits = [np.array(model(mx.array([[token]]), cache=caches))[0, 0] for token in read[LENGTH - 1 :]]
            x = np.array(logits, np.float64)
            log_p.append(
                x - np.log(np.exp(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True)) - x.max(-1, keepdims=True)
            )
    expected = (np.exp(log_p[0]) * (log_p[0] - log_p[1])).sum(-1)
    assert np.allclose(found[3].kld[1], expected, rtol=1e-3, atol=1e-8)
    assert found[3].kld.mean() > 10 * found[2].kld.mean() > 0


@pytest.mark.full
def test_answers_of_one_seed_use_the_same_random_numbers(exact, prompts):
    options = {"answer": ANSWER, "step": STEP, "temp": 1.0}
    first, again, close = run_trajectories(exact[0], prompts, [OFF, ARMS[1]], seed=3, **options)
    other, *_ = run_trajectories(exact[0], prompts, [], seed=4, **options)
    assert (first.tokens == again.tokens).all()
    assert (first.tokens != other.tokens).any()
    assert (first.tokens[0] != first.tokens[1]).any()
    assert (first.tokens == close.tokens).mean() > 0.5, "q8 rarely changes a draw"


def test_statistics_of_answers():
    reference = Trajectories(np.array([[1, 2, 3, 4], [5, 6, 7, 8], [1, 1, 1, 1]]), np.zeros((3, 4)))
    kld = np.array([[0.0, 0, 0, 4], [0, 0, 0, 0], [0, 0, 2, 0]])
    row = compare_trajectories("x", Trajectories(np.array([[1, 2, 9, 4], [5, 6, 7, 8], [2, 1, 1, 2]]), kld), reference)
    assert (row["answers"], row["tokens"], row["exact"], row["same_until"]) == (3, 4, 1, 2)
    shares = np.array([0.75, 1, 0.5])
    assert row["agreement"] == pytest.approx(100 * shares.mean())
    assert row["agreement_error"] == pytest.approx(100 * shares.std(ddof=1) / 3**0.5)
    means = np.array([1, 0, 0.5])
    assert (row["kld"], row["kld_error"]) == pytest.approx((0.5, means.std(ddof=1) / 3**0.5))
    assert row["kld_quarters"] == pytest.approx([0, 0, 2 / 3, 4 / 3])


@pytest.mark.full
def test_the_command(tmp_path, capsys):
    words = ["evaluate", "trajectory", "--profiles", "tq2/tq2", "--chunks", "2", "--length", "150", "--step", "64"]
    words += ["--answer-tokens", "8", "--temp", "0.7", "--dtype", "float32", "--kv-sinks", "4", "--kv-window", "16"]
    assert main([*words, "--json", str(tmp_path / "out.json")]) == 0
    out = capsys.readouterr().out
    assert "2 answers of 8 tokens" in out
    results = json.loads((tmp_path / "out.json").read_text())["results"]
    assert results["off"].items() >= {"agreement": 100, "exact": 2, "same_until": 8}.items()
    assert 0 < results["off"]["kld"] < 1e-9 < results["tq2/tq2"]["kld"]
    for flag, value, message in (
        ("--answer-tokens", "3", "must be 4 or more"),
        ("--length", "4090", "exceed the model's 4,096"),
        ("--length", "20", "never read a packed one"),
    ):
        assert main([*words, flag, value]) == 2
        assert message in capsys.readouterr().err
