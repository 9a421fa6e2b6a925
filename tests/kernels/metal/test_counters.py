"""The cost of attention on the simulator: bytes and lane operations per packed token and KV head.

docs/measurements/speed.md has these numbers.
"""

import mlx.core as mx
import numpy as np
import pytest

from kernels.cases import HEADS, make_problem
from kernels.metal.simulated import simulated
from metal_sim.run import Counters
from metal_sim.sdpa_vector import sdpa_vector
from mlx_tq.codec.normalization import MEAN_TOKENS
from mlx_tq.kernels import attend_gpu, thresholds
from mlx_tq.kernels.attend import attend
from mlx_tq.kernels.thresholds import KernelThresholds

FEW, MANY = 96, 224
CASE = {"dims": (128, 128), "key": "tq4", "value": "tq4", "batch": 1, "length": 1, "sink_tokens": 0, "recent": 0}


def count(groups: int, packed: int, **changes) -> Counters:
    problem = make_problem(**CASE | changes, groups=groups, packed=packed)
    with simulated() as counters:
        problem.solve(attend)
    return counters[0]


def operations_per_token(few: Counters, many: Counters, heads: int) -> float:
    """Return the operations of a token from two contexts, and print them by kind for the docs."""
    kinds = {
        name: (many.operations[name] - few.operations[name]) / (MANY - FEW) / heads
        for name in many.operations
        if many.operations[name]
    }
    print({name: round(number) for name, number in kinds.items()})
    return sum(kinds.values())


def attend_operations(groups: int, level_tables: int = 1, **changes) -> float:
    with thresholds.using(KernelThresholds(min_block=1024, short_tokens=0, level_tables=level_tables)):
        return operations_per_token(*(count(groups, packed, **changes) for packed in (FEW, MANY)), HEADS)


def sdpa_operations(groups: int) -> float:
    """Return the operations of mlx's own kernel at fp16, after checking its result."""
    counters = []
    for tokens in (FEW, MANY):
        rng = np.random.default_rng(0)
        shapes = [(groups, 128), (1, tokens, 128), (1, tokens, 128)]
        queries, keys, values = ((rng.standard_normal(shape) / 3).astype(np.float16) for shape in shapes)
        out, cost = sdpa_vector(queries, keys, values)
        arrays = mx.array(queries)[None, :, None], mx.array(keys)[None], mx.array(values)[None]
        expected = np.array(mx.fast.scaled_dot_product_attention(*arrays, scale=1.0))[0, :, 0]
        assert np.allclose(out, expected, atol=1e-3)
        counters.append(cost)
    return operations_per_token(*counters, heads=1)


@pytest.mark.parametrize(("groups", "times"), [(1, 1), (2, 1), (4, 1), (5, 1), (6, 1), (8, 1), (9, 2), (16, 2)])
def test_packed_bytes_are_loaded_once_for_eight_query_heads(groups, times):
    with thresholds.using(KernelThresholds(short_tokens=0)):
        few, many = (count(groups, packed).loaded["packed_rows_0"] for packed in (FEW, MANY))
    assert (many - few) / (MANY - FEW) / HEADS == times * make_problem(**CASE).layout.nbytes


def test_lane_operations(monkeypatch):
    shared, sdpa = attend_operations(4), sdpa_operations(4)
    monkeypatch.setattr(attend_gpu, "QUERIES", 1)
    per_head = attend_operations(4)
    print(f"shared {shared:.0f}, per query head {per_head:.0f}, sdpa_vector at fp16 {sdpa:.0f}")
    assert shared <= 0.45 * per_head
    assert shared <= sdpa


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_trellis_codes_cost_less_than_polynomials(bits):
    """A level is loaded, not computed; bank conflicts of these loads are not counted."""
    formats = ({"key": f"{kind}{bits}", "value": f"{kind}{bits}"} for kind in ("tq", "tcq"))
    polynomial, trellis = (attend_operations(4, level_tables=0, **pair) for pair in formats)
    print(f"tq{bits} {polynomial:.0f}, tcq{bits} {trellis:.0f}")
    assert trellis <= 0.8 * polynomial


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("dim", [64, 128])
def test_normalized_keys_cost_at_most_5_percent(groups, dim):
    """Before an eviction; the two contexts differ by as many tokens as share a mean."""
    assert MANY - FEW == MEAN_TOKENS
    plain, normalized = (attend_operations(groups, dims=(dim, dim), normalized=kind) for kind in (None, "blocks"))
    print(f"plain {plain:.0f}, normalized {normalized:.0f}")
    assert normalized <= 1.05 * plain
