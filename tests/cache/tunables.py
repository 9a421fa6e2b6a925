"""Passes of every size on a cache, under other thresholds: none may change an answer beyond rounding."""

from dataclasses import replace
from functools import cache

import mlx.core as mx
import numpy as np

from cache.tools import DIM, decoded, error, exact_attention, feed, make_cache, random, random_pair, reference_error
from mlx_tq.kernels import thresholds
from mlx_tq.kernels.thresholds import RANGES, KernelThresholds

EXTREMES = [(name, value) for name, ends in RANGES.items() for value in ends]
PASSES = (1, 5, 8, 9, 40)
FORMATS = (("tq2", "tq2"), ("q8", "tq4"))
SCALE = DIM**-0.5
# Of the error of mlx's own attention in the same type: one query's largest, see tests/kernels/test_prefill.py.
PEAK = 4.0


def views(formats, context, count):
    """What `count` tokens see after a context that came as a prompt and a few short passes."""
    tokens = random_pair(context + count)
    seen = feed(make_cache(*formats), *tokens, [context - 23, 5, 8, 10, count])
    return seen[-1]


def queries(count):
    return random(count, heads=4, seed=7)


@cache
def wanted(formats, context, count):
    """By runs of queries that see the same: how many, their answer in float64, and the allowed error."""
    with thresholds.using(KernelThresholds()):
        view = views(formats, context, count)
    runs = [(0, count, view)]
    if view.earlier is not None:
        before, earlier = view.earlier
        runs = [(0, before, earlier), (before, count, view)]
    found = []
    for start, stop, part in runs:
        asked = queries(count)[:, :, start:stop]
        exact = exact_attention(asked, *decoded(part), SCALE)
        own = reference_error(part, asked, exact, SCALE, mask="causal")
        found.append((start, stop, exact, PEAK * own))
    return found


def check(name, value, formats, context):
    """Assert that a threshold of this value changes no answer beyond rounding."""
    for count in PASSES:
        with thresholds.using(replace(KernelThresholds(), **{name: value})):
            out = views(formats, context, count).attend(queries(count), SCALE, "causal", None)
            mx.eval(out)
        for start, stop, exact, room in wanted(formats, context, count):
            assert np.isfinite(exact).all()
            assert error(out[:, :, start:stop], exact) <= room, (count, start)
