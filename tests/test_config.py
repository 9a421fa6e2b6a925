"""The configuration: what it refuses and how it says so, the profiles, and fingerprints."""

from dataclasses import FrozenInstanceError, asdict, fields, replace

import pytest

import mlx_tq
from mlx_tq.config import DEFAULT_PROFILE, PROFILES, Budget, EvictConfig, KVConfig, RescueConfig, parse_budget, profile
from mlx_tq.errors import ConfigError, MlxTqError

# Another valid value for each field.
CHANGES = {
    "key": "tq4",
    "value": "tq3",
    "prefix": 64,
    "window": 256,
    "key_scale": "raw",
    "value_scale": "matched",
    "boundary": 2,
    "outlier": 0.0,
    "rotation": "haar",
    "seed": 7,
    "wide_scale": True,
    "recent": 64,
    "evict": EvictConfig(),
}
EVICT_CHANGES = {
    "policy": "random",
    "budget": 4096,
    "mode": "v2",
    "evict": "highest",
    "aggregation": "v3",
    "segments": 4,
    "segment_tokens": 256,
    "boundary_skip": 2,
    "warmup": 256,
    "ema": 0.1,
    "recalibrate": 4096,
    "stats": "stats.safetensors",
    "nope": False,
    "granularity": 64,
    "pooling": "mean",
    "trigger": 512,
    "seed": 7,
}


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("key", "q5", r"format 'q5' is unknown; valid are fp16, .*tq4, .*tq2"),
        ("value", "", r"format '' is unknown; valid are "),
        ("key_scale", "max", r"scale rule 'max' is unknown; valid are raw, matched, ls, unbiased\."),
        ("value_scale", "", r"scale rule '' is unknown; valid are raw, matched, ls, unbiased\."),
        ("rotation", "dct", r"rotation 'dct' is unknown; valid are wht, haar\."),
        ("prefix", -1, r"prefix is -1; it must be 0 or more\."),
        ("window", -128, r"window is -128; it must be 0 or more\."),
        ("boundary", -1, r"boundary is -1; it must be 0 or more\."),
        ("outlier", -0.5, r"outlier is -0\.5; it must be 0 or more\."),
        ("seed", -42, r"seed is -42; it must be 0 or more\."),
        ("recent", 0, r"recent is 0; it must be a multiple of 32"),
    ],
)
def test_refused_values(field, value, message):
    with pytest.raises(ConfigError, match=message):
        KVConfig(**{field: value})
    with pytest.raises(ConfigError, match=message):
        profile("safe", **{field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [("key", 8), ("key", None), ("value", ["q8"]), ("prefix", "128"), ("window", 1.5), ("seed", True), ("evict", "v3")],
)
def test_refused_types(field, value):
    with pytest.raises(ConfigError, match=rf"^{field} is .*; it must be of type "):
        KVConfig(**{field: value})


def test_refused_types_of_the_others():
    with pytest.raises(ConfigError, match="warmup is 'x'; it must be of type int"):
        EvictConfig(warmup="x")
    with pytest.raises(ConfigError, match="timeout is '1'; it must be of type float"):
        RescueConfig(timeout="1")
    assert RescueConfig(timeout=1).timeout == 1
    assert [RescueConfig(score_floor=floor).score_floor for floor in (None, 0, 0.3)] == [None, 0, 0.3]
    with pytest.raises(ConfigError, match="score_floor is 2; it must be from -1 to 1"):
        RescueConfig(score_floor=2)


def test_a_quotation_has_room_for_a_span():
    with pytest.raises(ConfigError, match="max_tokens is 20, which no span fits; it must be 128 or more, or 0"):
        RescueConfig(max_tokens=20)
    assert [RescueConfig(max_tokens=tokens).max_tokens for tokens in (0, 128)] == [0, 128]


@pytest.mark.parametrize("field", ["prefix", "window", "boundary", "outlier", "seed"])
def test_zero_is_allowed(field):
    assert getattr(KVConfig(**{field: 0}), field) == 0


def test_config_errors_are_value_errors():
    assert issubclass(ConfigError, ValueError)
    assert issubclass(ConfigError, MlxTqError)


def test_every_field_has_a_change():
    assert {field.name for field in fields(KVConfig)} == set(CHANGES)


@pytest.mark.parametrize("field", CHANGES)
def test_fingerprint_changes_with_every_field(field):
    config = KVConfig()
    changed = replace(config, **{field: CHANGES[field]})
    assert changed.fingerprint() != config.fingerprint()
    assert replace(changed, **{field: getattr(config, field)}).fingerprint() == config.fingerprint()


def test_fingerprints_are_distinct_and_stable():
    configs = [KVConfig(), *(replace(KVConfig(), **{field: value}) for field, value in CHANGES.items())]
    prints = [config.fingerprint() for config in configs]
    assert len(set(prints)) == len(prints)
    assert all(len(text) == 16 and int(text, 16) >= 0 for text in prints)
    assert prints == [config.fingerprint() for config in configs]


def test_profiles():
    assert {name: (config.key, config.value) for name, config in PROFILES.items()} == {
        "off": ("fp16", "fp16"),
        "safe": ("q8", "q8"),
        "balanced": ("q8", "tq4"),
        "small": ("tq4", "tq4"),
    }
    assert PROFILES[DEFAULT_PROFILE] == KVConfig()
    assert [name for name, config in PROFILES.items() if config.is_off] == ["off"]
    assert not KVConfig(key="fp16", value="tq4").is_off


def test_profile_with_changes():
    assert profile("small") is not None
    assert profile("small", prefix=0) == replace(PROFILES["small"], prefix=0)
    with pytest.raises(ConfigError, match=r"profile 'tiny' is unknown; valid are off, safe, balanced, small\."):
        profile("tiny")


@pytest.mark.parametrize(("alias", "name"), [("turbo8", "q8"), ("turbo4", "tq4"), ("turbo3", "tq3"), ("turbo2", "tq2")])
def test_an_alias_is_the_format(alias, name):
    assert KVConfig(key=alias, value=alias) == KVConfig(key=name, value=name)
    assert KVConfig(key=alias).fingerprint() == KVConfig(key=name).fingerprint()


@pytest.mark.parametrize(
    ("pair", "key", "value"), [("turbo8v4", "q8", "tq4"), ("turbo8v3", "q8", "tq3"), ("k8v4", "fp8", "tq4")]
)
def test_pairs_of_other_programs(pair, key, value):
    assert profile(pair) == KVConfig(key=key, value=value)
    assert profile(pair, value="q8", prefix=0) == KVConfig(key=key, value="q8", prefix=0)


def test_config_is_frozen_and_hashable():
    with pytest.raises(FrozenInstanceError):
        KVConfig().key = "tq2"
    assert len({KVConfig(), KVConfig(), KVConfig(prefix=0)}) == 2
    assert mlx_tq.KVConfig is KVConfig


@pytest.mark.parametrize(
    ("text", "budget"),
    [
        (4096, Budget(tokens=4096)),
        ("4096", Budget(tokens=4096)),
        ("90%", Budget(share=0.9)),
        ("100%", Budget(share=1.0)),
        ("12.5 %", Budget(share=0.125)),
        ("2GB", Budget(nbytes=2 * 10**9)),
        ("0.5mb", Budget(nbytes=500_000)),
    ],
)
def test_budgets(text, budget):
    assert parse_budget(text) == budget
    assert EvictConfig(budget=text).budget == text


@pytest.mark.parametrize(
    "text", ["101%", "0%", "-5%", "nan%", "0", "-3", "1.5", "", "GB", "2TB", "many", "1e400", "0KB", 0]
)
def test_refused_budgets(text):
    with pytest.raises(ConfigError, match=r"budget .* cannot be met; write tokens \(4096\), .* \(90%\), or bytes"):
        EvictConfig(budget=text)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mode": "v4"}, r"mode 'v4' is unknown; valid are v1, v2, v3\."),
        ({"evict": "low"}, r"evict 'low' is unknown; valid are lowest, highest\."),
        ({"aggregation": "max"}, r"aggregation 'max' is unknown; valid are paper, v3, expected_attention\."),
        ({"granularity": 7}, r"granularity 7 is unknown; valid are 1, 8, 16, 32, 64\."),
        ({"pooling": "sum"}, r"pooling 'sum' is unknown; valid are mean, max, top\."),
        ({"segments": 0}, r"segments is 0; it must be 1 or more\."),
        ({"warmup": 0}, r"warmup is 0; it must be 1 or more\."),
        ({"trigger": 0}, r"trigger is 0; it must be 1 or more\."),
        ({"boundary_skip": -1}, r"boundary_skip is -1; it must be 0 or more\."),
        ({"ema": 1.0}, r"ema is 1\.0; it must be from 0 .* to below 1"),
        ({"recalibrate": 100}, r"recalibrate is 100; it must be 0 or at least warmup \(1024\)\."),
    ],
)
def test_refused_evictions(changes, message):
    with pytest.raises(ConfigError, match=message):
        EvictConfig(**changes)


def test_what_stays_by_rule_must_fit_the_budget():
    with pytest.raises(ConfigError, match=r"256 tokens is not above prefix 128 plus window 128.* Raise the budget"):
        KVConfig(evict=EvictConfig(budget=256))
    assert KVConfig(evict=EvictConfig(budget=257)).evict.budget == 257
    with pytest.raises(ConfigError, match=r"mode v1 may evict the first tokens; prefix is 128\. Set prefix to 0\."):
        KVConfig(evict=EvictConfig(mode="v1"))
    assert KVConfig(prefix=0, evict=EvictConfig(mode="v2")).evict.mode == "v2"


def test_eviction_needs_a_cache_of_ours():
    assert not KVConfig(key="fp16", value="fp16", evict=EvictConfig()).is_off


def test_every_field_of_an_eviction_is_fingerprinted():
    assert {field.name for field in fields(EvictConfig)} == set(EVICT_CHANGES)
    configs = [EvictConfig(), *(replace(EvictConfig(), **{field: value}) for field, value in EVICT_CHANGES.items())]
    assert len({KVConfig(prefix=0, evict=config).fingerprint() for config in configs}) == len(configs)


def test_plain_data_and_back():
    for config in (KVConfig(), KVConfig(key="tq4", evict=EvictConfig(budget=1000, nope=False))):
        assert KVConfig.from_dict(asdict(config)) == config
