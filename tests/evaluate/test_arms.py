from dataclasses import replace

import pytest

from mlx_tq.cli.options import Request
from mlx_tq.cli.parser import add_cache_arguments, command_parser
from mlx_tq.config import PROFILES, EvictConfig, KVConfig
from mlx_tq.errors import ConfigError
from mlx_tq.evaluate import add_arm_arguments
from mlx_tq.evaluate.arms import arms_from_request, parse_arm


def arms(*words):
    parser = command_parser("evaluate", "")
    add_arm_arguments(parser, "off,balanced")
    add_cache_arguments(parser)
    return arms_from_request(Request.from_args(parser.parse_args(words)))


def test_an_arm_is_a_profile_or_a_pair_with_scale_rules():
    assert parse_arm("small").config == PROFILES["small"]
    long = PROFILES["long"]
    assert parse_arm("long", evict=None).config == replace(long, evict=replace(long.evict, recall="off"))
    assert parse_arm("k8v4").config == KVConfig(key="fp8", value="tq4")
    pair = parse_arm("q8/tq3", sinks=7).config
    assert (pair.key, pair.value, pair.sinks) == ("q8", "tq3", 7)
    ruled = parse_arm("tq3:matched/tq4:raw").config
    assert (ruled.key, ruled.key_scale, ruled.value, ruled.value_scale) == ("tq3", "matched", "tq4", "raw")


def test_some_arms_evict_and_the_others_do_not():
    words = ("--profiles", "off,off@90%,small@300", "--kv-evict", "triattention:trigger=32", "--kv-sinks", "32")
    off, alone, both = (arm.config for arm in arms(*words))
    assert off.is_off
    assert (alone.key, alone.value, alone.evict.budget, alone.evict.policy.trigger) == ("fp16", "fp16", "90%", 32)
    assert (both.key, both.evict.budget, both.sinks) == ("stcq4", "300", 32)
    assert parse_arm("q8/tq3@75%").config.evict == EvictConfig(budget="75%", recall="off")


def test_the_default_the_list_and_the_flags():
    assert [arm.name for arm in arms()] == ["off", "balanced"]
    listed = arms("--profiles", "small, q8/tq2,small", "--kv-window", "64")
    assert [(arm.name, arm.config.window) for arm in listed] == [("small", 64), ("q8/tq2", 64)]
    (chosen,) = arms("--kv-profile", "small", "--kv-value", "tq2")
    assert (chosen.name, chosen.config.key, chosen.config.value) == ("stcq4/tq2", "stcq4", "tq2")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--profiles", "bold"], "profile 'bold' is unknown; valid are .*, tiny, long, or a pair"),
        (["--profiles", "q8/tq9"], "format 'tq9' is unknown"),
        (["--profiles", "q8/tq4:best"], "scale rule 'best' is unknown"),
        (["--profiles", ","], "--profiles is empty"),
        (["--profiles", "off@most"], "invalid budget 'most'"),
        (["--profiles", "small", "--kv-key", "q8"], "--profiles cannot be combined with --kv-key"),
    ],
)
def test_invalid_arms_are_refused(words, message):
    with pytest.raises(ConfigError, match=message):
        arms(*words)


def test_the_environment_chooses_and_the_list_wins(monkeypatch):
    monkeypatch.setenv("MLX_TQ_KV_PROFILE", "small")
    assert [arm.name for arm in arms()] == ["stcq4/tq4"]
    assert [arm.name for arm in arms("--profiles", "safe")] == ["safe"]
