"""What attention costs, counted on the simulator: bytes and lane operations per packed token and KV head.

docs/measurements/speed.md tells these numbers.
"""

import mlx.core as mx
import numpy as np
import pytest
from cases import HEADS, make_problem
from simulated import simulated

from metal_sim.run import Counters
from metal_sim.sdpa_vector import sdpa_vector
from mlx_tq.codec.normalization import MEAN_TOKENS
from mlx_tq.kernels import attend, attend_kernels, thresholds
from mlx_tq.kernels.thresholds import KernelThresholds

FEW, MANY = 96, 224
CASE = {"dims": (128, 128), "key": "tq4", "value": "tq4", "batch": 1, "length": 1, "sink_tokens": 0, "recent": 0}


def counted(groups: int, body: int, **changes) -> Counters:
    problem = make_problem(**CASE | changes, groups=groups, body=body)
    with simulated() as counters:
        problem.solve(attend._attend_gpu)
    return counters[0]


def bytes_per_token(groups: int) -> float:
    counters = [counted(groups, body).loaded for body in (FEW, MANY)]
    few, many = (loaded["packed_rows_0"] for loaded in counters)
    return (many - few) / (MANY - FEW) / HEADS


def operations_per_token(few: Counters, many: Counters, heads: int) -> dict[str, float]:
    return {
        name: (many.operations[name] - few.operations[name]) / (MANY - FEW) / heads
        for name in many.operations
        if many.operations[name]
    }


def attend_operations(groups: int, **changes) -> float:
    found = operations_per_token(*(counted(groups, body, **changes) for body in (FEW, MANY)), HEADS)
    print({name: round(number) for name, number in found.items()})
    return sum(found.values())


def sdpa_operations(groups: int) -> float:
    """mlx's own kernel at fp16; its result is checked, so that it is known to run as on a Mac."""
    counters = []
    for tokens in (FEW, MANY):
        rng = np.random.default_rng(0)
        shapes = [(groups, 128), (1, tokens, 128), (1, tokens, 128)]
        queries, keys, values = ((rng.standard_normal(shape) / 3).astype(np.float16) for shape in shapes)
        out, found = sdpa_vector(queries, keys, values)
        arrays = mx.array(queries)[None, :, None], mx.array(keys)[None], mx.array(values)[None]
        expected = np.array(mx.fast.scaled_dot_product_attention(*arrays, scale=1.0))[0, :, 0]
        assert np.allclose(out, expected, atol=1e-3)
        counters.append(found)
    return sum(operations_per_token(*counters, heads=1).values())


@pytest.mark.parametrize(("groups", "times"), [(1, 1), (2, 1), (4, 1), (5, 2), (8, 2), (16, 4)])
def test_packed_bytes_are_loaded_once_for_four_query_heads(groups, times):
    assert bytes_per_token(groups) == times * make_problem(**CASE).layout.nbytes


def test_lane_operations(monkeypatch):
    with thresholds.using(KernelThresholds(least_block=1024, short=0)):
        ours, plain = attend_operations(4), sdpa_operations(4)
        monkeypatch.setattr(attend_kernels, "QUERIES", 1)
        per_head = attend_operations(4)
    print(f"shared {ours:.0f}, per query head {per_head:.0f}, sdpa_vector at fp16 {plain:.0f}")
    assert ours <= 0.45 * per_head
    assert ours <= plain


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_trellis_codes_cost_less_than_polynomials(bits):
    """A level is loaded, not computed; what lanes that load from one bank wait for is not counted."""
    with thresholds.using(KernelThresholds(least_block=1024, short=0)):
        nearest, path = (attend_operations(4, key=f"{kind}{bits}", value=f"{kind}{bits}") for kind in ("tq", "tcq"))
    print(f"tq{bits} {nearest:.0f}, tcq{bits} {path:.0f}")
    assert path <= 0.8 * nearest


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("dim", [64, 128])
def test_normalized_keys_cost_at_most_5_percent(groups, dim):
    """Where no token has left; the two contexts differ by as many tokens as share a mean."""
    assert MANY - FEW == MEAN_TOKENS
    with thresholds.using(KernelThresholds(least_block=1024, short=0)):
        plain, normalized = (attend_operations(groups, dims=(dim, dim), normalized=kind) for kind in (None, "blocks"))
    print(f"plain {plain:.0f}, normalized {normalized:.0f}")
    assert normalized <= 1.05 * plain
