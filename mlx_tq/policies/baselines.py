"""Policies that need no queries: `knorm`, `recency`, `streaming` and the control `random`."""

from dataclasses import dataclass
from typing import ClassVar

import mlx.core as mx
import numpy as np

from mlx_tq.policies.options import option
from mlx_tq.policies.policy import PackedTokens, Policy


@dataclass(frozen=True, kw_only=True)
class KeyNorm(Policy):
    """Keep the tokens with small keys.

    Source: Devoto et al., A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression, arXiv 2406.11430;
    there for each head, here for all heads and layers together.
    """

    name: ClassVar[str] = "knorm"

    def score(self, tokens: PackedTokens) -> np.ndarray:
        count = len(tokens.positions)
        means = []  # over heads, each head's norms in units of their mean: [S] of each layer
        for layer in tokens.layers:
            norms = layer.map_rows(lambda part: mx.linalg.norm(part.keys()[0], axis=-1), count)  # [H, S]
            means.append(np.array((norms / mx.maximum(norms.mean(axis=-1, keepdims=True), 1e-12)).mean(axis=0)))
        return np.asarray(-np.mean(means, axis=0))


@dataclass(frozen=True, kw_only=True)
class Random(Policy):
    """Keep random tokens: the control of every measurement.

    Attributes:
        seed: seed of the random numbers.
    """

    name: ClassVar[str] = "random"

    seed: int = option(0, minimum=0)

    def score(self, tokens: PackedTokens) -> np.ndarray:
        return np.random.default_rng((self.seed, tokens.round_number)).random(len(tokens.positions))


@dataclass(frozen=True, kw_only=True)
class Recency(Policy):
    """Keep the newest tokens."""

    name: ClassVar[str] = "recency"
    segmented: ClassVar[bool] = False

    def score(self, tokens: PackedTokens) -> np.ndarray:
        return tokens.positions.astype(np.float64)


@dataclass(frozen=True, kw_only=True)
class Streaming(Policy):
    """Keep the first four tokens (attention sinks) and the newest; with 4 sink tokens or more it equals `recency`.

    Source: Xiao et al., Efficient Streaming Language Models with Attention Sinks, arXiv 2309.17453.
    """

    name: ClassVar[str] = "streaming"
    segmented: ClassVar[bool] = False

    def score(self, tokens: PackedTokens) -> np.ndarray:
        return np.where(tokens.positions < 4, np.inf, tokens.positions.astype(np.float64))
