"""Flags and environment become one `Request`; a typed flag overrides its MLX_TQ_ variable."""

from dataclasses import replace

import pytest

from mlx_tq.__main__ import COMMANDS
from mlx_tq.cache_prompt import build_parser as build_cache_prompt_parser
from mlx_tq.cli.options import CONFIG_FIELDS, EXCLUDES, OPTIONS, REQUIRES, RESCUE_FIELDS, SINGLE_PROCESS, Request
from mlx_tq.config import PROFILES, EvictConfig, KVConfig, RescueConfig
from mlx_tq.errors import ConfigError
from mlx_tq.evaluate import build_parser as build_evaluate_parser
from mlx_tq.generate import build_parser
from mlx_tq.policies import TriAttention

from .test_flags import leaves

# Of each field two values, the first of which is not its default.
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
    "service": ("auto", "http://127.0.0.1:5055"),
    "max_tokens": ("256", "512"),
    "timeout": ("2", "3"),
}


def request(*words, **environ):
    variables = {f"MLX_TQ_{name}": value for name, value in environ.items()}
    return Request.from_args(build_parser().parse_args(words), variables)


def config(*words, **environ):
    return request(*words, **environ).config


@pytest.mark.parametrize(("flag", "field"), (CONFIG_FIELDS | RESCUE_FIELDS).items())
def test_every_flag_falls_back(flag, field):
    option, (fallback, typed) = OPTIONS[flag], VALUES[field]
    needs = ("--kv-evict", "recency", *(("--rescue", "auto") if field in ("max_tokens", "timeout") else ()))

    def value(*words, **environ):
        part = request(*needs, *words, **environ)
        return getattr(part.rescue if flag in RESCUE_FIELDS else part.config, field)

    environ = {option.variable.removeprefix("MLX_TQ_"): fallback}
    assert value(**environ) == option.parse(fallback) != value()
    assert value(flag, typed, **environ) == option.parse(typed)


@pytest.mark.parametrize(
    ("policy", "granularity"),
    [("recency", 64), ("recency:granularity=8", 8), ("recency:granularity=1", 1), ("none", None)],
)
def test_rescue_evicts_blocks_of_64_tokens_unless_the_policy_names_a_granularity(policy, granularity):
    evict = config("--kv-evict", policy, RESCUE="auto").evict
    assert evict == (None if granularity is None else EvictConfig(f"recency:granularity={granularity}"))
    assert config("--kv-profile", "long", RESCUE="auto") == PROFILES["long"]  # which has its own granularity


LONG = PROFILES["long"].evict


@pytest.mark.parametrize(
    ("words", "environ", "evict"),
    [
        ((), {}, LONG),
        (
            ("--kv-recall", "off", "--kv-budget", "90%", "--kv-calibration", "text"),
            {},
            EvictConfig(TriAttention(granularity=32, calibration="text"), "90%", "off"),
        ),
        (("--kv-archive-limit", "2GB"), {"KV_ARCHIVE_LIMIT": "1GB"}, replace(LONG, archive_limit=2 * 10**9)),
        ((), {"KV_ARCHIVE_LIMIT": "1GB"}, replace(LONG, archive_limit=10**9)),
        (("--kv-recall", "off"), {"KV_ARCHIVE_LIMIT": "1GB"}, replace(LONG, recall="off")),
        (("--kv-archive", "off"), {}, replace(LONG, recall="off")),
        (("--kv-recall-every", "16"), {"KV_RECALL_EVERY": "32"}, replace(LONG, recall_every=16)),
        (("--draft-model", "x"), {"KV_RECALL": "96"}, replace(LONG, recall="off")),
        (("--kv-shadow", "8"), {}, replace(LONG, recall="off")),
        (("--kv-evict", "none"), {}, None),
        (("--kv-evict", "knorm"), {}, EvictConfig("knorm:granularity=32", "50%", "auto")),
    ],
)
def test_flags_change_the_eviction_of_a_profile(words, environ, evict):
    assert config("--kv-profile", "long", *words, **environ).evict == evict


def test_a_command_without_recall_evicts_for_good():
    args = build_evaluate_parser().parse_args(["perplexity", "--kv-profile", "long"])
    assert Request.from_args(args, {}).config.evict == replace(LONG, recall="off")


def test_profile_and_eviction_fall_back():
    evicts = {"KV_EVICT": "knorm:trigger=64", "KV_BUDGET": "4096", "KV_CALIBRATION": "x"}
    blocks = "knorm:trigger=64:granularity=32"  # in which the archive is recalled
    assert config(**evicts).evict == EvictConfig(blocks, "4096")  # not calibrated, so it ignores the file
    assert config("--kv-budget", "50%", **evicts).evict == EvictConfig(blocks, "50%")
    calibrated = EvictConfig("triattention:calibration=x:granularity=32", "4096")
    assert config("--kv-evict", "triattention", **evicts).evict == calibrated
    assert config("--kv-recall", "off", **evicts).evict == EvictConfig("knorm:trigger=64", "4096", "off")
    assert config(KV_PROFILE="small") == PROFILES["small"]
    assert config("--kv-profile", "safe", KV_PROFILE="small") == PROFILES["safe"]
    assert config("--kv-value", "tq2", KV_PROFILE="small") == replace(PROFILES["small"], value="tq2")
    assert (request(KV_PROFILE="safe").changes_cache, request("--kv-profile", "safe").changes_cache) == (False, True)


def test_mean_bits_and_formats_override_each_other_in_the_environment():
    assert config("--kv-mean-bits", "4", KV_PROFILE="small") == KVConfig(mean_bits=4)
    assert config("--kv-profile", "small", KV_MEAN_BITS="4") == PROFILES["small"]
    assert config("--kv-mean-bits", "4", KV_BOUNDARY="1") == KVConfig(mean_bits=4)
    assert config("--kv-boundary", "1", KV_MEAN_BITS="4") == KVConfig(boundary=1)


def test_what_the_environment_chooses_gives_way_to_flags_that_exclude_it():
    chosen = {"PREFIX_CACHE": "auto", "RESCUE": "auto", "KV_EVICT": "recency"}
    assert request(**chosen).prefix_cache == "auto"
    assert request(**chosen).rescue == RescueConfig("auto")
    for words in (("--draft-model", "x"), ("--kv-shadow", "8"), ("--kv-bits", "8")):
        given = request(*words, **chosen)
        assert (given.prefix_cache, given.rescue) == (None, RescueConfig())
    assert request("--kv-bits", "8", **chosen).config == PROFILES["off"]
    assert request(RESCUE="auto").rescue == RescueConfig()  # nothing is evicted
    for off in ({"KV_PROFILE": "off"}, {"KV_KEY": "fp16", "KV_VALUE": "fp16"}):
        assert request(PREFIX_CACHE="auto", **off).prefix_cache is None
        with pytest.raises(ConfigError, match=r"--prefix-cache cannot be combined with mlx-lm's own cache \(fp16"):
            request("--prefix-cache", "auto", **off)


@pytest.mark.parametrize("words", [("--kv-profile", "off"), ("--kv-key", "fp16", "--kv-value", "fp16"), ()])
def test_mlx_lms_quantized_cache_goes_with_whatever_compresses_nothing(words):
    assert config("--kv-bits", "8", *words, KV_PROFILE="small") == PROFILES["off"]


def test_off_needs_nothing_to_be_on():
    for flag in ("--rescue", "--prefix-cache", "--kv-recall"):
        assert config(flag, "off") == KVConfig()


def test_what_a_flag_replaces_is_not_asked_of_the_environment():
    decodes = build_cache_prompt_parser().parse_args(["--decode", "x", "--prompt-cache-file", "y"])
    assert Request.from_args(decodes, {"MLX_TQ_KV_PROFILE": "off"}).config == PROFILES["off"]
    measures = build_evaluate_parser().parse_args(["perplexity", "--profiles", "small"])
    assert Request.from_args(measures, {"MLX_TQ_KV_PROFILE": "off"}).config == PROFILES["off"]


@pytest.mark.parametrize("flag", ["--prefix-cache-limit=1GB", "--rescue-timeout=5"])
def test_settings_may_stay_while_what_they_are_for_is_off(flag):
    """Scripts turn a feature off by one flag or variable."""
    name = "--prefix-cache" if "prefix" in flag else "--rescue"
    variable = name.removeprefix("--").replace("-", "_").upper()
    for words, environ in (((name, "off"), {}), ((), {variable: "off"}), (("--draft-model", "x"), {variable: "auto"})):
        given = request(flag, *words, **environ)
        assert (given.prefix_cache, given.rescue.service) == (None, "off")
    with pytest.raises(ConfigError, match=f"requires {name}. Add it"):
        request(flag)


def test_flags_change_a_saved_configuration_and_the_environment_does_not():
    saved = KVConfig(key="tq4", sinks=16, evict=EvictConfig("recency", 400, "off"))
    assert request(KV_PROFILE="small", KV_SINKS="8").change(saved) == saved
    assert request("--kv-window", "64").change(saved) == replace(saved, window=64)
    assert request("--kv-evict", "none").change(saved) == replace(saved, evict=None)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("KV_WINDOW", "many", "MLX_TQ_KV_WINDOW is 'many'; it must be of type int."),
        ("KV_WINDOW", "", "MLX_TQ_KV_WINDOW is ''"),
        ("KV_OUTLIER", "x", "MLX_TQ_KV_OUTLIER is 'x'"),
        ("PREFIX_CACHE_LIMIT", "much", "MLX_TQ_PREFIX_CACHE_LIMIT: 'much' is not a size"),
        ("KV_ARCHIVE", "maybe", "MLX_TQ_KV_ARCHIVE: 'maybe' is not on or off"),
        ("KV_KEY", "tq9", "format 'tq9' is unknown"),
        ("KV_PROFILE", "huge", "profile 'huge' is unknown; valid are off, safe"),
    ],
)
def test_bad_values_of_the_environment(name, value, message):
    with pytest.raises(ConfigError, match=message):
        request(**{name: value})


def test_the_environment_of_the_process_is_read(cli, monkeypatch, tmp_path):
    """A file keeps the configuration with which it was saved, unless a flag asks for another."""
    monkeypatch.setenv("MLX_TQ_API_KEY", "secret")  # the server's
    monkeypatch.setenv("MLX_TQ_KV_PROFILE", "small")
    ask = ("generate", "-p", "hi", "-m", 2, "--json")
    assert cli(*ask).json["plan"]["config"]["key"] == "stcq4"
    file = tmp_path / "cache.safetensors"
    assert cli("cache_prompt", "-p", "The code is 12.", "--kv-profile", "safe", "--prompt-cache-file", file).code == 0
    assert cli(*ask, "--prompt-cache-file", file).json["plan"]["config"]["key"] == "q8"
    assert cli(*ask, "--prompt-cache-file", file, "--kv-profile", "small").code == 1
    monkeypatch.setenv("MLX_TQ_KV_SINK", "64")
    result = cli(*ask)
    assert (result.code, result.out) == (2, "")
    assert "MLX_TQ_KV_SINK is unknown. Did you mean MLX_TQ_KV_SINKS?" in result.err


def test_every_rule_names_flags_that_exist():
    flags = {flag for command in COMMANDS for leaf in leaves(command) for flag in leaf._option_string_actions}
    rules = [(*key.split(), *values) for table in (REQUIRES, EXCLUDES) for key, values in table.items()]
    for word in {part for rule in rules for text in rule for part in text.split() if part.startswith("--")}:
        assert word in flags, word
    assert flags.issuperset({*SINGLE_PROCESS, *OPTIONS})
    assert {rule[0] for rule in rules if not rule[0].startswith("--")} <= COMMANDS.keys()
