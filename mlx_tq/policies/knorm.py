"""The policy `knorm`: tokens with large keys leave.

Source: Devoto et al., A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression, arXiv 2406.11430; there
for each head, here for all heads and layers together.
"""

from dataclasses import dataclass
from typing import ClassVar

import mlx.core as mx
import numpy as np

from mlx_tq.policies.options import names_settings
from mlx_tq.policies.policy import Body, PackedLayer, Policy

BLOCK_TOKENS = 4096  # decoded at a time


@names_settings
@dataclass(frozen=True, kw_only=True)
class KeyNorm(Policy):
    """Tokens with small keys stay."""

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
        parts.append(mx.linalg.norm(layer.part(start, min(start + BLOCK_TOKENS, tokens)).keys(), axis=-1))
        mx.eval(parts[-1])
    norms = mx.concatenate(parts, axis=-1)[0]  # [H, S]
    return np.array((norms / mx.maximum(norms.mean(axis=-1, keepdims=True), 1e-12)).mean(axis=0))
