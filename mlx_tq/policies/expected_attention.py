"""The policy `expected_attention`: the mean weight that queries to come give to a token, as if they were Gaussian.

Source: Devoto et al., Expected Attention (kvpress): exp(mu K / sqrt(D) + K^T Cov K / 2 D), normalised over tokens,
times the norm of the value; mu and Cov are those of queries turned to the positions to come.
"""

from dataclasses import dataclass
from functools import reduce
from typing import ClassVar

import mlx.core as mx
import numpy as np

from mlx_tq.errors import CacheFormatError
from mlx_tq.policies.options import names_settings
from mlx_tq.policies.policy import Body, CalibratedPolicy, PackedLayer
from mlx_tq.policies.queries import QueryStats
from mlx_tq.policies.rope import Rope
from mlx_tq.policies.virtual_query import OFFSETS, virtual_query
from mlx_tq.policies.weighing import weighed

BLOCK_TOKENS = 1024  # decoded at a time


@names_settings
@dataclass(frozen=True, kw_only=True)
class ExpectedAttention(CalibratedPolicy):
    """Tokens whose values queries are expected to take in stay."""

    name: ClassVar[str] = "expected_attention"
    needs_covariance: ClassVar[bool] = True

    def score(self, body: Body) -> np.ndarray:
        """The expected weight of each token times its value's norm, averaged over heads and layers."""
        total = np.zeros(len(body.positions), np.float64)
        for layer in body.layers:
            total += self._of_layer(layer, len(total), body.length - 1)
        return total / len(body.layers)

    def _of_layer(self, layer: PackedLayer, tokens: int, last: int) -> np.ndarray:
        """The scores of the first `tokens` rows of a layer, averaged over heads: float64 [S]."""
        rope, stats = self.calibration_of(layer)
        heads, dim = layer.rows.shape[1], stats.centre.shape[1]
        mean = virtual_query(rope, stats.centre, last).reshape(heads, -1, dim)
        covariance = turned_covariance(rope, stats, last).reshape(heads, -1, dim, dim)
        logits, norms = [], []
        for start in range(0, tokens, BLOCK_TOKENS):
            block = layer.part(start, min(start + BLOCK_TOKENS, tokens))
            keys = block.keys()[0][:, None]  # [H, 1, S, D]
            quadratic = ((keys @ covariance) * keys).sum(axis=-1)  # [H, G, S]
            linear = (mean[:, :, None] * keys).sum(axis=-1)
            logits.append(linear / dim**0.5 + quadratic / (2 * dim))
            norms.append(block.value_norms())
            mx.eval(logits[-1], norms[-1])
        return weighed(mx.concatenate(logits, axis=-1), mx.concatenate(norms, axis=-1))


def turned_covariance(rope: Rope, stats: QueryStats, last: int) -> mx.array:
    """The covariance of queries, averaged over the positions `last` + OFFSETS: fp32 [Hq, D, D].

    Raises:
        CacheFormatError: the statistics lack it.
    """
    if stats.moment is None:
        raise CacheFormatError("the statistics have no covariance, which expected_attention needs.")
    covariance = stats.moment - stats.centre[:, :, None] * stats.centre[:, None, :]

    def turned(offset: int) -> mx.array:
        half = rope.turn(covariance, last + offset).swapaxes(-1, -2)
        return rope.turn(half, last + offset)

    return reduce(mx.add, map(turned, OFFSETS)) / len(OFFSETS)
