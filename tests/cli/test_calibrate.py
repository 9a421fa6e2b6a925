"""Statistics for eviction: gathered, used, refused; and evaluations that evict."""

import random
import re
from itertools import pairwise

import mlx.core as mx

from benchmarks.studies.needle_kinds import KINDS as NEEDLES
from mlx_tq.cli import calibration_questions
from mlx_tq.cli.calibration_questions import build_question_scenes
from mlx_tq.cli.haystack import load_text
from mlx_tq.config import EvictConfig, KVConfig
from mlx_tq.models import fingerprint, load
from mlx_tq.policies.calibration import load_calibration
from mlx_tq.prompt_cache.compressed import plan_caches

from .tools import facts, refused, zoo_model

TRI = ("--kv-evict", "triattention")
REGIONS = ("--kv-sinks", 16, "--kv-window", 32)
TEXT, QUESTION = facts(60)


def test_calibrate_and_use(cli, tmp_path):
    foreign, asks = tmp_path / "foreign.safetensors", ("generate", "-p", "hi", *TRI, "--kv-calibration")
    refused(cli(*asks, "/nope"), "there is no calibration file /nope", code=1)
    mx.save_safetensors(str(foreign), {"x": mx.zeros(1)}, {"format": "mlx_tq query statistics", "version": "2"})
    refused(cli(*asks, foreign), "was made with another model", code=1)
    path, text = tmp_path / "stats", tmp_path / "text.txt"  # the name as it is given
    text.write_text(TEXT, encoding="utf-8")
    wide = ("--dtype", "float32")
    result = cli("calibrate", *wide, "--text-share", 1, "--text", text, "--tokens", 300, "-o", path)
    assert result == (0, "", f"statistics of 300 tokens are in {path}\n")
    words = (*TRI, *REGIONS, "--kv-budget", 300, "--prefill-step-size", 256, "--kv-calibration", path)
    answer = cli("generate", *wide, "-p", TEXT + QUESTION, "-m", 20, *words, "--json").json
    assert answer["plan"]["eviction"]["calibration"] == str(path)
    assert answer["stats"]["cache"]["rounds"] > 0


def test_a_type_to_compute_in(cli, tmp_path):
    """Statistics are for the type that they were gathered in."""
    folder, path = zoo_model(tmp_path / "tiny", "llama"), tmp_path / "stats.safetensors"
    assert (
        cli("calibrate", "--model", folder, "--text-share", 1, "--tokens", 90, "--dtype", "bfloat16", "-o", path).code
        == 0
    )
    words = ("evaluate", "divergence", "--model", folder, "--profiles", "balanced", "--chunks", 1, "--length", 200)
    words = (*words, "--step", 64, "--kv-sinks", 4, "--kv-window", 24, *TRI, "--kv-budget", 40, "--json", "-")
    narrow = cli(*words, "--kv-calibration", path, "--dtype", "bfloat16").json
    assert narrow["settings"]["dtype"] == "bfloat16"
    refused(cli(*words, "--kv-calibration", path), "was made with another model", code=1)
    wide = cli(*words, "--kv-evict", "triattention:warmup=32:calibration=text").json
    assert "dtype" not in wide["settings"]
    assert wide["results"]["balanced"]["kld"] != narrow["results"]["balanced"]["kld"]


def test_calibrate_on_questions_and_text(cli, tmp_path):
    """The center of the first layer is the mean query of the tokens that count, which depends on nothing else."""
    folder, path = zoo_model(tmp_path / "tiny", "llama", max_position_embeddings=512), tmp_path / "stats.safetensors"
    model, tokenizer = load(str(folder))
    layer, (scene,) = model.layers[0], build_question_scenes(tokenizer, load_text(), 1, 448)

    def mean(ids):
        return layer.self_attn.q_proj(layer.input_layernorm(model.model.embed_tokens(mx.array(ids)))).mean(axis=0)

    asked = [token for turn in scene.turns for token in turn]
    for words, share, told in (((), 0.25, ", 25% of the text,"), (("--text-share", 0), 0, "")):
        result = cli("calibrate", "--model", folder, "--tokens", 700, "-o", path, *words)
        assert result == (0, "", f"statistics of questions and answers of {len(asked)} tokens{told} are in {path}\n")
        center = load_calibration(path, fingerprint(model)).layers[0].center
        wanted = (1 - share) * mean(asked) + share * mean(scene.text[4:])
        assert mx.allclose(center.reshape(-1), wanted, atol=1e-5)
    few = refused(cli("calibrate", "--model", folder, "--tokens", 40, "-o", path), "has no room for needles")
    assert "--kv" not in few
    refused(cli("calibrate", "--text-share", 1.5, "-o", path), "--text-share is 1.5; it must be from 0 (questions)")


def test_statistics_are_gathered_once_a_model(cli, tmp_path, monkeypatch):
    """Where they cannot be kept or gathered, a warning says why and the plan what follows."""
    folder, kept = zoo_model(tmp_path / "tiny", "llama", max_position_embeddings=1024), tmp_path / "cache"
    words = ("generate", "--model", folder, "-p", "hi", "-m", 1, "--json", *TRI, *REGIONS)
    blind = "the first 1,024 tokens, blind to what a question will ask for"

    def calibration(result):
        return result.json["plan"]["eviction"]["calibration"]

    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    result = cli(*words)
    assert "no statistics can be kept in" in result.err
    assert "may drop what a question will ask for" in result.err
    assert calibration(result) == blind
    monkeypatch.setenv("XDG_CACHE_HOME", str(kept))
    text = cli(*words, "--kv-calibration", "text")
    assert (calibration(text), text.err.count("are kept in")) == ("the first 1,024 tokens", 0)
    first, again = cli(*words), cli(*words)
    (path,) = (kept / "mlx_tq").iterdir()
    assert calibration(first) == calibration(again) == f"questions and text ({path})"
    assert f"statistics of questions and text are kept in {path}" in first.err
    assert "are kept in" not in again.err
    assert cli("calibrate", "--model", folder, "--tokens", 700).err.endswith(f"are in {path}\n")
    short = zoo_model(tmp_path / "short", "qwen3", max_position_embeddings=64)
    result = cli(*words[:2], short, *words[3:])
    assert "has no room for needles" in result.err
    assert calibration(result) == blind


def test_losses_are_of_the_text_that_is_named(cli, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "text").write_text("two words", encoding="utf-8")
    refused(cli("calibrate", "--losses", "--text", tmp_path / "text"), "measured on 512 tokens; the text has ")


def test_the_embedded_model_was_asked_beforehand(embedded):
    source = plan_caches(embedded[0], KVConfig(evict=EvictConfig())).eviction.source
    assert re.fullmatch(r"questions and text \(.*/assets/queries/queries-\w+\.safetensors\)", source)


def test_calibration_shares_no_wording_with_any_needle():
    """No word but the commonest, and no two in a row."""
    common = {"the", "is", "in", "for", "of", "with", "and", "me", "what"}

    def wording(facts):
        texts = [re.findall(r"[a-z]+", text.lower()) for each in facts for text in (each.sentence, each.question)]
        pairs = {pair for words in texts for pair in pairwise(words)}
        return pairs | ({(word,) for words in texts for word in words if word not in common})

    rng = random.Random(0)
    asked = wording(make(rng) for make in calibration_questions.KINDS for _ in range(300))
    planted = wording(fact for make in NEEDLES.values() for _ in range(300) for fact in make(rng, 0.5)[0])
    assert len(asked) > 60
    assert len(planted) > 60
    assert not asked & planted


def test_an_evaluation_that_evicts_nothing_is_an_error(cli):
    reading = (
        "evaluate",
        "perplexity",
        "--dtype",
        "float32",
        "--chunks",
        1,
        "--length",
        400,
        "--step",
        128,
        "--profiles",
        "off,balanced",
    )
    nothing = "balanced evicted nothing in 399 tokens, with a budget of 90%, a warm-up of 1,024"
    text = (*TRI, "--kv-calibration", "text")
    refused(cli(*reading, *REGIONS, *text), nothing)
    asking = ("evaluate", "needle", "--dtype", "float32", "--lengths", 500, "--depths", "start", "--seeds", 1)
    refused(cli(*asking, "--profiles", "balanced", *REGIONS, *text), "balanced evicted nothing in")
    assert (
        cli(*reading, *REGIONS, "--kv-evict", "triattention:warmup=100:calibration=text", "--kv-budget", 80).code == 0
    )
