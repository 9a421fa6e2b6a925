"""What attention costs, counted on the simulator: bytes and lane operations per packed token and KV head.

docs/kernels.md tells these numbers.
"""

import mlx.core as mx
import numpy as np
import pytest
from attention_cases import HEADS, make_problem
from metal_sim.run import Counters
from sdpa_vector import sdpa_vector
from simulated import simulated

from mlx_tq.kernels import attend, phases
from mlx_tq.kernels.phases import Phases

FEW, MANY = 96, 224
CASE = {"dims": (128, 128), "key": "tq4", "value": "tq4", "batch": 1, "length": 1, "prefix": 0, "recent": 0}


def counted(groups: int, body: int) -> Counters:
    problem = make_problem(**CASE, groups=groups, body=body)
    with simulated() as counters:
        problem.solve(attend._attend_gpu)
    return counters[0]


def bytes_per_token(groups: int) -> float:
    counters = [counted(groups, body).loaded for body in (FEW, MANY)]
    few, many = (loaded["packed_rows"] + loaded["row_pairs"] for loaded in counters)
    return (many - few) / (MANY - FEW) / HEADS


def operations_per_token(few: Counters, many: Counters, heads: int) -> dict[str, float]:
    return {
        name: (many.operations[name] - few.operations[name]) / (MANY - FEW) / heads
        for name in many.operations
        if many.operations[name]
    }


def attend_operations(groups: int) -> float:
    found = operations_per_token(counted(groups, FEW), counted(groups, MANY), HEADS)
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
    assert bytes_per_token(groups) == times * make_problem(**CASE).arguments["layout"].nbytes


def test_lane_operations(monkeypatch):
    with phases.using(Phases(least_block=1024, short=0)):
        ours, plain = attend_operations(4), sdpa_operations(4)
        monkeypatch.setattr(attend, "QUERIES", 1)
        per_head = attend_operations(4)
    print(f"shared {ours:.0f}, per query head {per_head:.0f}, sdpa_vector at fp16 {plain:.0f}")
    assert ours <= 0.45 * per_head
    assert ours <= plain
