"""Configurations: what they refuse and how they say so, profiles, fingerprints, and plain data."""

import json
from dataclasses import FrozenInstanceError, fields, replace
from functools import partial

import pytest

import mlx_tq
from mlx_tq.config import DEFAULT_PROFILE, PROFILES, Budget, EvictConfig, KVConfig, RescueConfig, parse_budget
from mlx_tq.errors import ConfigError
from mlx_tq.policies import TriAttention

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
    ("config", "field", "value", "message"),
    [
        (KVConfig, "key", "q5", r"format 'q5' is unknown; valid are fp16, .*tq4, .*tq2"),
        (KVConfig, "value", "", r"format '' is unknown; valid are "),
        (KVConfig, "key_scale", "max", r"scale rule 'max' is unknown; valid are raw, matched, ls, unbiased\."),
        (KVConfig, "value_scale", "", r"scale rule '' is unknown; valid are raw, matched, ls, unbiased\."),
        (KVConfig, "rotation", "dct", r"rotation 'dct' is unknown; valid are wht, haar\."),
        (KVConfig, "sinks", -1, r"sinks is -1; it must be 0 or more\."),
        (KVConfig, "window", -128, r"window is -128; it must be 0 or more\."),
        (KVConfig, "boundary", -1, r"boundary is -1; it must be 0 or more\."),
        (KVConfig, "outlier", -0.5, r"outlier is -0\.5; it must be 0 or more\."),
        (KVConfig, "outlier", float("nan"), r"outlier is nan; it must be 0 or more\."),
        (KVConfig, "seed", -42, r"seed is -42; it must be 0 or more\."),
        (KVConfig, "recent", 0, r"recent is 0; it must be a multiple of 32"),
        (KVConfig, "recent", 40, r"recent is 40; it must be a multiple of 32"),
        (KVConfig, "key", "tq4~tq3~tq2", r"names 3 formats; write one, or RECENT~COLD"),
        (KVConfig, "key", "tq4~tq9", r"format 'tq9' is unknown"),
        (KVConfig, "value", "tq4~tq3", r"format 'tq4~tq3' is unknown"),
        (KVConfig, "key", 8, "^key is 8; it must be of type str"),
        (KVConfig, "key", None, "^key is None; it must be of type "),
        (KVConfig, "value", ["q8"], "^value is .*; it must be of type "),
        (KVConfig, "sinks", "128", "^sinks is '128'; it must be of type int"),
        (KVConfig, "window", 1.5, "^window is 1.5; it must be of type int"),
        (KVConfig, "seed", True, "^seed is True; it must be of type int"),
        (KVConfig, "evict", "v3", "^evict is 'v3'; it must be of type "),
        (EvictConfig, "policy", TriAttention, r"policy is <class .*; it must be of type Policy"),
        (EvictConfig, "budget", None, "budget is None; it must be of type"),
        (
            EvictConfig,
            "recall",
            31,
            r"recall is 31; write tokens to reload per question \(256\), at least a block of 32;",
        ),
        (EvictConfig, "recall", "some", "recall is 'some'; write tokens .* auto; or off"),
        (EvictConfig, "recall", True, "recall is True; it must be of type"),
        (EvictConfig, "archive_limit", 0, "archive_limit is 0; it must be 1 or more"),
        (EvictConfig, "recall_every", 0, "recall_every is 0; it must be 1 or more"),
        (RescueConfig, "timeout", "1", "timeout is '1'; it must be of type float"),
        (RescueConfig, "timeout", 0, "timeout is 0; it must be above 0 and at most 86,400 seconds"),
        (RescueConfig, "top_k", 65, "top_k is 65; it must be from 1 to 64"),
        (RescueConfig, "score_floor", 2, "score_floor is 2; it must be from -1 to 1"),
        (RescueConfig, "max_tokens", 2**21, "max_tokens is 2097152; it must be from 0 to 1,048,576"),
        (RescueConfig, "max_tokens", 20, "max_tokens is 20, which no span fits; it must be 128 or more, or 0"),
    ],
)
def test_refused_values(config, field, value, message):
    with pytest.raises(ConfigError, match=message):
        config(**{field: value})
    if config is KVConfig:
        with pytest.raises(ConfigError, match=message):
            KVConfig.from_profile("safe", **{field: value})


def test_values_at_the_limits():
    assert [EvictConfig(recall=recall).recalls for recall in (32, "auto", "off")] == [True, True, False]
    assert RescueConfig(timeout=1).timeout == 1
    assert [RescueConfig(score_floor=floor).score_floor for floor in (None, 0, 0.3)] == [None, 0, 0.3]
    assert [RescueConfig(max_tokens=tokens).max_tokens for tokens in (0, 128)] == [0, 128]


def test_a_misspelled_keyword_is_a_type_error():
    for make in (KVConfig, partial(KVConfig.from_profile, "safe"), EvictConfig, RescueConfig, TriAttention):
        with pytest.raises(TypeError, match="keys"):
            make(keys="q8")


def test_budgets():
    texts = (4096, "4096", "90%", "100%", "12.5 %", "2GB", "0.5mb")
    tokens, shares = Budget(tokens=4096), [Budget(share=share) for share in (0.9, 1.0, 0.125)]
    sizes = [Budget(nbytes=2 * 10**9), Budget(nbytes=500_000)]
    assert [parse_budget(EvictConfig(budget=text).budget) for text in texts] == [tokens, tokens, *shares, *sizes]


@pytest.mark.parametrize(
    "text", ["101%", "0%", "-5%", "nan%", "0", "-3", "1.5", "", "GB", "2TB", "many", "1e400", "0KB", 0]
)
def test_refused_budgets(text):
    with pytest.raises(ConfigError, match=r"invalid budget .*; write tokens \(4096\), .* \(90%\), or bytes"):
        EvictConfig(budget=text)


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
        "small": ("stcq4", "tq4"),
        "tiny": ("stcq4", "tcq3"),
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
    assert not KVConfig(key="fp16", value="fp16", evict=EvictConfig()).is_off, "eviction needs a cache of mlx_tq"
    assert KVConfig.from_profile("small", sinks=0) == replace(PROFILES["small"], sinks=0)
    with pytest.raises(ConfigError, match=r"profile .fast. is unknown; valid are off, .*, small, tiny, long\."):
        KVConfig.from_profile("fast")
    with pytest.raises(ConfigError, match=r"profile \['safe'\] is unknown; valid are off, "):
        KVConfig.from_profile(["safe"])
    for alias, name in (("turbo8", "q8"), ("turbo4", "tq4"), ("turbo3", "tq3"), ("turbo2", "tq2")):
        assert KVConfig(key=alias, value=alias) == KVConfig(key=name, value=name)
    for pair, key, value in (("turbo8v4", "q8", "tq4"), ("turbo8v3", "q8", "tq3"), ("k8v4", "fp8", "tq4")):
        assert KVConfig.from_profile(pair) == KVConfig(key=key, value=value)
        assert KVConfig.from_profile(pair, value="q8", sinks=0) == KVConfig(key=key, value="q8", sinks=0)


def test_config_is_frozen_and_hashable():
    with pytest.raises(FrozenInstanceError):
        KVConfig().key = "tq2"
    assert len({KVConfig(), KVConfig(), KVConfig(sinks=0)}) == 2
    assert (mlx_tq.KVConfig, mlx_tq.EvictConfig, mlx_tq.RescueConfig) == (KVConfig, EvictConfig, RescueConfig)


def test_tokens_that_are_never_evicted_must_fit_the_budget():
    with pytest.raises(ConfigError, match=r"256 tokens is not above sinks 128 plus window 128.* Raise the budget"):
        KVConfig(evict=EvictConfig(budget=256))
    assert KVConfig(evict=EvictConfig(budget=257)).evict.budget == 257
    with pytest.raises(
        ConfigError, match=r"published:mode=v1 may evict the first tokens; sinks is 128\. Set sinks to 0"
    ):
        KVConfig(evict=EvictConfig("published:mode=v1"))
    assert KVConfig(sinks=0, evict=EvictConfig("published:mode=v2")).evict.policy.mode == "v2"


def test_keys_of_two_formats():
    assert KVConfig(key="turbo4~turbo3").key == "tq4~tq3"
    assert KVConfig(key="tq4~turbo4").key == "tq4"
    for recall, latest in (("auto", 128 + 544), (256, 128 + 544), ("off", 128)):
        assert KVConfig(key="tq4~tq3", evict=EvictConfig(recall=recall)).num_protected == latest
        KVConfig(key="tq4~tq3", evict=EvictConfig(budget=128 + latest + 1, recall=recall))
        with pytest.raises(ConfigError, match=f"a budget of {128 + latest} tokens is not above sinks 128 plus window"):
            KVConfig(key="tq4~tq3", evict=EvictConfig(budget=128 + latest, recall=recall))
    with pytest.raises(ConfigError, match=r"plus 544 with recent keys, .* lower --kv-recent, or use --kv-recall off"):
        KVConfig(key="tq4~tq3", evict=EvictConfig(budget=600))


def test_a_schedule_has_a_format_for_each_layer():
    assert [KVConfig(key="q8+tq4").formats_of(layer, 2) for layer in (0, 1)] == [("q8", "tq4"), ("tq4", "tq4")]
    with pytest.raises(ConfigError, match="key names 2 formats, and the model has 3 layers to store"):
        KVConfig(key="q8+tq4").formats_of(0, 3)


def test_mean_bits_excludes_chosen_formats():
    with pytest.raises(
        ConfigError, match=r"mean_bits is 4\.2 and chooses the formats .*; key is 'tq4' and chooses some"
    ):
        KVConfig(mean_bits=4.2, key="tq4")


def test_plain_data_and_back():
    evict = EvictConfig("knorm:trigger=8", budget=1000, recall=96, recall_every=16, archive_limit=10**9)
    for config in (KVConfig(), KVConfig(key="tq4", evict=evict), KVConfig(mean_bits=4.2)):
        assert KVConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert evict.to_dict()["policy"] == "knorm:trigger=8"
