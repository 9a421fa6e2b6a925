"""Policies by name and by text: what is refused and how, options of all of them, and policies of other packages."""

import json
from dataclasses import fields

import pytest
from foreign import run_beside

from mlx_tq.config import KVConfig
from mlx_tq.errors import ConfigError
from mlx_tq.policies import Budget, EvictConfig, Policy, TriAttention, parse_budget, parse_policy, policy_names

# Another value than the default for each option, as its text.
COMMON = "mode=v2 segments=4 segment_tokens=256 granularity=64 pooling=top trigger=512"
CALIBRATED = f"{COMMON} warmup=256 ema=0.1 recalibrate=4096 stats=/data/100%25/12%3A30.safetensors"
OPTIONS = {
    "triattention": f"{CALIBRATED} evict=highest aggregation=v3 score_unrotated_dims=on skip_layers=2",
    "expected_attention": CALIBRATED,
    "knorm": COMMON,
    "recency": COMMON,
    "streaming": COMMON,
    "random": f"{COMMON} seed=7",
}

FOREIGN_POLICY = """
from dataclasses import dataclass
from mlx_tq.policies import Policy

@dataclass(frozen=True, kw_only=True)
class Odd(Policy):
    name = "odd"
    parity: int = 0

    def score(self, body):
        return (body.positions + self.parity) % 2
"""


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_has_a_text_and_a_fingerprint(name):
    default, texts = parse_policy(name), OPTIONS[name].split()
    assert (default.name, str(default)) == (name, name)
    assert [each.name for each in fields(default)] == [text.partition("=")[0] for text in texts]
    policies = [default, *(parse_policy(f"{name}:{text}") for text in texts)]
    assert [str(policy) for policy in policies[1:]] == [f"{name}:{text}" for text in texts]
    configs = [KVConfig(sinks=0, evict=EvictConfig(policy)) for policy in policies]
    assert len(set(policies)) == len({config.fingerprint() for config in configs}) == len(texts) + 1
    whole = KVConfig(sinks=0, evict=EvictConfig(":".join([name, *texts]), 4096))
    assert KVConfig.from_dict(json.loads(json.dumps(whole.to_dict()))) == whole


@pytest.mark.parametrize(
    ("written", "means"),
    [
        ("triattention:trigger=8", "triattention:trigger=8:granularity=1:aggregation=paper"),
        ("triattention:aggregation=v3:granularity=16", "triattention:aggregation=v3:granularity=16"),
        ("knorm", "knorm:granularity=1"),
    ],
)
def test_what_was_saved_before_a_default_changed_means_what_it_meant(written, means):
    saved = EvictConfig("recency").to_dict() | {"policy": written}
    read = EvictConfig.from_dict(saved)
    assert read.policy == parse_policy(means)
    for config in (read, EvictConfig()):
        assert EvictConfig.from_dict(config.to_dict()) == config


def test_values_of_each_type():
    """A policy that inherits takes no name away, and defaults are for what a text leaves out."""

    class Louder(TriAttention):
        pass

    assert issubclass(Louder, Policy)
    assert set(policy_names()) == set(OPTIONS)
    assert parse_policy("random:trigger=64", trigger=8, seed=3, warmup=9) == parse_policy("random:trigger=64:seed=3")
    found = parse_policy(":".join(["triattention", *OPTIONS["triattention"].split()]))
    assert type(found) is TriAttention
    assert found == TriAttention(
        mode="v2", segments=4, segment_tokens=256, granularity=64, pooling="top", trigger=512, warmup=256, ema=0.1,
        recalibrate=4096, calibration="/data/100%/12:30.safetensors", evict="highest", aggregation="v3",
        score_unrotated_dims=True, skip_layers=2,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("triatention", "policy 'triatention' is unknown; valid are .*knorm.* Did you mean triattention"),
        ("", "policy '' is unknown; valid are "),
        ("triattention:agregation=v3", "option of triattention 'agregation' is unknown; .* Did you mean aggregation"),
        ("knorm:warmup=64", "option of knorm 'warmup' is unknown; valid are granularity, mode, pooling, segment"),
        (
            "triattention:aggregation=pape",
            "aggregation 'pape' is unknown; valid are weight, paper, v3. Did you mean paper",
        ),
        ("triattention:highest", "'highest' in 'triattention:highest' is no option; write options as in "),
        ("knorm:trigger=1:trigger=2", "trigger stands twice in "),
        ("triattention:score_unrotated_dims=no", "score_unrotated_dims takes on or off."),
        ("knorm:segments=x", "segments=x does not fit knorm: segments takes a whole number."),
        ("triattention:ema=x", "ema takes a number."),
        ("knorm:mode=v4", "mode 'v4' is unknown; valid are v1, v2, v3."),
        ("triattention:evict=low", "evict 'low' is unknown; valid are lowest, highest. Did you mean lowest"),
        ("knorm:granularity=7", "granularity 7 is unknown; valid are 1, 8, 16, 32, 64."),
        ("knorm:pooling=sum", "pooling 'sum' is unknown; valid are mean, max, top."),
        ("knorm:segments=0", "segments is 0; it must be 1 or more."),
        ("knorm:segment_tokens=-1", "segment_tokens is -1; it must be 0 or more."),
        ("knorm:trigger=0", "trigger is 0; it must be 1 or more."),
        ("random:seed=-1", "seed is -1; it must be 0 or more."),
        ("triattention:warmup=0", "warmup is 0; it must be 1 or more."),
        ("triattention:skip_layers=-1", "skip_layers is -1; it must be 0 or more."),
        ("triattention:ema=1", "ema is 1.0; it must be from 0 .* to below 1"),
        ("triattention:ema=nan", "ema is nan; it must be from 0"),
        ("triattention:recalibrate=100", "recalibrate is 100; it must be 0 or at least warmup .1024.."),
    ],
)
def test_refused(text, says):
    with pytest.raises(ConfigError, match=says):
        EvictConfig(text)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: TriAttention(warmup="x"), "warmup is 'x'; it must be of type int"),
        (lambda: TriAttention(score_unrotated_dims=1), "score_unrotated_dims is 1; it must be of type bool"),
        (lambda: EvictConfig(policy=TriAttention), "policy is <class .*; it must be of type Policy"),
        (lambda: EvictConfig(budget=None), "budget is None; it must be of type"),
    ],
)
def test_refused_types(make, says):
    with pytest.raises(ConfigError, match=says):
        make()


def test_budgets():
    found = [EvictConfig(budget=text).budget for text in (4096, "4096", "90%", "100%", "12.5 %", "2GB", "0.5mb")]
    tokens, shares = Budget(tokens=4096), [Budget(share=share) for share in (0.9, 1.0, 0.125)]
    sizes = [Budget(nbytes=2 * 10**9), Budget(nbytes=500_000)]
    assert [parse_budget(text) for text in found] == [tokens, tokens, *shares, *sizes]


@pytest.mark.parametrize(
    "text", ["101%", "0%", "-5%", "nan%", "0", "-3", "1.5", "", "GB", "2TB", "many", "1e400", "0KB", 0]
)
def test_refused_budgets(text):
    with pytest.raises(ConfigError, match=r"budget .* cannot be met; write tokens \(4096\), .* \(90%\), or bytes"):
        EvictConfig(budget=text)


def test_a_policy_of_another_package_is_found_and_has_options(tmp_path):
    code = (
        "import numpy as np\n"
        "from mlx_tq.policies import Body, EvictConfig\n"
        "policy = EvictConfig('odd:parity=1:trigger=8').policy\n"
        "print(policy, policy.score(Body([], np.array([4, 7, 8]), 9, 0)))"
    )
    said = run_beside(tmp_path, "mlx_tq.policies", "odd:Odd", FOREIGN_POLICY, code)
    assert said.strip() == "odd:trigger=8:parity=1 [1 0 1]"
