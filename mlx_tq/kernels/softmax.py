"""Partial attention results (m, l, o) and their exact merge (log-sum-exp), in fp32."""

from typing import NamedTuple

import mlx.core as mx

# Stands for minus infinity: a fully masked block then has finite differences instead of NaN.
MASKED = -1e30


class Partial(NamedTuple):
    """Unnormalised attention over some keys.

    m: running maximum of the scores [..., 1]. l: sum of exp(score - m) [..., 1]. o: sum of exp(score - m) v [..., Dv].
    """

    m: mx.array
    l: mx.array  # noqa: E741  the literature's name
    o: mx.array


def merge(a: Partial, b: Partial) -> Partial:
    """Attention over the keys of both. Their `o` must be in one space."""
    m = mx.maximum(a.m, b.m)
    weight_a, weight_b = mx.exp(a.m - m), mx.exp(b.m - m)
    return Partial(m, a.l * weight_a + b.l * weight_b, a.o * weight_a + b.o * weight_b)


def partial(scores: mx.array, values: list[mx.array], gain: mx.array | None = None) -> Partial:
    """Attend with given scores.

    Args:
        scores: fp32 [..., N, S], masked where needed.
        values: the value vectors cut along their last axis, fp32 [..., S, Dv / parts] each.
        gain: factor of each value vector, fp32 [..., S].
    """
    m = scores.max(axis=-1, keepdims=True)
    p = mx.exp(scores - m)
    total = p.sum(axis=-1, keepdims=True)
    if gain is not None:
        p = p * gain[..., None, :]
    return Partial(m, total, mx.concatenate([p @ part for part in values], axis=-1))
