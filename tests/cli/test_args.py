"""Each of our flags falls back to MLX_TQ_ and its name; the flag wins."""

import argparse
from dataclasses import replace

import pytest

from mlx_tq.cli.args import (
    ARCHIVE_LIMIT,
    BUDGET,
    CALIBRATION,
    EVICT,
    MEAN_BITS,
    OPTIONS,
    PROFILE,
    RECALL,
    RECALL_EVERY,
    add_cache_arguments,
    config_from_args,
    names_cache,
    with_blocks,
)
from mlx_tq.config import PROFILES, EvictConfig, KVConfig
from mlx_tq.errors import ConfigError
from mlx_tq.generate import build_parser
from mlx_tq.policies import TriAttention

ASK = ("generate", "-p", "hi", "-m", 2, "--json")
# Of each flag two values, the first of which is not its default.
VALUES = {
    "key": ("tq3", "q8"),
    "value": ("q8", "tq2"),
    "sinks": ("64", "32"),
    "window": ("96", "33"),
    "boundary": ("1", "2"),
    "outlier": ("0", "5"),
    "recent": ("64", "96"),
    "normalize": ("off", "on"),
    "mean_bits": ("4.2", "3"),
}


def name_of(option):
    return "MLX_TQ_" + option.flag.removeprefix("--").replace("-", "_").upper()


def read(*words, **environ):
    return config_from_args(build_parser().parse_args(words), environ)


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.flag)
def test_every_flag_falls_back(option):
    fallback, flag = VALUES[option.field]
    environ = {name_of(option): fallback}
    assert getattr(read(**environ), option.field) == option.kind(fallback) != getattr(read(), option.field)
    assert getattr(read(option.flag, flag, **environ), option.field) == option.kind(flag)


@pytest.mark.parametrize(
    ("text", "granularity"),
    [("recency", 64), ("recency:granularity=8", 8), ("recency:granularity=1", 1), ("none", None)],
)
def test_blocks_that_rescue_can_read_unless_the_text_names_a_granularity(text, granularity):
    args = build_parser().parse_args([EVICT.flag, text])
    config = config_from_args(args, {})
    evict = None if granularity is None else EvictConfig(f"recency:granularity={granularity}")
    assert with_blocks(config, args, {}) == replace(config, evict=evict)


def test_a_profile_that_evicts_gives_what_flags_do_not_say():
    words = (PROFILE.flag, "long")
    assert read(*words) == PROFILES["long"]
    policy = TriAttention(granularity=32, calibration="text")
    changed = read(*words, RECALL.flag, "off", BUDGET.flag, "90%", CALIBRATION.flag, "text")
    assert changed.evict == EvictConfig(policy, "90%", "off")
    limited = read(*words, ARCHIVE_LIMIT.flag, "2GB", **{name_of(ARCHIVE_LIMIT): "1GB"})
    assert limited.evict == replace(PROFILES["long"].evict, archive_limit=2 * 10**9)
    assert read(*words, **{name_of(ARCHIVE_LIMIT): "1GB"}).evict.archive_limit == 10**9
    assert read(*words, RECALL.flag, "off", **{name_of(ARCHIVE_LIMIT): "1GB"}).evict.archive_limit is None
    often = read(*words, RECALL_EVERY.flag, "16", **{name_of(RECALL_EVERY): "32"})
    assert often.evict == replace(PROFILES["long"].evict, recall_every=16)
    assert read(*words, **{name_of(RECALL_EVERY): "32"}).evict.recall_every == 32
    with pytest.raises(ConfigError, match=r"--kv-recall-every is given, but nothing is archived: take --kv-recall aut"):
        read(*words, RECALL.flag, "off", RECALL_EVERY.flag, "16")
    assert read(*words, EVICT.flag, "none").evict is None
    long = build_parser().parse_args([*words])
    assert with_blocks(PROFILES["long"], long, {}) == PROFILES["long"]  # which has chosen its blocks
    assert read(*words, EVICT.flag, "knorm").evict == EvictConfig("knorm:granularity=32", "50%", "auto")
    add_cache_arguments(parser := argparse.ArgumentParser())
    long = PROFILES["long"].evict
    assert config_from_args(parser.parse_args(words), {}).evict == replace(long, recall="off")  # nothing can come back


def test_profiles_and_flags_of_eviction_fall_back():
    evicts = {name_of(EVICT): "knorm:trigger=64", name_of(BUDGET): "4096", name_of(CALIBRATION): "x"}
    blocks = "knorm:trigger=64:granularity=32"  # in which the archive gives tokens back
    assert read(**evicts).evict == EvictConfig(blocks, "4096")  # without statistics it passes them over
    assert read(BUDGET.flag, "50%", **evicts).evict == EvictConfig(blocks, "50%")
    assert read(EVICT.flag, "triattention", **evicts).evict == EvictConfig(
        "triattention:calibration=x:granularity=32", "4096"
    )
    assert read(RECALL.flag, "off", **evicts).evict == EvictConfig("knorm:trigger=64", "4096", "off")
    assert read(EVICT.flag, "none", **evicts).evict is None
    environ = {name_of(PROFILE): "small"}
    assert (read(**environ).key, read(**environ).value) == ("tq4", "tq4")
    assert (read(PROFILE.flag, "safe", **environ).key, read("--kv-value", "tq2", **environ).value) == ("q8", "tq2")
    assert not names_cache(build_parser().parse_args([]))
    assert names_cache(build_parser().parse_args([PROFILE.flag, "safe"]))


def test_bits_and_formats_exclude_each_other_where_both_are_flags():
    assert read("--kv-mean-bits", "4", **{name_of(PROFILE): "small"}) == KVConfig(mean_bits=4)
    assert read(PROFILE.flag, "small", **{name_of(MEAN_BITS): "4"}) == PROFILES["small"]
    assert read("--kv-mean-bits", "4", MLX_TQ_KV_BOUNDARY="1") == KVConfig(mean_bits=4)
    assert read("--kv-boundary", "1", **{name_of(MEAN_BITS): "4"}) == KVConfig(boundary=1)
    for flag, value in (("--kv-key", "q8"), ("--kv-boundary", "1"), ("--kv-outlier", "0")):
        with pytest.raises(ConfigError, match=f"--kv-mean-bits and {flag} both choose formats"):
            read("--kv-mean-bits", "4", flag, value)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("MLX_TQ_KV_WINDOW", "many", "MLX_TQ_KV_WINDOW is 'many'; it must be of type int."),
        ("MLX_TQ_KV_WINDOW", "", "MLX_TQ_KV_WINDOW is ''"),
        ("MLX_TQ_KV_OUTLIER", "x", "MLX_TQ_KV_OUTLIER is 'x'"),
        ("MLX_TQ_KV_KEY", "tq9", "format 'tq9' is unknown; valid are fp16, q8, tcq4, "),
        ("MLX_TQ_KV_PROFILE", "huge", "profile 'huge' is unknown; valid are off, safe"),
        ("MLX_TQ_KV_SINKS", "-1", "sinks is -1; it must be 0 or more."),
    ],
)
def test_bad_values(name, value, says):
    with pytest.raises(ConfigError, match=says):
        read(**{name: value})


def test_the_environment_of_the_process_is_read(cli, monkeypatch):
    """Whole runs: a variable has its effect, mlx-lm's flags beat it, a misspelt one is refused."""
    monkeypatch.setenv(name_of(PROFILE), "small")
    monkeypatch.setenv("MLX_TQ_API_KEY", "secret")  # of the server: no mistake
    assert cli(*ASK).json["plan"]["config"]["key"] == "tq4"
    assert cli(*ASK, "--kv-bits", 8, "--quantized-kv-start", 0).json["plan"] is None
    monkeypatch.setenv("MLX_TQ_KV_SINK", "64")
    result = cli(*ASK)
    assert (result.code, result.out) == (2, "")
    assert "MLX_TQ_KV_SINK, which is no setting. Did you mean MLX_TQ_KV_SINKS?" in result.err


def test_environment_is_no_quarrel_with_a_file(cli, monkeypatch, tmp_path):
    """A file keeps the configuration that it was made with, unless a flag asks for another."""
    file = tmp_path / "cache.safetensors"
    assert cli("cache_prompt", "-p", "The code is 12.", "--kv-profile", "safe", "--prompt-cache-file", file).code == 0
    monkeypatch.setenv(name_of(PROFILE), "small")
    words = ("generate", "-p", " What is the code?", "-m", 3, "--json", "--prompt-cache-file", file)
    assert cli(*words).json["plan"]["config"]["key"] == "q8"
    assert cli(*words, "--kv-profile", "small").code == 1
