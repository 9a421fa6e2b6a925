"""Expected attention: the mean weight that queries to come give to a token, as if they were Gaussian.

Source: Devoto et al., Expected Attention (kvpress): exp(mu K / sqrt(D) + K^T Cov K / 2 D), normalised over tokens,
times the norm of the value; mu and Cov are those of queries turned to the positions to come.
"""

from functools import reduce

import mlx.core as mx
import numpy as np

from mlx_tq.errors import CacheFormatError
from mlx_tq.evict.policy import PackedLayer
from mlx_tq.evict.queries import QueryStats
from mlx_tq.evict.rope import Rope
from mlx_tq.evict.virtual import OFFSETS, virtual_query

BLOCK_TOKENS = 1024  # decoded at a time


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


def expected_attention(layer: PackedLayer, rope: Rope, stats: QueryStats, tokens: int, last: int) -> np.ndarray:
    """The weight of each of the first `tokens` rows times its value's norm, averaged over heads: float64 [S]."""
    heads, dim = layer.rows.shape[1], stats.centre.shape[1]
    mean = virtual_query(rope, stats.centre, last).reshape(heads, -1, dim)
    covariance = turned_covariance(rope, stats, last).reshape(heads, -1, dim, dim)
    logits, norms = [], []
    for start in range(0, tokens, BLOCK_TOKENS):
        block = layer.rows[:, :, start : min(start + BLOCK_TOKENS, tokens)]
        keys = layer.layout.key.decode(layer.layout.keys(block))[0][:, None]  # [H, 1, S, D]
        quadratic = ((keys @ covariance) * keys).sum(axis=-1)  # [H, G, S]
        linear = (mean[:, :, None] * keys).sum(axis=-1)
        logits.append(linear / dim**0.5 + quadratic / (2 * dim))
        norms.append(mx.linalg.norm(layer.layout.value.decode_rotated(layer.layout.values(block))[0], axis=-1))
        mx.eval(logits[-1], norms[-1])
    weights = mx.softmax(mx.concatenate(logits, axis=-1), axis=-1, precise=True)
    found = (weights * mx.concatenate(norms, axis=-1)[:, None]).mean(axis=(0, 1))
    return np.array(found, np.float64)
