"""Eviction from the command line: what is refused, what is said, and what comes out."""

import mlx.core as mx
import pytest

from mlx_tq.args import EVICT, EVICT_OPTIONS
from mlx_tq.evict.calibration import load_calibration
from mlx_tq.haystack import load_text
from mlx_tq.models import fingerprint, load
from mlx_tq.questions import scenes

from .tools import facts, zoo_model

HI = ("-p", "hi", "-m", 2, "--verbose", "F")
TRI = ("--kv-evict", "triattention")
TEXT, QUESTION = facts(60)
SMALL = ("--kv-prefix", 16, "--kv-window", 32, "--kv-warmup", 256, "--kv-budget", 300, "--prefill-step-size", 256)
VALUES = {"budget": "4096", "mode": "v3", "segments": "4", "warmup": "99", "granularity": "16", "stats": None}

TABLE = {
    "policy": (("--kv-evict", "lru"), "policy 'lru' is unknown; valid are "),
    "no policy": (("--kv-budget", "50%"), "--kv-budget is given, but no token leaves: add --kv-evict triattention"),
    "more than all": ((*TRI, "--kv-budget", "120%"), "budget '120%' cannot be met; write tokens (4096)"),
    "too little": ((*TRI, "--kv-budget", 200), "200 tokens is not above prefix 128 plus window 128"),
    "too few bytes": ((*TRI, "--kv-budget", "1KB"), "a budget of 1,000 bytes is below the "),
    "mode": ((*TRI, "--kv-evict-mode", "v4"), "mode 'v4' is unknown; valid are v1, v2, v3"),
    "first tokens": ((*TRI, "--kv-evict-mode", "v1"), "mode v1 may evict the first tokens; prefix is 128. Set prefix"),
    "granularity": ((*TRI, "--kv-granularity", 12), "granularity 12 is unknown; valid are 1, 8, 16, 32, 64"),
    "mlx-lm's own": ((*TRI, "--kv-bits", 4), "--kv-bits is a cache of mlx-lm"),
}


@pytest.mark.parametrize("name", TABLE)
def test_refused(cli, name):
    words, says = TABLE[name]
    result = cli("generate", *HI, *words)
    assert (result.code, result.out) == (2, "")
    (line,) = result.errors
    assert says in line


def test_foreign_statistics(cli, tmp_path):
    assert "there is no file of statistics /nope" in cli("generate", *HI, *TRI, "--kv-stats", "/nope").err
    path = tmp_path / "stats.safetensors"
    mx.save_safetensors(str(path), {"x": mx.zeros(1)}, {"format": "mlx_tq query statistics", "version": "1"})
    result = cli("generate", *HI, *TRI, "--kv-stats", path)
    assert result.code == 1
    assert "was made with another model" in result.err


@pytest.mark.parametrize(
    "option", [option for option in EVICT_OPTIONS if option.field != "stats"], ids=lambda o: o.flag
)
def test_every_flag_falls_back(cli, monkeypatch, option):
    monkeypatch.setenv("MLX_TQ_KV_EVICT", "knorm")
    monkeypatch.setenv("MLX_TQ_" + option.flag.removeprefix("--").replace("-", "_").upper(), VALUES[option.field])
    config = cli("generate", *HI, "--json").json["plan"]["config"]["evict"]
    assert config["policy"] == "knorm"
    assert config[option.field] == option.kind(VALUES[option.field])
    assert cli("generate", *HI, "--json", EVICT.flag, "none").json["plan"]["config"]["evict"] is None


def test_what_is_said(cli):
    """Policy, budget and calibration before; one warning; rounds and what stayed after."""
    err = cli("generate", "-p", TEXT + QUESTION, "-m", 20, *TRI, *SMALL, "--verbose", "T").err
    assert "eviction: triattention (v3) keeps 300 tokens, calibrated on the first 256 tokens" in err
    assert err.count("warning: evicted tokens are gone: no rescue service is in use") == 1
    assert " rounds (" in err
    assert "% stayed" in err


def test_what_comes_out(cli):
    answer = cli("generate", "-p", TEXT + QUESTION, "-m", 20, *TRI, *SMALL, "--json").json
    stats = answer["stats"]["cache"]
    assert stats["rounds"] > 0
    assert stats["evicted"] == round((1 - stats["retention"]) * stats["tokens"])
    assert stats["tokens"] - stats["evicted"] <= 300 + 128 + 20
    assert answer["plan"]["eviction"]["budget_tokens"] == 300


def test_calibrate_and_use(cli, tmp_path):
    path, text = tmp_path / "stats", tmp_path / "text.txt"  # the name as it is given
    text.write_text(TEXT, encoding="utf-8")
    result = cli("calibrate", "--plain", "--text", text, "--tokens", 300, "-o", path)
    assert (result.code, result.out) == (0, "")
    assert "statistics of 300 tokens are in" in result.err
    words = (*TRI, *SMALL, "--kv-stats", path)
    answer = cli("generate", "-p", TEXT + QUESTION, "-m", 20, *words, "--json").json
    assert answer["plan"]["eviction"]["calibration"] == str(path)
    assert answer["stats"]["cache"]["rounds"] > 0
    assert cli("calibrate", "--tokens", 0, "-o", path).code == 2
    for taken in ("/nope/x.safetensors", tmp_path):  # said before the model is looked for
        refused = cli("calibrate", "--model", "/nowhere", "-o", taken)
        assert (refused.code, f"-o {taken} " in refused.err) == (2, True)


def test_a_type_to_compute_in(cli, tmp_path):
    """Statistics are for the type that they were gathered in."""
    folder, path = zoo_model(tmp_path / "tiny", "llama"), tmp_path / "stats.safetensors"
    assert cli("calibrate", "--model", folder, "--plain", "--tokens", 90, "--dtype", "bfloat16", "-o", path).code == 0
    words = ("evaluate", "divergence", "--model", folder, "--profiles", "balanced", "--chunks", 1, "--length", 200)
    words = (*words, "--step", 64, "--kv-prefix", 4, "--kv-window", 24, *TRI, "--kv-budget", 40, "--json", "-")
    narrow = cli(*words, "--kv-stats", path, "--dtype", "bfloat16").json
    assert narrow["settings"]["dtype"] == "bfloat16"
    refused = cli(*words, "--kv-stats", path)
    assert (refused.code, "was made with another model" in refused.err) == (1, True)
    wide = cli(*words, "--kv-warmup", 32).json
    assert "dtype" not in wide["settings"]
    assert wide["results"]["balanced"]["kld"] != narrow["results"]["balanced"]["kld"]


def test_calibrate_on_questions(cli, tmp_path):
    """The centre of the first layer is the mean query of questions and answers, which depends on nothing else."""
    folder, path = zoo_model(tmp_path / "tiny", "llama", max_position_embeddings=512), tmp_path / "stats.safetensors"
    result = cli("calibrate", "--model", folder, "--tokens", 700, "-o", path)
    assert (result.code, result.out) == (0, "")
    model, tokenizer = load(str(folder))
    turns = [turn for scene in scenes(tokenizer, load_text(), 1, 448) for turn in scene.turns]
    assert f"questions and answers of {sum(map(len, turns))} tokens" in result.err
    layer, ids = model.layers[0], mx.array([token for turn in turns for token in turn])
    queries = layer.self_attn.q_proj(layer.input_layernorm(model.model.embed_tokens(ids)))
    centre = load_calibration(path, fingerprint(model)).layers[0].centre
    assert mx.allclose(centre.reshape(-1), queries.mean(axis=0), atol=1e-5)
    few = cli("calibrate", "--model", folder, "--tokens", 40, "-o", path)
    assert (few.code, "has no room for needles" in few.err, "--kv" in few.err) == (2, True, False)


def test_an_evaluation_that_evicts_nothing_is_an_error(cli):
    reading = ("evaluate", "perplexity", "--chunks", 1, "--length", 400, "--step", 128, "--profiles", "off,balanced")
    result = cli(*reading, "--kv-prefix", 16, "--kv-window", 32, *TRI)
    assert result.code == 2
    assert "balanced evicted nothing in 399 tokens, with a budget of 90%, a warm-up of 1,024" in result.err
    words = ("evaluate", "needle", "--lengths", 500, "--depths", "start", "--seeds", 1, "--max-tokens", 24)
    result = cli(*words, "--profiles", "balanced", "--kv-prefix", 16, "--kv-window", 32, *TRI)
    assert result.code == 2
    assert "balanced evicted nothing in" in result.err
    result = cli("evaluate", "drift", "--profiles", "balanced", *TRI)
    assert (result.code, "balanced evicts; drift compares" in result.err) == (2, True)
    evicts = cli(*reading, "--kv-prefix", 16, "--kv-window", 32, *TRI, "--kv-warmup", 100, "--kv-budget", 80)
    assert evicts.code == 0


def test_a_draft_model_evicts_too(cli, tmp_path):
    """With statistics of its own, also where --kv-stats gives the model's."""
    path = tmp_path / "stats.safetensors"
    assert cli("calibrate", "--plain", "--tokens", 64, "-o", path).code == 0
    words = ("generate", "--ignore-chat-template", "-p", facts(12)[0], "-m", 8, *TRI, "--json", "--kv-stats", path)
    words = (*words, "--kv-prefix", 4, "--kv-window", 24, "--kv-budget", 60, "--kv-warmup", 64)
    draft = zoo_model(tmp_path / "draft", "qwen3")
    answer = cli(*words, "--prefill-step-size", 64, "--draft-model", draft, "--num-draft-tokens", 3).json
    assert answer["stats"]["cache"]["rounds"] > 0
    assert answer["stats"]["generation_tokens"] > 0


def test_where_positions_end(cli, tmp_path):
    """Evicted tokens keep theirs: a warning from 90 % on, and a prompt that would not fit is an error."""
    model = zoo_model(tmp_path / "short", "llama", max_position_embeddings=200)
    words = ("generate", "--model", model, "--ignore-chat-template", *TRI, "--kv-prefix", 4, "--kv-window", 24)
    words = (*words, "--kv-warmup", 32, "--kv-budget", 60, "--prefill-step-size", 32)
    few, many = "The city of " * 20, "The city of " * 100
    warning = "of the model's 200 positions. Evicted tokens keep theirs"
    count = cli(*words, "-p", few, "-m", 1, "--json").json["stats"]["prompt_tokens"]
    for tokens, warned in ((180 - count, False), (181 - count, True)):
        result = cli(*words, "-p", few, "-m", tokens)
        assert (result.code, warning in result.err) == (0, warned)
    full = cli(*words, "-p", few, "-m", -1, "--json").json["stats"]
    assert full["prompt_tokens"] + full["generation_tokens"] == 200
    assert full["cache"]["evicted"] > 0
    refused = cli(*words, "-p", many)
    assert (refused.code, refused.out) == (2, "")
    assert "tokens; the model allows 200 with its answer. Shorten the prompt" in refused.err
