"""Calibration for eviction: collected, saved, used and refused; and evaluations that evict."""

import random
import re
import time
from itertools import pairwise

import mlx.core as mx
import numpy as np
import pytest
from kernel_cache import make_cache_folder
from processes import read_until
from smollm2 import needs_smollm2

from benchmarks.studies.needle_kinds import KINDS as NEEDLES
from mlx_tq.cli.head_calibration import measure_head_scores, watch_repetition
from mlx_tq.cli.inputs import load_text
from mlx_tq.cli.model_calibration import KINDS, build_question_scenes, calibrate_on_text, collect_queries
from mlx_tq.config import EvictConfig, KVConfig
from mlx_tq.kernels import backend
from mlx_tq.kernels.gpu import gpu_backend
from mlx_tq.models import fingerprint, load
from mlx_tq.policies.calibration import load_calibration
from mlx_tq.prompt_cache.compressed import plan_caches
from mlx_tq.prompt_cache.measurements import find_head_scores
from mlx_tq.prompt_cache.recording import record_attention
from mlx_tq.prompt_cache.row_weights import repetition

from .tools import FLOAT32, facts, refused, zoo_model

TRI = ("--kv-evict", "triattention")
REGIONS = ("--kv-sinks", 16, "--kv-window", 32)
TEXT, QUESTION = facts(60)


def test_calibrate_and_use(cli, tmp_path):
    foreign, generate = tmp_path / "foreign.safetensors", ("generate", "-p", "hi", *TRI, "--kv-calibration")
    refused(cli(*generate, "/nope"), "there is no calibration file /nope", code=1)
    mx.save_safetensors(str(foreign), {"x": mx.zeros(1)}, {"format": "mlx_tq query statistics", "version": "2"})
    refused(cli(*generate, foreign), "was made with another model", code=1)
    path, text = tmp_path / "stats", tmp_path / "text.txt"  # without a suffix, which is not added
    text.write_text(TEXT, encoding="utf-8")
    result = cli("calibrate", *FLOAT32, "--text-share", 1, "--text", text, "--tokens", 300, "-o", path)
    assert result == (0, "", f"Saved the calibration (300 tokens of text) to {path}\n")
    words = (*TRI, *REGIONS, "--kv-budget", 300, "--prefill-step-size", 256, "--kv-calibration", path)
    answer = cli("generate", *FLOAT32, "-p", TEXT + QUESTION, "-m", 20, *words, "--json").json
    assert answer["plan"]["eviction"]["calibration"] == str(path)
    assert answer["stats"]["cache"]["rounds"] > 0


@pytest.mark.full
def test_a_calibration_is_for_one_compute_type(cli, tmp_path):
    folder, path = zoo_model(tmp_path / "tiny", "llama"), tmp_path / "stats.safetensors"
    words = ("--text-share", 1, "--tokens", 90, "--dtype", "bfloat16", "-o", path)
    assert cli("calibrate", "--model", folder, *words).code == 0
    words = ("evaluate", "divergence", "--model", folder, "--profiles", "balanced", "--chunks", 1, "--length", 200)
    words = (*words, "--step", 64, "--kv-sinks", 4, "--kv-window", 24, *TRI, "--kv-budget", 40, "--json", "-")
    narrow = cli(*words, "--kv-calibration", path, "--dtype", "bfloat16").json
    assert narrow["settings"]["dtype"] == "bfloat16"
    refused(cli(*words, "--kv-calibration", path), "was made with another model", code=1)
    wide = cli(*words, "--kv-evict", "triattention:warmup=32:calibration=text").json
    assert wide["settings"]["dtype"] == "float32"
    assert wide["results"]["balanced"]["kld"] != narrow["results"]["balanced"]["kld"]


def test_calibrate_on_questions_and_text(cli, tmp_path):
    """The center of the first layer is the mean query of the tokens that count, which depends on nothing else."""
    folder, path = zoo_model(tmp_path / "tiny", "llama", max_position_embeddings=512), tmp_path / "stats.safetensors"
    model, tokenizer = load(str(folder))
    layer, (scene,) = model.layers[0], build_question_scenes(tokenizer, load_text(), 1, 448)

    def mean_query(ids):
        return layer.self_attn.q_proj(layer.input_layernorm(model.model.embed_tokens(mx.array(ids)))).mean(axis=0)

    turns = [token for turn in scene.turns for token in turn]
    for words, share, text in (((), 0.25, " and 25% text"), (("--text-share", 0), 0, "")):
        result = cli("calibrate", "--model", folder, "--tokens", 700, "-o", path, *words)
        source = f"{len(turns)} tokens of questions and answers{text}"
        assert result == (0, "", f"Saved the calibration ({source}) to {path}\n")
        center = load_calibration(path, fingerprint(model)).layers[0].center
        expected = (1 - share) * mean_query(turns) + share * mean_query(scene.text[4:])
        assert mx.allclose(center.reshape(-1), expected, atol=1e-5)
    few = refused(cli("calibrate", "--model", folder, "--tokens", 40, "-o", path), "has no room for needles")
    assert "--kv" not in few


def test_a_model_is_calibrated_once(cli, tmp_path, monkeypatch):
    """A model that cannot be calibrated gets a warning, and its plan says that the policy learns from the prompt."""
    backend.prepare()  # before there is no folder for kernels
    folder, cache = zoo_model(tmp_path / "tiny", "llama", max_position_embeddings=1024), tmp_path / "cache"
    plain = ("generate", "--model", folder, "-p", "hi", "-m", 1, "--json", *TRI, *REGIONS)
    words = (*plain, "--kv-calibration", "auto")
    blind = "the first 1,024 tokens (no calibration file: evicts without knowledge of later questions)"

    def calibration(result):
        return result.json["plan"]["eviction"]["calibration"]

    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    result = cli(*words)
    assert re.search(r"warning: calibration of eviction failed \(.*may evict what a question needs", result.err)
    assert calibration(result) == blind
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    text = cli(*plain, "--kv-calibration", "text")
    assert (calibration(text), "Saved" in text.err) == ("the first 1,024 tokens", False)
    first, again = cli(*words), cli(*words)
    (path,) = (cache / "mlx_tq").iterdir()
    assert calibration(first) == calibration(again) == f"questions and text ({path})"
    assert f"Saved the calibration to {path}" in first.err
    assert "Saved" not in again.err
    assert calibration(cli(*plain)) == calibration(first)
    assert cli("calibrate", "--model", folder, "--tokens", 700).err.endswith(f" to {path}\n")
    short = zoo_model(tmp_path / "short", "qwen3", max_position_embeddings=64)
    result = cli(*words[:2], short, *words[3:])
    assert "has no room for needles" in result.err
    assert calibration(result) == blind


@pytest.mark.full
@pytest.mark.skipif(gpu_backend() is not None, reason="a GPU calibrates in seconds")
def test_on_a_cpu_nothing_is_calibrated_unless_it_is_asked_for(cli, start, tmp_path, monkeypatch):
    folder = zoo_model(tmp_path / "tiny", "llama", max_position_embeddings=1024)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    words = ("--model", folder, *TRI, *REGIONS)
    says = (
        "tiny is not calibrated for eviction, which takes minutes on a CPU: triattention learns from the prompt. "
        "--kv-calibration auto calibrates it, once."
    )
    assert says in cli("generate", "-p", "hi", "-m", 1, *words).err.splitlines()
    assert not (tmp_path / "cache" / "mlx_tq").exists()
    make_cache_folder(tmp_path / "cache")
    server = start("server", "--port", 0, *words, "--kv-calibration", "auto")
    log = read_until(server.stderr.fileno(), "listening on").splitlines()
    title = "Calibrating eviction for tiny (first run only)"
    first, *shares = (line for line in log if line.startswith(title))
    assert re.fullmatch(r"loading tiny; requests to http://127\.0\.0\.1:\d+ are answered when it is ready", log[0])
    assert first == title
    assert len(shares) > 5
    assert all(re.fullmatch(r": \d+%, about \d+ s left", line.removeprefix(title)) for line in shares)
    assert [line for line in log if line.startswith("Saved the calibration to ")]


def test_progress_has_a_total_from_the_first_step(tmp_path):
    model, tokenizer = load(str(zoo_model(tmp_path / "tiny", "llama", max_position_embeddings=512)))
    calls = []
    collect_queries(model, tokenizer, load_text(), 448, progress=lambda *call: calls.append(call))
    dones, totals = zip(*calls, strict=True)
    assert dones[0] == 0
    assert dones[-1] == totals[0] > 448
    assert list(dones) == sorted(set(dones))
    assert len(set(totals)) == 1
    assert dones[1] < 0.05 * totals[0]


@pytest.mark.full
def test_steps_of_a_slow_model_are_short(tmp_path):
    """Ctrl-C is noticed between them."""
    model, tokenizer = load(str(zoo_model(tmp_path / "tiny", "llama", max_position_embeddings=512)))
    plan_caches(model, KVConfig())  # probes the model, once
    layer, steps = model.layers[0], []

    class Slow(type(layer)):
        def __call__(self, x, *args, **options):
            steps.append(x.shape[1])
            time.sleep(0.03 * x.shape[1])
            return super().__call__(x, *args, **options)

    layer.__class__ = Slow
    ids = tokenizer.encode(load_text(), add_special_tokens=False, verbose=False)[:60]
    queries = calibrate_on_text(model, ids)
    assert (sum(steps), queries.tokens) == (60, 56)
    assert max(steps) <= 16  # half a second


@pytest.mark.full
@needs_smollm2
@pytest.mark.parametrize(("dequantize", "dtype"), [(True, None), (False, None), (True, "float16"), (True, "bfloat16")])
def test_smollm2_is_shipped_calibrated(dequantize, dtype):
    model, _ = load("smollm2", dequantize=dequantize, dtype=dtype)
    source = plan_caches(model, KVConfig(evict=EvictConfig())).eviction.source
    assert re.fullmatch(r"questions and text \(.*/assets/queries/queries-smollm2\.safetensors\)", source)

    assert find_head_scores(fingerprint(model)) is not None


@pytest.mark.full
def test_the_heads_of_a_model_are_measured_once(cli, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = zoo_model(tmp_path / "tiny", "llama", max_position_embeddings=4096)
    words = ("generate", "--model", folder, "-p", "hi", "-m", 1, "--json", "--kv-evict", "heads")
    first, again = (cli(*words, "--kv-budget", "50%@2000") for _ in range(2))
    (path,) = (tmp_path / "cache" / "mlx_tq").glob("heads-*.json")
    assert [f"Saved the scores of its heads to {path}" in result.err for result in (first, again)] == [True, False]
    eviction, again_eviction = (result.json["plan"]["eviction"] for result in (first, again))
    assert eviction == again_eviction | {"archive_limit": eviction["archive_limit"]}  # a part of the free space
    measured = path.read_bytes()
    path.unlink()
    assert cli("calibrate", "--model", folder, "--heads").code == 0
    assert path.read_bytes() == measured


def softmax(scores):
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def test_scores_of_heads_are_as_in_float64(tmp_path):
    model, tokenizer = load(str(zoo_model(tmp_path / "tiny", "llama", max_position_embeddings=4096)))
    text, count = load_text(), 300
    ids = tokenizer.encode(text, add_special_tokens=False, verbose=False)[:count]
    repeat = repetition(model, tokenizer, ids)
    weights, changes, outputs = [], [], []
    for layer in record_attention(model, ids + repeat, len(repeat)):
        queries, keys, values = (np.array(array[0], np.float64) for array in (layer.queries, layer.keys, layer.values))
        groups = queries.reshape(len(keys), -1, *queries.shape[1:])
        distance = np.arange(count, count + len(repeat))[:, None] - np.arange(count + len(repeat))
        full, near = (
            softmax(np.where(visible, groups @ keys[:, None].swapaxes(2, 3) * layer.scale, -np.inf))
            for visible in (distance >= 0, (distance >= 0) & ((distance < 160) | (np.arange(distance.shape[1]) < 32)))
        )
        weights.append(full.max(axis=(1, 2))[:, :count])
        outputs.append(((full @ values[:, None]) ** 2).sum())
        changes.append((((full - near) @ values[:, None]) ** 2).sum(axis=(1, 2, 3)) / sum(outputs))
    np.testing.assert_allclose(watch_repetition(model, tokenizer, text, count)[1], changes, rtol=1e-4)
    best = np.stack(weights) >= np.quantile(weights, 0.9)
    ranks = [[(every < each).mean() for each in every.flat] for every in (best.mean(axis=2), np.stack(changes))]
    measured = measure_head_scores(model, tokenizer, text, count)
    assert measured.tokens == count
    assert np.ravel(measured.scores).tolist() == np.mean(ranks, axis=0).tolist()


@pytest.mark.parametrize(("flag", "least"), [("--losses", 512), ("--heads", 1024)])
def test_losses_and_heads_are_measured_on_the_text_that_is_named(cli, tmp_path, monkeypatch, flag, least):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "text").write_text("two words", encoding="utf-8")
    refused(cli("calibrate", flag, "--text", tmp_path / "text"), f"measured on {least} tokens; the text has ")


@pytest.mark.parametrize("dtype", [None, *(pytest.param(x, marks=pytest.mark.full) for x in ("float32", "float16"))])
def test_the_bundled_model_is_shipped_calibrated(dtype):
    source = plan_caches(load(dtype=dtype)[0], KVConfig(evict=EvictConfig())).eviction.source
    assert re.fullmatch(r"questions and text \(.*/assets/queries/queries-needle\.safetensors\)", source)
    assert find_head_scores(fingerprint(load(dtype=dtype)[0])) is not None


def test_calibration_shares_no_wording_with_any_needle():
    """No word but the commonest, and no two in a row."""
    common = {"the", "is", "in", "for", "of", "with", "and", "me", "what"}

    def wording(facts):
        texts = [re.findall(r"[a-z]+", text.lower()) for fact in facts for text in (fact.sentence, fact.question)]
        pairs = {pair for words in texts for pair in pairwise(words)}
        return pairs | ({(word,) for words in texts for word in words if word not in common})

    rng = random.Random(0)
    calibration = wording(make(rng) for make in KINDS for _ in range(300))
    needles = wording(fact for make in NEEDLES.values() for _ in range(300) for fact in make(rng, 0.5)[0])
    assert min(len(calibration), len(needles)) > 60
    assert not calibration & needles


@pytest.mark.full
def test_an_evaluation_that_evicts_nothing_is_an_error(cli):
    words = ("--chunks", 1, "--length", 400, "--step", 128, "--profiles", "off,balanced")
    reading = ("evaluate", "perplexity", *FLOAT32, *words, *REGIONS)
    text = (*TRI, "--kv-calibration", "text")
    refused(cli(*reading, *text), "balanced evicted nothing in 399 tokens, with a budget of 50%, a warm-up of 1,024")
    asking = ("evaluate", "needle", *FLOAT32, "--lengths", 500, "--depths", "start", "--seeds", 1)
    refused(cli(*asking, "--profiles", "balanced", *REGIONS, *text), "balanced evicted nothing in")
    assert cli(*reading, "--kv-evict", "triattention:warmup=100:calibration=text", "--kv-budget", 80).code == 0
