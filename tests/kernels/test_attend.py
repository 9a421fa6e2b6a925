"""`attend` and `prefill` on a CPU are as exact as mx.fast attention over the decoded cache, with or without kernels.

`prefill` rounds queries and full-precision keys to the model's dtype once more, after their rotation. On average that
costs up to 1.3x the error of mx.fast; the largest error is that of one query with large scores.
"""

from random import Random

import mlx.core as mx
import numpy as np
import pytest

from kernels.cases import PARAMETERS, SORTED, attend_exactly, check_attention, double, make_problem, random_mask
from kernels.covering import case_id, covering
from mlx_tq.kernels import attend as attend_module
from mlx_tq.kernels import backend
from mlx_tq.kernels import prefill as prefill_module
from mlx_tq.kernels.attend import attend
from mlx_tq.kernels.prefill import prefill

ALL = PARAMETERS | {"mask": (None, "causal", "bool", "additive")}
LENGTHS = ALL | {"length": (1, 8, 9, 17, 32, 33, 64, 100)}
FEWER = {"length": (1, 9, 32, 33, 100), "packed": (0, 1, 33, 97, 257), "groups": (1, 4, 7)}
PEAKS = {attend: 2.5, prefill: 3.0}  # for hundreds of cases each, with any BLAS
SMALL = {
    "dims": ((48, 48), (128, 128), (192, 128)),
    "packed": (0, 1, 33, 97),
    "groups": (1, 4, 7),
    "sink_tokens": (0, 5),
}
# Every value once, and some pairs of values that make small problems; `make test-full` has all pairs.
FAST = [(attend, case) for case in covering(ALL, 1) + covering(ALL | SMALL | {"length": (1, 2, 8)})[:4]]
FAST += [(prefill, case) for case in covering(ALL | FEWER, 1) + covering(ALL | SMALL | {"length": (9, 33)})[:4]]
CASES = [(attend, case) for case in covering(ALL)] + [(prefill, case) for case in covering(ALL | FEWER)]
SORTED_KEYS = {"key": SORTED, "dims": ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256))}
FAST += [(attend, case) for case in covering(ALL | SMALL | SORTED_KEYS, 1)]
FAST += [(prefill, case) for case in covering(ALL | SMALL | SORTED_KEYS | {"length": (9, 33)}, 1)]
CASES += [(attend, case) for case in covering(ALL | SORTED_KEYS)]
# B, Q, L, S stand for a size of the problem; 1 for a broadcast axis.
SHAPES = ("S", "1S", "L1", "LS", "QLS", "1LS", "11LS", "B1LS", "1QLS", "BQLS", "B11S", "BQ1S")
both = pytest.mark.parametrize(("kernel", "length"), [(attend, 3), (prefill, 17)])


@pytest.fixture(autouse=True, params=["reference", "cpu"])
def _backend(request):
    with backend.using(request.param):
        yield


def check(kernel, case, seed=0, peak=None):
    problem = make_problem(**case, seed=seed)
    check_attention(problem, problem.solve(kernel), peak=peak or PEAKS[kernel])


def numbered(cases):
    ids = [f"{kernel.__name__}-{case_id(case)}" for kernel, case in cases]
    return pytest.mark.parametrize(("seed", "kernel", "case"), [(i, *case) for i, case in enumerate(cases)], ids=ids)


@numbered(FAST)
def test_error_is_at_most_twice_that_of_mx_fast(kernel, case, seed):
    check(kernel, case, seed)


@pytest.mark.full
@numbered(CASES)
def test_error_with_all_pairs_of_values(kernel, case, seed):
    check(kernel, case, seed)


@pytest.mark.full
@pytest.mark.parametrize(("kernel", "parameters"), [(attend, ALL), (prefill, LENGTHS)], ids=["attend", "prefill"])
@pytest.mark.parametrize("part", range(20))
def test_error_in_random_cases(kernel, parameters, part):
    rng = Random(part)
    for number in range(50):
        check(kernel, {name: rng.choice(values) for name, values in parameters.items()}, seed=1000 * part + number)


@both
@pytest.mark.parametrize(("key", "packed"), [("q8", 97), ("tq4", 0), ("tq3", 97), ("tq2", 97)])
def test_haar_rotation_and_sinks_in_another_dtype(kernel, length, key, packed):
    case = {"key": key, "value": "tq3", "length": length, "packed": packed, "rotation": "haar", "mask": "causal"}
    check(kernel, case)
    problem = make_problem(**case, sinks=True)
    wide = problem.arguments["sinks"].astype(mx.float32)
    assert mx.array_equal(problem.solve(attend), problem.solve(attend, sinks=wide))


@both
@pytest.mark.parametrize("kind", ["bool", "additive"])
@pytest.mark.parametrize("letters", SHAPES)
def test_mask_arrays(kernel, length, kind, letters):
    sizes = {"B": 2, "Q": 4, "L": length, "S": 5 + 33 + 4 + length, "1": 1}
    mask = random_mask(kind, [sizes[letter] for letter in letters], "float16")
    check(kernel, {"batch": 2, "length": length, "packed": 33, "recent": 4, "mask": mask, "sinks": True}, peak=4.0)


@pytest.mark.parametrize("mask", [None, "causal", "bool", "additive"])
@pytest.mark.parametrize("block", [1, 32, 96, 97, *(pytest.param(size, marks=pytest.mark.full) for size in (7, 98))])
def test_blocks_of_packed_tokens(monkeypatch, block, mask):
    monkeypatch.setattr(attend_module, "BLOCK_TOKENS", block)
    monkeypatch.setattr(prefill_module, "BLOCK_TOKENS", block)
    for kernel in PEAKS:
        check(kernel, {"mask": mask, "sinks": True, "dtype": "float32"}, peak=4.0)


@pytest.mark.parametrize("additive", [False, True])
@pytest.mark.parametrize("hidden", [(0, 32), (32, 64), (64, 97), (0, 97)])
def test_fully_masked_blocks(monkeypatch, hidden, additive):
    monkeypatch.setattr(attend_module, "BLOCK_TOKENS", 32)
    visible = np.ones((3, 111), bool)
    visible[:, 5 + hidden[0] : 5 + hidden[1]] = False
    mask = mx.where(mx.array(visible), 0.0, -mx.inf).astype(mx.float16) if additive else mx.array(visible)
    check(attend, {"mask": mask})


@pytest.mark.parametrize("additive", [False, True])
def test_a_fully_masked_query_is_finite(additive):
    visible = np.ones((3, 111), bool)
    visible[1] = False
    problem = make_problem(mask=mx.where(mx.array(visible), 0.0, -mx.inf) if additive else mx.array(visible))
    out = double(problem.solve(attend))
    assert np.isfinite(out).all()
    truth = attend_exactly(
        double(problem.arguments["queries"]), *problem.decoded, problem.arguments["scale"], None, None
    )
    assert np.allclose(out[:, :, ::2], truth[:, :, ::2], atol=2e-3)


@both
def test_large_scores_and_sinks_do_not_overflow(kernel, length):
    problem = make_problem(length=length, dtype="float32").replace(scale=50.0)
    check_attention(problem, problem.solve(kernel), peak=PEAKS[kernel])
    out = problem.solve(attend, sinks=mx.full((4,), 1e4))
    assert mx.array_equal(out, mx.zeros_like(out))
