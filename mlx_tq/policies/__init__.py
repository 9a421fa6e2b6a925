"""How tokens are scored: policies, the statistics they score with, and the choice of those that leave."""

from mlx_tq.policies.config import Budget, EvictConfig, parse_budget
from mlx_tq.policies.expected_attention import ExpectedAttention
from mlx_tq.policies.knorm import KeyNorm
from mlx_tq.policies.policy import Body, CalibratedPolicy, PackedLayer, Policy, parse_policy, policy_names
from mlx_tq.policies.random import Random
from mlx_tq.policies.recency import Recency
from mlx_tq.policies.streaming import Streaming
from mlx_tq.policies.triattention import TriAttention

__all__ = [
    "Body",
    "Budget",
    "CalibratedPolicy",
    "EvictConfig",
    "ExpectedAttention",
    "KeyNorm",
    "PackedLayer",
    "Policy",
    "Random",
    "Recency",
    "Streaming",
    "TriAttention",
    "parse_budget",
    "parse_policy",
    "policy_names",
]
