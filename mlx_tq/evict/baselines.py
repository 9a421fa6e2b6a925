"""Policies that ask no queries: the controls of every measurement."""

from dataclasses import dataclass
from typing import ClassVar

import mlx.core as mx
import numpy as np

from mlx_tq.evict.policy import Body, PackedLayer, Policy

BLOCK_TOKENS = 4096  # decoded at a time
SINKS = 4


@dataclass(frozen=True)
class Random(Policy):
    """Any token."""

    name: ClassVar[str] = "random"

    def score(self, body: Body) -> np.ndarray:
        """Uniform in [0, 1), from the seed and the round."""
        return np.random.default_rng((self.config.seed, body.round)).random(len(body.positions))


@dataclass(frozen=True)
class Recency(Policy):
    """The newest tokens stay."""

    name: ClassVar[str] = "recency"
    segmented: ClassVar[bool] = False

    def score(self, body: Body) -> np.ndarray:
        """The position."""
        return body.positions.astype(np.float64)


@dataclass(frozen=True)
class Streaming(Policy):
    """The first four tokens (attention sinks) and the newest stay.

    Source: Xiao et al., Efficient Streaming Language Models with Attention Sinks, arXiv 2309.17453. With a prefix of 4
    or more it is `recency`.
    """

    name: ClassVar[str] = "streaming"
    segmented: ClassVar[bool] = False

    def score(self, body: Body) -> np.ndarray:
        """The position, or infinity for a sink."""
        return np.where(body.positions < SINKS, np.inf, body.positions.astype(np.float64))


@dataclass(frozen=True)
class KeyNorm(Policy):
    """Tokens with small keys stay.

    Source: Devoto et al., A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression, arXiv 2406.11430;
    there for each head, here for all heads and layers together.
    """

    name: ClassVar[str] = "knorm"

    def score(self, body: Body) -> np.ndarray:
        """Minus the norm of the key, in units of its head's mean, averaged over heads and layers."""
        tokens = len(body.positions)
        norms: np.ndarray = np.mean([_norms(layer, tokens) for layer in body.layers], axis=0)
        return -norms


def _norms(layer: PackedLayer, tokens: int) -> np.ndarray:
    """Mean over heads of the key norms, each head's in units of its mean: [S]."""
    parts = []
    for start in range(0, tokens, BLOCK_TOKENS):
        block = layer.rows[:, :, start : min(start + BLOCK_TOKENS, tokens)]
        parts.append(mx.linalg.norm(layer.layout.key.decode_rotated(layer.layout.keys(block)), axis=-1))
        mx.eval(parts[-1])
    norms = mx.concatenate(parts, axis=-1)[0]  # [H, S]
    return np.array((norms / mx.maximum(norms.mean(axis=-1, keepdims=True), 1e-12)).mean(axis=0))
