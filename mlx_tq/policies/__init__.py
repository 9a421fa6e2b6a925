"""Eviction policies: what scores tokens, the calibration that they need, and the selection of the evicted tokens."""

from mlx_tq.policies.baselines import KeyNorm, Random, Recency, Streaming
from mlx_tq.policies.expected_attention import ExpectedAttention
from mlx_tq.policies.heads import Heads
from mlx_tq.policies.policy import CalibratedPolicy, PackedLayer, PackedTokens, Policy, parse_policy, policy_names
from mlx_tq.policies.published import Published
from mlx_tq.policies.triattention import TriAttention

__all__ = [
    "CalibratedPolicy",
    "ExpectedAttention",
    "Heads",
    "KeyNorm",
    "PackedLayer",
    "PackedTokens",
    "Policy",
    "Published",
    "Random",
    "Recency",
    "Streaming",
    "TriAttention",
    "parse_policy",
    "policy_names",
]
