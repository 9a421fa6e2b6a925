"""What tokens are expected to add to the output of attention.

Source: Devoto et al., Expected Attention (kvpress): a token's expected weight times the norm of its value.
"""

import mlx.core as mx
import numpy as np


def weighed(logits: mx.array, norms: mx.array) -> np.ndarray:
    """The softmax over tokens of logits [H, G, S] times norms of values [H, S], the mean of all heads: float64 [S]."""
    weights = mx.softmax(logits, axis=-1, precise=True)
    return np.array((weights.mean(axis=1) * norms).mean(axis=0), np.float64)
