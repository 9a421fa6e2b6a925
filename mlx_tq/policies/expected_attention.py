"""The policy `expected_attention`: the mean weight that later queries give to a token, as if they were Gaussian."""

from dataclasses import dataclass
from functools import reduce
from typing import ClassVar

import mlx.core as mx
import numpy as np

from mlx_tq.errors import CacheFormatError
from mlx_tq.policies.calibration import QueryStats
from mlx_tq.policies.policy import CalibratedPolicy, PackedLayer
from mlx_tq.policies.rope import OFFSETS, Rope
from mlx_tq.policies.triattention import virtual_query, weigh_values


@dataclass(frozen=True, kw_only=True)
class ExpectedAttention(CalibratedPolicy):
    """Keep the tokens whose values later queries are expected to read.

    A token's score is exp(mu K / sqrt(D) + K^T Cov K / 2 D), normalized over tokens, times the norm of its value,
    averaged over heads and layers; mu and Cov are mean and covariance of the queries, rotated to later positions.

    Source: Devoto et al., Expected Attention (kvpress).
    """

    name: ClassVar[str] = "expected_attention"
    needs_covariance: ClassVar[bool] = True

    def score_layer(self, layer: PackedLayer, rope: Rope, stats: QueryStats, tokens: int, last: int) -> np.ndarray:
        heads, dim = layer.rows.shape[1], stats.center.shape[1]
        mean = virtual_query(rope, stats.center, last).reshape(heads, -1, dim)
        covariance = _rotated_covariance(rope, stats, last).reshape(heads, -1, dim, dim)

        def compute_logits(part: PackedLayer) -> mx.array:
            keys = part.keys()[0][:, None]  # [H, 1, S, D]
            quadratic = ((keys @ covariance) * keys).sum(axis=-1)  # [H, G, S]
            linear = (mean[:, :, None] * keys).sum(axis=-1)
            logits: mx.array = linear / dim**0.5 + quadratic / (2 * dim)
            return logits

        return weigh_values(layer.map_rows(compute_logits, tokens, 1024), layer.value_norms(tokens))


def _rotated_covariance(rope: Rope, stats: QueryStats, last: int) -> mx.array:
    """Return the covariance of queries, averaged over the positions `last` + OFFSETS: fp32 [Hq, D, D]."""
    if stats.moment is None:
        raise CacheFormatError(
            "the calibration has no covariance, which expected_attention needs. Make it again with mlx_tq.calibrate "
            "--covariance."
        )
    covariance = stats.moment - stats.center[:, :, None] * stats.center[:, None, :]

    def rotate(offset: int) -> mx.array:
        half = rope.rotate(covariance, last + offset).swapaxes(-1, -2)
        return rope.rotate(half, last + offset)

    return reduce(mx.add, map(rotate, OFFSETS)) / len(OFFSETS)
