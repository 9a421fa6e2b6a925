"""Each of our flags falls back to MLX_TQ_ and its name; the flag wins."""

import pytest

from mlx_tq.args import OPTIONS, PROFILE
from mlx_tq.generate import build_parser

ASK = ("generate", "-p", "hi", "-m", 2, "--json")
VALUES = {"key": "tq3", "value": "q8", "prefix": "64", "window": "96", "boundary": "1", "outlier": "0", "recent": "64"}
OTHERS = {"key": "q8", "value": "tq2", "prefix": "32", "window": "33", "boundary": "2", "outlier": "5", "recent": "96"}


def name_of(option):
    return "MLX_TQ_" + option.flag.removeprefix("--").replace("-", "_").upper()


def test_the_help_says_so():
    assert "MLX_TQ_KV_KEY" in build_parser().format_help()
    assert name_of(OPTIONS[0]) == "MLX_TQ_KV_KEY"


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.flag)
def test_every_flag_falls_back(cli, monkeypatch, option):
    monkeypatch.setenv(name_of(option), VALUES[option.field])
    assert cli(*ASK).json["plan"]["config"][option.field] == option.kind(VALUES[option.field])
    flagged = cli(*ASK, option.flag, OTHERS[option.field]).json
    assert flagged["plan"]["config"][option.field] == option.kind(OTHERS[option.field])


def test_profile_falls_back(cli, monkeypatch):
    monkeypatch.setenv(name_of(PROFILE), "small")
    config = cli(*ASK).json["plan"]["config"]
    assert (config["key"], config["value"]) == ("tq4", "tq4")
    config = cli(*ASK, PROFILE.flag, "safe").json["plan"]["config"]
    assert (config["key"], config["value"]) == ("q8", "q8")
    assert cli(*ASK, "--kv-value", "tq2").json["plan"]["config"]["value"] == "tq2"


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("MLX_TQ_KV_WINDOW", "many", "MLX_TQ_KV_WINDOW is 'many'; it must be of type int."),
        ("MLX_TQ_KV_WINDOW", "", "MLX_TQ_KV_WINDOW is ''"),
        ("MLX_TQ_KV_OUTLIER", "x", "MLX_TQ_KV_OUTLIER is 'x'"),
        ("MLX_TQ_KV_KEY", "tq9", "format 'tq9' is unknown; valid are fp16, fp8, q8, "),
        ("MLX_TQ_KV_PROFILE", "huge", "profile 'huge' is unknown; valid are off, safe"),
        ("MLX_TQ_KV_PREFIX", "-1", "prefix is -1; it must be 0 or more."),
    ],
)
def test_bad_values(cli, monkeypatch, name, value, says):
    monkeypatch.setenv(name, value)
    result = cli(*ASK)
    assert (result.code, result.out) == (2, "")
    assert says in result.err


def test_mlx_lms_flag_beats_the_environment(cli, monkeypatch):
    """A profile for every day does not forbid --kv-bits today."""
    monkeypatch.setenv(name_of(PROFILE), "small")
    assert cli(*ASK, "--kv-bits", 8, "--quantized-kv-start", 0).json["plan"] is None


def test_environment_is_no_quarrel_with_a_file(cli, monkeypatch, tmp_path):
    """A file keeps the configuration that it was made with, unless a flag asks for another."""
    file = tmp_path / "cache.safetensors"
    assert cli("cache_prompt", "-p", "The code is 12.", "--kv-profile", "safe", "--prompt-cache-file", file).code == 0
    monkeypatch.setenv(name_of(PROFILE), "small")
    words = ("generate", "-p", " What is the code?", "-m", 3, "--json", "--prompt-cache-file", file)
    assert cli(*words).json["plan"]["config"]["key"] == "q8"
    assert cli(*words, "--kv-profile", "small").code == 1


def test_a_misspelt_variable_is_refused(cli, monkeypatch):
    monkeypatch.setenv("MLX_TQ_KV_PREFX", "64")
    result = cli(*ASK)
    assert (result.code, result.out) == (2, "")
    assert "MLX_TQ_KV_PREFX, which is no setting. Did you mean MLX_TQ_KV_PREFIX?" in result.err


def test_the_key_of_the_server_is_no_mistake(cli, monkeypatch):
    monkeypatch.setenv("MLX_TQ_API_KEY", "secret")
    assert cli(*ASK).code == 0
