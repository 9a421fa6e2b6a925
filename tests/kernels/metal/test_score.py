"""score.metal and compact.metal on the simulator: against float64, and against what they gather."""

from itertools import product

import mlx.core as mx
import numpy as np
import pytest
from covering import case_id, covering
from kernel_cases import ALL_TOKENS, DIMS, DTYPES, FORMATS, exact, largest_error, make_layout, random
from metal_sim.run import SimulationError
from simulated import ORDERS, simulated

from mlx_tq.codec.exact import hadamard_matrix, split_order
from mlx_tq.kernels.compact import _compact_gpu, compact_ref
from mlx_tq.kernels.encode import encode_ref
from mlx_tq.kernels.score import _score_gpu, score_ref

GROUPS = (1, 2, 4, 7, 8, 16)
TOKENS = (1, 3, 4, 5, 33)
TURNED = (1, 4, 0)  # RoPE may turn all dims, a quarter of them, or none
CASES = [
    {
        **case,
        "value_dim": DIMS[(number * 4 + 1) % len(DIMS)],
        "dtype": DTYPES[number % 3],
        "wide": number % 2 == 1,
        "group": GROUPS[number % len(GROUPS)],
        "tokens": TOKENS[number % len(TOKENS)],
        "turned": TURNED[number % 3],
    }
    for number, case in enumerate(covering({"key_dim": DIMS, "key": FORMATS, "value": ("fp16", "q8", "tq3")}))
]
ALL = {
    "key_dim": DIMS,
    "value_dim": DIMS,
    "key": FORMATS,
    "value": FORMATS,
    "dtype": DTYPES,
    "wide": (False, True),
    "group": GROUPS,
    "tokens": TOKENS,
    "turned": TURNED,
}
PARTS = 20
CAPACITY = 6


def problem(case: dict) -> tuple:
    """Rows of a larger buffer, virtual queries, weights and pairs in no order."""
    layout, dim = make_layout(case), case["key_dim"]
    batch = case.get("batch", 2)
    shape = (batch, 2, case["tokens"])
    keys = random((*shape, dim), case["dtype"])
    rows = encode_ref(keys, random((*shape, case["value_dim"]), case["dtype"], seed=1), layout).rows
    rows = mx.concatenate([rows, mx.full((batch, 2, CAPACITY, layout.words), 0xFFFFFFFF, mx.uint32)], axis=2)
    turned = dim // case["turned"] if case["turned"] else 0
    dims = np.random.default_rng(3).permutation(dim)[:turned]
    pairs = mx.array(dims.reshape(2, -1), mx.int32)
    queries = random((2, case["group"], dim), "float32", seed=2)
    weights = mx.abs(random((2, case["group"], turned // 2), "float32", seed=4))
    return rows, case["tokens"], layout, queries, weights, pairs


def unrotated(codec, y: np.ndarray) -> np.ndarray:
    """R^T y in float64, from the definition of the rotation."""
    if codec.rotation is None:
        return y
    order, power = split_order(codec.head_dim)
    matrix = hadamard_matrix(order)
    for _ in range(power.bit_length() - 1):
        matrix = np.kron(matrix, [[1, 1], [1, -1]])
    return (y @ matrix) * np.array(codec.rotation.signs, np.float64) / np.sqrt(codec.head_dim)


def solution(rows, body, layout, queries, weights, pairs) -> np.ndarray:
    keys = unrotated(layout.key, exact(layout.key, layout.keys(rows[:, :, :body])))
    a, b = (keys[..., np.array(dims)] for dims in pairs)
    lengths = np.sqrt(a * a + b * b)
    queries, weights = np.array(queries, np.float64), np.array(weights, np.float64)
    return queries @ keys.swapaxes(-1, -2) + weights @ lengths.swapaxes(-1, -2)


def check(case: dict, *orders: int, **how) -> None:
    arguments = problem(case)
    expected, truth = score_ref(*arguments), solution(*arguments)
    roundings = 8 * 2.0**-24 * np.abs(truth).max()
    for order in orders:
        with simulated(order=order, **how) as counters:
            found = _score_gpu(*arguments)
        assert found.shape == expected.shape
        assert largest_error(found, truth) <= max(2 * largest_error(expected, truth), roundings)
        assert counters[0].stored["key_scores"] == found.nbytes


@pytest.mark.parametrize("number", range(0, len(CASES), 3), ids=lambda number: case_id(CASES[number]))
def test_error_is_at_most_twice_the_reference(number):
    check(CASES[number], ORDERS[number // 3 % len(ORDERS)])


@pytest.mark.full
@pytest.mark.parametrize("part", range(PARTS))
def test_all_texts(part):
    """Every three values of any parameters, in all orders of threads."""
    for case in covering(ALL, ways=3)[part::PARTS]:
        check(case, *ORDERS)


@pytest.mark.full
@pytest.mark.parametrize("tokens", ALL_TOKENS)
def test_all_sizes(tokens):
    for number, (batch, group) in enumerate(product((1, 3), GROUPS)):
        check({**CASES[number % 4], "tokens": tokens, "batch": batch, "group": group}, *ORDERS)


@pytest.mark.full
@pytest.mark.parametrize("tokens", ALL_TOKENS)
def test_compact_all_sizes(tokens):
    rng = np.random.default_rng(tokens)
    for batch, words, share in product((1, 3), (1, 31, 32, 33, 67, 131), (0.1, 0.5, 1.0)):
        rows = mx.array(rng.integers(0, 2**32, (batch, 2, tokens, words), np.uint32))
        index = mx.array(np.flatnonzero(rng.random(tokens) < share), mx.int32)
        for order in ORDERS:
            with simulated(order=order):
                found = _compact_gpu(rows, index, tokens + 3)
            assert mx.array_equal(found[:, :, : index.size], mx.take(rows, index, axis=2))


def test_under_sanitizers():
    check({**CASES[7], "tokens": 5}, 0, sanitize=True)


@pytest.mark.parametrize("group", [1, 8])
def test_each_key_is_read_once_for_all_query_heads(group):
    case = {"key_dim": 128, "value_dim": 128, "key": "tq4", "value": "tq4", "dtype": "float16", "tokens": 9}
    rows, body, layout, *rest = problem({**case, "group": group, "turned": 1})
    with simulated() as counters:
        _score_gpu(rows, body, layout, *rest)
    assert counters[0].loaded["packed_rows"] == 2 * 2 * 9 * (128 * 4 // 8 + 2 * 32)  # each lane loads the scale


@pytest.mark.parametrize("kept", [[0], [4], [0, 2, 3], list(range(5)), list(range(1, 40, 2)), []])
def test_compact_gathers(kept):
    rows = mx.array(np.random.default_rng(0).integers(0, 2**32, (2, 3, 40, 33), np.uint32))
    index = mx.array(kept, mx.int32)
    for view in (rows, rows[:, ::2], rows[1:]):
        with simulated(order=7):
            found = _compact_gpu(view, index, 24)
        assert found.shape == (*view.shape[:2], 24, 33)
        assert mx.array_equal(found[:, :, : len(kept)], compact_ref(view, index, 24)[:, :, : len(kept)])


def test_compact_under_sanitizers():
    rows = mx.arange(2 * 9 * 33, dtype=mx.uint32).reshape(1, 2, 9, 33)
    with simulated(sanitize=True):
        assert mx.array_equal(_compact_gpu(rows, mx.array([1, 8]), 3)[:, :, :2], rows[:, :, 1::7])


def test_compact_past_the_buffer_is_found():
    rows = mx.zeros((1, 2, 9, 33), mx.uint32)
    with simulated(), pytest.raises(SimulationError, match="out of bounds"):
        _compact_gpu(rows, mx.array([1, 18]), 3)
