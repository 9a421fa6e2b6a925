"""The configuration: what it refuses and how it says so, the profiles, and fingerprints."""

import json
from dataclasses import FrozenInstanceError, fields, replace

import pytest

import mlx_tq
from mlx_tq.config import DEFAULT_PROFILE, PROFILES, KVConfig, RescueConfig, profile
from mlx_tq.errors import ConfigError, MlxTqError
from mlx_tq.policies import EvictConfig, KeyNorm, TriAttention

# Another valid value for each field.
CHANGES = {
    "mean_bits": 4.2,
    "key": "tq4",
    "value": "tq3",
    "sinks": 64,
    "window": 256,
    "key_scale": "raw",
    "value_scale": "matched",
    "boundary": 2,
    "outlier": 0.0,
    "rotation": "haar",
    "seed": 7,
    "fp32_scales": True,
    "recent": 64,
    "normalize": False,
    "evict": EvictConfig(),
}


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("key", "q5", r"format 'q5' is unknown; valid are fp16, .*tq4, .*tq2"),
        ("value", "", r"format '' is unknown; valid are "),
        ("key_scale", "max", r"scale rule 'max' is unknown; valid are raw, matched, ls, unbiased\."),
        ("value_scale", "", r"scale rule '' is unknown; valid are raw, matched, ls, unbiased\."),
        ("rotation", "dct", r"rotation 'dct' is unknown; valid are wht, haar\."),
        ("sinks", -1, r"sinks is -1; it must be 0 or more\."),
        ("window", -128, r"window is -128; it must be 0 or more\."),
        ("boundary", -1, r"boundary is -1; it must be 0 or more\."),
        ("outlier", -0.5, r"outlier is -0\.5; it must be 0 or more\."),
        ("seed", -42, r"seed is -42; it must be 0 or more\."),
        ("recent", 0, r"recent is 0; it must be a multiple of 32"),
        ("recent", 40, r"recent is 40; it must be a multiple of 32"),
        ("key", "tq4~tq3~tq2", r"names 3 formats; write one, or RECENT~COLD"),
        ("key", "tq4~tq9", r"format 'tq9' is unknown"),
        ("value", "tq4~tq3", r"format 'tq4~tq3' is unknown"),
    ],
)
def test_refused_values(field, value, message):
    with pytest.raises(ConfigError, match=message):
        KVConfig(**{field: value})
    with pytest.raises(ConfigError, match=message):
        profile("safe", **{field: value})


def test_a_misspelt_setting_names_the_nearest():
    for make in (KVConfig, lambda **given: profile("safe", **given), lambda **given: profile("turbo8v4", **given)):
        with pytest.raises(ConfigError, match=r"setting of KVConfig 'keys' is unknown; valid are key, .*mean key\?"):
            make(keys="q8")
    with pytest.raises(ConfigError, match=r"setting of EvictConfig 'bugdet' .* mean budget\?"):
        EvictConfig(bugdet=100)
    with pytest.raises(ConfigError, match=r"setting of TriAttention 'triger' .* mean trigger\?"):
        TriAttention(triger=64)
    with pytest.raises(ConfigError, match=r"setting of RescueConfig 'time' .* mean timeout\?"):
        RescueConfig(time=1)


@pytest.mark.parametrize(
    ("field", "value"),
    [("key", 8), ("key", None), ("value", ["q8"]), ("sinks", "128"), ("window", 1.5), ("seed", True), ("evict", "v3")],
)
def test_refused_types(field, value):
    with pytest.raises(ConfigError, match=rf"^{field} is .*; it must be of type "):
        KVConfig(**{field: value})


def test_fingerprint_changes_with_every_field():
    assert {field.name for field in fields(KVConfig)} == set(CHANGES)
    config = KVConfig()
    changed = [replace(config, **{field: value}) for field, value in CHANGES.items()]
    prints = [each.fingerprint() for each in (config, *changed)]
    assert len(set(prints)) == len(prints)
    assert all(len(text) == 16 and int(text, 16) >= 0 for text in prints)
    assert [replace(each, **vars(config)).fingerprint() for each in changed] == prints[:1] * len(changed)


def test_profiles():
    assert {name: (config.key, config.value) for name, config in PROFILES.items()} == {
        "off": ("fp16", "fp16"),
        "safe": ("q8", "q8"),
        "balanced": ("q8", "tq4"),
        "small": ("tq4", "tq4"),
        "tiny": ("tq4", "tcq3"),
        "long": ("q8", "tq4"),
    }
    assert PROFILES["tiny"].normalize
    assert {name for name, config in PROFILES.items() if config.evict} == {"long"}
    assert replace(PROFILES["long"], evict=None) == PROFILES["balanced"]
    assert str(PROFILES["long"].evict.policy) == "triattention"
    assert (PROFILES["long"].evict.budget, PROFILES["long"].evict.recall) == ("50%", "auto")
    assert PROFILES[DEFAULT_PROFILE] == KVConfig()
    assert [name for name, config in PROFILES.items() if config.is_off] == ["off"]
    assert not KVConfig(key="fp16", value="tq4").is_off
    assert not KVConfig(key="fp16", value="fp16", evict=EvictConfig()).is_off, "eviction needs a cache of ours"
    assert profile("small", sinks=0) == replace(PROFILES["small"], sinks=0)
    with pytest.raises(ConfigError, match=r"profile .fast. is unknown; valid are off, .*, small, tiny, long\."):
        profile("fast")
    for alias, name in (("turbo8", "q8"), ("turbo4", "tq4"), ("turbo3", "tq3"), ("turbo2", "tq2")):
        assert KVConfig(key=alias, value=alias) == KVConfig(key=name, value=name)


@pytest.mark.parametrize(
    ("pair", "key", "value"), [("turbo8v4", "q8", "tq4"), ("turbo8v3", "q8", "tq3"), ("k8v4", "fp8", "tq4")]
)
def test_pairs_of_other_programs(pair, key, value):
    assert profile(pair) == KVConfig(key=key, value=value)
    assert profile(pair, value="q8", sinks=0) == KVConfig(key=key, value="q8", sinks=0)


def test_the_configuration_of_rescue():
    assert {ValueError, MlxTqError} <= set(ConfigError.__mro__)
    with pytest.raises(ConfigError, match="timeout is '1'; it must be of type float"):
        RescueConfig(timeout="1")
    assert RescueConfig(timeout=1).timeout == 1
    assert [RescueConfig(score_floor=floor).score_floor for floor in (None, 0, 0.3)] == [None, 0, 0.3]
    with pytest.raises(ConfigError, match="score_floor is 2; it must be from -1 to 1"):
        RescueConfig(score_floor=2)
    with pytest.raises(ConfigError, match="max_tokens is 20, which no span fits; it must be 128 or more, or 0"):
        RescueConfig(max_tokens=20)
    assert [RescueConfig(max_tokens=tokens).max_tokens for tokens in (0, 128)] == [0, 128]


def test_config_is_frozen_and_hashable():
    with pytest.raises(FrozenInstanceError):
        KVConfig().key = "tq2"
    assert len({KVConfig(), KVConfig(), KVConfig(sinks=0)}) == 2
    assert mlx_tq.KVConfig is KVConfig


def test_what_stays_by_rule_must_fit_the_budget():
    with pytest.raises(ConfigError, match=r"256 tokens is not above sinks 128 plus window 128.* Raise the budget"):
        KVConfig(evict=EvictConfig(budget=256))
    assert KVConfig(evict=EvictConfig(budget=257)).evict.budget == 257
    with pytest.raises(ConfigError, match=r"recall is 31 tokens, fewer than a block of 32, .* Write at least 32"):
        KVConfig(evict=EvictConfig(recall=31))
    assert KVConfig(evict=EvictConfig(recall=32)).evict.recall == 32
    with pytest.raises(ConfigError, match=r"mode v1 may evict the first tokens; sinks is 128\. Set sinks to 0\."):
        KVConfig(evict=EvictConfig("knorm:mode=v1"))
    assert KVConfig(sinks=0, evict=EvictConfig("knorm:mode=v2")).evict.policy.mode == "v2"


def test_keys_of_two_formats():
    assert KVConfig(key="turbo4~turbo3").key == "tq4~tq3"
    assert KVConfig(key="tq4~turbo4").key == "tq4"
    for recall, latest in (("auto", 128 + 544), (256, 128 + 544), ("off", 128)):
        assert KVConfig(key="tq4~tq3", evict=EvictConfig(recall=recall)).latest == latest
        KVConfig(key="tq4~tq3", evict=EvictConfig(budget=128 + latest + 1, recall=recall))
        with pytest.raises(ConfigError, match=f"a budget of {128 + latest} tokens is not above sinks 128 plus window"):
            KVConfig(key="tq4~tq3", evict=EvictConfig(budget=128 + latest, recall=recall))
    with pytest.raises(ConfigError, match=r"plus 544 with recent keys, .* lower --kv-recent, or take --kv-recall off"):
        KVConfig(key="tq4~tq3", evict=EvictConfig(budget=600))


def test_plain_data_and_back():
    evict = EvictConfig("knorm:trigger=8", budget=1000, recall=96, recall_every=16, archive_limit=10**9)
    evicts = KVConfig(key="tq4", evict=evict)
    for config in (KVConfig(), evicts):
        assert KVConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    before = json.loads(json.dumps(evicts.to_dict()))
    del before["evict"]["archive_limit"], before["evict"]["recall_every"]  # as in files of before there were any
    assert KVConfig.from_dict(before).evict == replace(evict, recall_every=64, archive_limit=None)
    assert before["evict"]["policy"] == "knorm:granularity=32:trigger=8"
    before["evict"]["policy"] = "knorm:trigger=8"  # as in files of before blocks left by default
    assert KVConfig.from_dict(before).evict.policy == KeyNorm(trigger=8, granularity=1)
    with pytest.raises(ConfigError, match=r"archive_limit is 0; write bytes above 0 \(10\*\*9\), or None for 20 GB"):
        EvictConfig(archive_limit=0)
    with pytest.raises(ConfigError, match=r"recall_every is 0; write tokens from 1 on"):
        EvictConfig(recall_every=0)
