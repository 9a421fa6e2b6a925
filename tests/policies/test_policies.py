"""Every policy of one table: its options as text, its scores, what it refuses; and policies of other packages."""

import json
from dataclasses import fields

import mlx.core as mx
import numpy as np
import pytest
from foreign import run_beside
from mlx_lm.models import rope_utils

from mlx_tq.codec.formats import get_format
from mlx_tq.codec.formats.base import CodecOptions
from mlx_tq.codec.rows import RowLayout
from mlx_tq.config import EvictConfig, KVConfig
from mlx_tq.errors import ConfigError
from mlx_tq.policies import CalibratedPolicy, PackedLayer, PackedTokens, Policy, Published, parse_policy, policy_names
from mlx_tq.policies.calibration import QueryStats
from mlx_tq.policies.rope import learn_rope

# The options of each policy, with another value than the default.
COMMON = "segments=4 granularity=64 trigger=512"
CALIBRATED = f"{COMMON} warmup=256 calibration=/data/100%25/12%3A30.safetensors"
POLICIES = {
    "triattention": CALIBRATED,
    "published": f"{CALIBRATED} mode=v2 segment_tokens=256 pooling=top ema=0.1 recalibrate=4096 evict=highest "
    "aggregation=v3 score_unrotated_dims=on skip_layers=2",
    "expected_attention": CALIBRATED,
    "knorm": COMMON,
    "recency": COMMON,
    "streaming": COMMON,
    "random": f"{COMMON} seed=7",
    "heads": f"{COMMON} window=256 sinks=64",
}
TOKENS, DIM = 70, 64
FOREIGN_POLICY = """
from dataclasses import dataclass
from mlx_tq.policies import Policy

@dataclass(frozen=True, kw_only=True)
class Odd(Policy):
    name = "odd"
    parity: int = 0

    def score(self, tokens):
        return (tokens.positions + self.parity) % 2
"""


def packed_tokens(seed=0, spare=0, calibrated=True):
    """Two layers of random keys, with `spare` rows behind them that hold rubbish."""
    rng = np.random.default_rng(seed)
    rope = learn_rope(rope_utils.initialize_rope(DIM, 1e4, False, None, 4096), DIM)
    layout = RowLayout(*[get_format(name).codec(DIM, CodecOptions(), mx.float32) for name in ("q8", "tq4")])
    layers = []
    for _ in range(2):
        keys, values = (mx.array(rng.standard_normal((1, 2, TOKENS, DIM)).astype(np.float32)) for _ in range(2))
        queries = rng.standard_normal((4, 1, DIM)) + 0.3 * rng.standard_normal((4, 99, DIM))
        moments = (queries.mean(axis=1), rng.random((4, DIM // 2)), queries.swapaxes(1, 2) @ queries / 99)
        stats = QueryStats(*(mx.array(moment.astype(np.float32)) for moment in moments))
        rows = layout.encode(keys, values).rows
        rubbish = mx.full((1, 2, spare, rows.shape[-1]), 0x7F7F7F7F, mx.uint32)
        layers.append(PackedLayer(mx.concatenate([rows, rubbish], axis=2), layout, None, rope, stats))
    if not calibrated:
        layers = [PackedLayer(layer.rows, layer.layout) for layer in layers]
    return PackedTokens(layers, np.arange(TOKENS) + 4, TOKENS + 40, 0)


@pytest.mark.parametrize("name", POLICIES)
def test_every_option_has_a_text_and_a_fingerprint(name):
    default, texts = parse_policy(name), POLICIES[name].split()
    assert (default.name, str(default)) == (name, name)
    assert [each.name for each in fields(default)] == [text.partition("=")[0] for text in texts]
    policies = [default, *(parse_policy(f"{name}:{text}") for text in texts)]
    assert [str(policy) for policy in policies[1:]] == [f"{name}:{text}" for text in texts]
    configs = [KVConfig(sinks=0, evict=EvictConfig(policy)) for policy in policies]
    assert len(set(policies)) == len({config.fingerprint() for config in configs}) == len(texts) + 1
    whole = KVConfig(sinks=0, evict=EvictConfig(":".join([name, *texts]), "50%@4096" if name == "heads" else 4096))
    assert KVConfig.from_dict(json.loads(json.dumps(whole.to_dict()))) == whole


@pytest.mark.parametrize("name", POLICIES)
def test_scores_are_one_number_per_token_and_ignore_spare_rows(name):
    policy = parse_policy(name)
    scores = policy.score(packed_tokens())
    assert scores.shape == (TOKENS,)
    assert not np.isnan(scores).any()
    assert len(np.unique(scores)) > TOKENS / 2
    assert np.array_equal(policy.score(packed_tokens()), scores)
    assert np.allclose(policy.score(packed_tokens(spare=6)), scores, rtol=1e-5)


@pytest.mark.parametrize("name", POLICIES)
def test_calibrated_policies_require_queries_and_others_do_not(name):
    policy, tokens = parse_policy(name), packed_tokens(calibrated=False)
    if isinstance(policy, CalibratedPolicy):
        with pytest.raises(ConfigError, match=f"{name} needs calibrated queries, and a layer lacks them"):
            policy.score(tokens)
    else:
        assert len(policy.score(tokens)) == TOKENS


def test_values_of_each_type():
    """A subclass without a name replaces none, and defaults apply to options that a text omits."""

    class Louder(Published):
        pass

    assert issubclass(Louder, Policy)
    assert set(policy_names()) == set(POLICIES)
    assert parse_policy("random:trigger=64", trigger=8, seed=3, warmup=9) == parse_policy("random:trigger=64:seed=3")
    policy = parse_policy(":".join(["published", *POLICIES["published"].split()]))
    assert type(policy) is Published
    assert policy == Published(
        segments=4, granularity=64, trigger=512, warmup=256, calibration="/data/100%/12:30.safetensors", mode="v2",
        segment_tokens=256, pooling="top", ema=0.1, recalibrate=4096, evict="highest", aggregation="v3",
        score_unrotated_dims=True, skip_layers=2,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("triatention", "policy 'triatention' is unknown; valid are .*knorm.* Did you mean triattention"),
        ("", "policy '' is unknown; valid are "),
        ("triattention:mode=v1", "option of triattention 'mode' is unknown; valid are calibration, granularity"),
        ("published:agregation=v3", "option of published 'agregation' is unknown; .* Did you mean aggregation"),
        ("knorm:warmup=64", "option of knorm 'warmup' is unknown; valid are granularity, segments, trigger"),
        (
            "published:aggregation=pape",
            "aggregation 'pape' is unknown; valid are weight, paper, v3. Did you mean paper",
        ),
        ("published:highest", "'highest' in 'published:highest' is not an option; write options as in "),
        ("knorm:trigger=1:trigger=2", "trigger occurs twice in "),
        ("published:score_unrotated_dims=no", "score_unrotated_dims takes on or off."),
        ("knorm:segments=x", "segments=x does not fit knorm: segments takes a whole number."),
        ("published:ema=x", "ema takes a number."),
        ("published:mode=v4", "mode 'v4' is unknown; valid are v1, v2, v3."),
        ("published:evict=low", "evict 'low' is unknown; valid are lowest, highest. Did you mean lowest"),
        ("knorm:granularity=7", "granularity 7 is unknown; valid are 1, 8, 16, 32, 64."),
        ("published:pooling=sum", "pooling 'sum' is unknown; valid are mean, max, top."),
        ("knorm:segments=0", "segments is 0; it must be 1 or more."),
        ("published:segment_tokens=-1", "segment_tokens is -1; it must be 0 or more."),
        ("knorm:trigger=0", "trigger is 0; it must be 1 or more."),
        ("random:seed=-1", "seed is -1; it must be 0 or more."),
        ("triattention:warmup=0", "warmup is 0; it must be 1 or more."),
        ("published:skip_layers=-1", "skip_layers is -1; it must be 0 or more."),
        ("published:ema=1", "ema is 1.0; it must be from 0 .* to below 1"),
        ("published:ema=nan", "ema is nan; it must be from 0"),
        ("published:recalibrate=100", "recalibrate is 100; it must be 0 or at least warmup .1024.."),
    ],
)
def test_refused_texts(text, message):
    with pytest.raises(ConfigError, match=message):
        EvictConfig(text)


def test_refused_types():
    with pytest.raises(ConfigError, match="warmup is 'x'; it must be of type int"):
        Published(warmup="x")
    with pytest.raises(ConfigError, match="score_unrotated_dims is 1; it must be of type bool"):
        Published(score_unrotated_dims=1)


def test_a_policy_of_another_package_is_found_and_has_options(tmp_path):
    code = (
        "import numpy as np\n"
        "from mlx_tq.config import EvictConfig\n"
        "from mlx_tq.policies import PackedTokens\n"
        "policy = EvictConfig('odd:parity=1:trigger=8').policy\n"
        "print(policy, policy.score(PackedTokens([], np.array([4, 7, 8]), 9, 0)))"
    )
    output = run_beside(tmp_path, "mlx_tq.policies", "odd:Odd", FOREIGN_POLICY, code)
    assert output.strip() == "odd:trigger=8:parity=1 [1 0 1]"
