"""attend.metal on the simulator, against float64."""

import mlx.core as mx
import numpy as np
import pytest
from kernel_cases import DIMS, FORMATS, case_id, exact, largest_error, make_layout, pairwise, random
from simulated import ORDERS, simulated

from mlx_tq.kernels.attend_packed import _attend_packed_gpu, attend_packed, attend_packed_ref
from mlx_tq.kernels.encode import encode_ref

QUERIES = (1, 2, 4, 7, 8, 16)
TOKENS = (1, 2, 31, 32, 33, 97, 257)
CASES = [
    {
        **case,
        "value_dim": DIMS[(number * 4 + 1) % len(DIMS)],
        "dtype": "float16",
        "queries": QUERIES[number % len(QUERIES)],  # these two are data: no more texts to build
        "tokens": TOKENS[number % len(TOKENS)],
    }
    for number, case in enumerate(pairwise({"key_dim": DIMS, "key": FORMATS, "value": FORMATS}))
]
CAPACITY = 7


def problem(case: dict) -> tuple:
    layout = make_layout(case)
    shape = (2, 2, case["tokens"])
    keys = random((*shape, case["key_dim"]), case["dtype"])
    values = random((*shape, case["value_dim"]), case["dtype"], seed=1)
    rows = encode_ref(keys, values, layout).rows
    rows = mx.concatenate([rows, mx.full((2, 2, CAPACITY, layout.words), 0xFFFFFFFF, mx.uint32)], axis=2)
    queries = random((2, 2, case["queries"], case["key_dim"]), "float32", seed=2) * (3 / case["key_dim"] ** 0.5)
    return queries, rows, case["tokens"], layout


def solution(queries, rows, body, layout) -> np.ndarray:
    """The normalised output in float64."""
    parts = ((layout.key, layout.keys), (layout.value, layout.values))
    keys, values = (exact(codec, part(rows[:, :, :body])) for codec, part in parts)
    scores = np.array(queries, np.float64) @ keys.swapaxes(-1, -2)
    p = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return p @ values / p.sum(axis=-1, keepdims=True)


def check(case: dict, **how) -> None:
    arguments = problem(case)
    with simulated(**how):
        found = _attend_packed_gpu(*arguments)
    expected, truth = attend_packed_ref(*arguments), solution(*arguments)
    assert mx.allclose(found.m, expected.m, rtol=1e-5, atol=1e-5)
    assert mx.allclose(found.l, expected.l, rtol=1e-4)
    # Of one or two tokens the reference may be right by chance; nothing in fp32 is better than a few roundings.
    roundings = 8 * 2.0**-24 * np.abs(truth).max()
    assert largest_error(found.o / found.l, truth) <= max(2 * largest_error(expected.o / expected.l, truth), roundings)


@pytest.mark.parametrize("number", range(len(CASES)), ids=[case_id(case) for case in CASES])
def test_error_is_at_most_twice_the_reference(number):
    check(CASES[number], order=ORDERS[number % len(ORDERS)])


@pytest.mark.parametrize("number", [3, 20])
def test_under_sanitizers(number):
    check({**CASES[number], "tokens": 33}, sanitize=True)


@pytest.mark.parametrize("queries", [4, 8, 10])
def test_each_code_is_read_once_for_four_queries(queries):
    case = {"key_dim": 128, "value_dim": 128, "key": "tq4", "value": "tq4", "dtype": "float16", "tokens": 97}
    *arguments, layout = problem({**case, "queries": queries})
    with simulated() as counters:
        _attend_packed_gpu(*arguments, layout)
    assert counters[0].loaded["packed_rows"] == -(-queries // 4) * 2 * 2 * 97 * layout.nbytes


def test_without_a_gpu_mlx_does_it():
    arguments = problem({**CASES[0], "tokens": 5})
    assert all(
        mx.array_equal(a, b) for a, b in zip(attend_packed(*arguments), attend_packed_ref(*arguments), strict=True)
    )
