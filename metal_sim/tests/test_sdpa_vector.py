"""mlx's attention kernels from the wheel: their results, what they cost, and which of them runs."""

import mlx.core as mx
import numpy as np
import pytest

from metal_sim.sdpa_vector import GQA, GQA_HEADS, ONE_PASS, TWO_PASS, choose_kernel, run_kernel

FEW, MANY = 256, 512  # tokens, so that every simdgroup has some
# The largest case has 1,024 threads a threadgroup.
SHAPES = [(64, 1, 1), (64, 8, 4), (96, 2, 3), (128, 4, 1), (128, 4, 8), (256, 6, 1), (512, 8, 1)]
CASES = [
    *((name, *shape) for shape in SHAPES for name in (ONE_PASS, TWO_PASS)),
    *((GQA, *shape, 1) for shape in GQA_HEADS),
]


def attend(name, dim, groups, length, tokens, heads=1):
    rng = np.random.default_rng(0)
    shapes = [(heads * groups, length, dim), (heads, tokens, dim), (heads, tokens, dim)]
    arrays = [(rng.standard_normal(shape) / 3).astype(np.float16) for shape in shapes]
    out, counters = run_kernel(name, *arrays)
    queries, keys, values = (mx.array(array)[None].astype(mx.float32) for array in arrays)
    expected = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=1.0, mask="causal")
    assert np.allclose(out, np.array(expected)[0], atol=1e-3)
    return counters


@pytest.mark.parametrize(("name", "dim", "groups", "length"), CASES)
def test_result_and_cost_of_a_token(name, dim, groups, length):
    """A lane has D / 32 dims, with an fma for each of the query's, and a product and an fma for each of the value's."""
    few, many = (attend(name, dim, groups, length, tokens) for tokens in (FEW, MANY))
    added = MANY - FEW
    rows = groups * length
    operations = {kind: (many.operations[kind] - n) / added for kind, n in few.operations.items()}
    in_a_lane = {"collective": 5, "add": 5 + 2, "compare": 1, "transcendental": 2, "multiply": dim / 32}
    in_a_lane["fma"] = 2 * dim / 32 + 1
    assert {kind: n for kind, n in operations.items() if n} == {kind: 32 * rows * n for kind, n in in_a_lane.items()}
    loads = {ONE_PASS: rows, TWO_PASS: rows, GQA: groups / GQA_HEADS.get((dim, groups), 1)}[name]
    for part in ("keys", "values"):
        assert (many.loaded[part] - few.loaded[part]) / added == loads * 2 * dim
        assert (many.fetched[part] - few.fetched[part]) / added == (rows if name == ONE_PASS else 1) * 2 * dim


@pytest.mark.parametrize("name", [ONE_PASS, TWO_PASS, GQA])
def test_several_heads_and_a_number_of_tokens_that_nothing_divides(name):
    attend(name, 128, 8, 1, 203, heads=2)


@pytest.mark.parametrize(
    ("shape", "base", "large"),
    [
        ((128, 1, 1, 65536), ONE_PASS, TWO_PASS),
        ((128, 4, 1, 1023), ONE_PASS, ONE_PASS),
        ((128, 4, 1, 1024), ONE_PASS, TWO_PASS),
        ((128, 4, 1, 4096), TWO_PASS, TWO_PASS),
        ((64, 8, 1, 8191), TWO_PASS, TWO_PASS),
        ((64, 8, 1, 8192), GQA, GQA),
        ((128, 16, 1, 8192), GQA, GQA),
        ((64, 16, 1, 8192), TWO_PASS, TWO_PASS),
        ((256, 8, 1, 65536), TWO_PASS, TWO_PASS),
        ((128, 8, 4, 65536), TWO_PASS, TWO_PASS),
        ((128, 8, 5, 65536), None, None),
        ((128, 1, 9, 65536), None, None),
        ((192, 4, 1, 65536), None, None),
        ((512, 8, 1, 1023), None, None),
        ((512, 8, 1, 1024), ONE_PASS, TWO_PASS),
        ((512, 8, 2, 65536), None, None),
        ((512, 4, 1, 65536), None, None),
    ],
)
def test_the_kernel_that_runs(shape, base, large):
    assert choose_kernel(*shape) == base
    assert choose_kernel(*shape, large_chip=True) == large


def test_the_heads_of_a_simdgroup_fit_threadgroup_memory():
    """Outputs, sums and maxima in fp32, for each query head from each part of the tokens."""
    assert all(
        groups % heads == 0 and 4 * groups * heads * (dim + 2) <= 32768 for (dim, groups), heads in GQA_HEADS.items()
    )


def test_sinks_and_masks_keep_the_general_kernel():
    assert choose_kernel(64, 8, 1, 65536, sinks=True) == choose_kernel(64, 8, 1, 65536, masked=True) == TWO_PASS
    assert choose_kernel(512, 8, 1, 65536, masked=True) is None
