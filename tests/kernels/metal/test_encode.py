"""encode.metal on the simulator: every bit of the rows equals the codec's."""

from itertools import product

import mlx.core as mx
import pytest
from kernel_cases import (
    DIMS,
    DTYPES,
    FORMATS,
    RULES,
    TOKENS,
    case_id,
    dtype_of,
    make_layout,
    pairwise,
    random,
    same_bits,
)
from simulated import ORDERS, simulated

from mlx_tq.kernels import impl
from mlx_tq.kernels.encode import _encode_gpu, encode, encode_ref

# Values of other sizes than keys: another cycle of the same dims.
PARAMETERS = {
    "key_dim": DIMS,
    "key": FORMATS,
    "value": FORMATS,
    "dtype": DTYPES,
    "rule": RULES,
    "wide": (False, True),
    "tokens": TOKENS,
}


def with_value_dim(case: dict, number: int) -> dict:
    return {**case, "value_dim": DIMS[(number * 4 + 1) % len(DIMS)]}


CASES = [with_value_dim(case, number) for number, case in enumerate(pairwise(PARAMETERS))]


def vectors(case: dict, seed: int = 0) -> list[mx.array]:
    """Keys and values of a case, some of them zero, tiny, huge or of one value; in memory S comes before H."""
    found = []
    for part, scale in (("key", 3.0), ("value", 0.2)):
        x = random((1, case["tokens"], 2, case[f"{part}_dim"]), "float32", seed)
        x = x * mx.array([scale, 1e-3])[:, None]
        x[:, -1, 0] = 0
        x[:, -1, 1, 1:] = 0
        x[:, ::7, 1] = x[:, ::7, 1] * 2e4
        found.append(x.astype(dtype_of(case["dtype"])).swapaxes(1, 2))
        seed += 1
    return found


def check(case: dict, **how) -> None:
    layout, (keys, values) = make_layout(case), vectors(case)
    expected = encode_ref(keys, values, layout)
    with simulated(**how) as counters:
        found = _encode_gpu(keys, values, layout)
    assert same_bits(found.rows, expected.rows)
    assert found.health.tolist() == expected.health.tolist()
    (counted,) = counters
    assert counted.loaded["keys"] == keys.nbytes, "each value is loaded once"
    assert counted.loaded["values"] == values.nbytes
    assert counted.stored["packed_rows"] == found.rows.nbytes, "each word is stored once"


@pytest.mark.parametrize("number", range(len(CASES)), ids=[case_id(case) for case in CASES])
def test_rows_are_the_codecs_bit_for_bit(number):
    check(CASES[number], order=ORDERS[number % len(ORDERS)])


@pytest.mark.full
@pytest.mark.parametrize("key_dim", DIMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_pairs_of_formats(key_dim, dtype):
    for number, (key, value) in enumerate(product(FORMATS, FORMATS)):
        case = {"key_dim": key_dim, "key": key, "value": value, "dtype": dtype}
        case |= {"rule": RULES[number % 4], "wide": number % 2 == 1, "tokens": TOKENS[number * 3 % 5]}
        case = with_value_dim(case, number)
        for order in ORDERS:
            check(case, order=order)


@pytest.mark.parametrize("number", range(0, len(CASES), 12), ids=lambda number: case_id(CASES[number]))
def test_under_sanitizers(number):
    check({**CASES[number], "tokens": 3}, sanitize=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("key", ["q8", "tq4", "fp16"])
def test_flags(key, dtype):
    """Values at fp16's limit, above it, infinite, and no numbers: counted as the codec counts them."""
    case = {"key_dim": 64, "value_dim": 80, "key": key, "value": "tq3", "dtype": dtype, "tokens": 8}
    layout, (keys, values) = make_layout(case), vectors(case)
    for i, value in enumerate((65504.0, 65536.0, 1e30, float("inf"), float("-inf"), float("nan"))):
        keys[:, 0, i, 3] = value
        values[:, 1, i, 70] = value
    keys[:, 1, 5, 0], keys[:, 1, 5, 1] = float("nan"), float("inf")
    expected = encode_ref(keys, values, layout)
    with simulated():
        found = _encode_gpu(keys, values, layout)
    assert found.health.tolist() == expected.health.tolist()
    finite = mx.isfinite(keys).all(axis=-1) & mx.isfinite(values).all(axis=-1)
    assert mx.array_equal(mx.where(finite[..., None], found.rows, 0), mx.where(finite[..., None], expected.rows, 0))


@pytest.mark.parametrize("view", ["sliced", "broadcast", "reversed", "every other dim"])
def test_strides(view):
    case = {"key_dim": 64, "value_dim": 64, "key": "tq4", "value": "q8", "dtype": "float16"}
    x = random((2, 3, 20, 128), "float16")
    keys = {
        "sliced": x[:, 1:2, 3:9, 64:],
        "broadcast": mx.broadcast_to(x[:1, :1, :6, :64], (2, 3, 6, 64)),
        "reversed": x[::-1, :, ::-1, :64],
        "every other dim": x[..., ::2],
    }[view]
    values = random(keys.shape, "float16", seed=5)
    layout = make_layout(case)
    with simulated():
        found = _encode_gpu(keys, values, layout)
    assert same_bits(found.rows, encode_ref(keys, values, layout).rows)


def test_where_mlx_is_chosen_it_does_it():
    case = {"key_dim": 64, "value_dim": 64, "key": "tq4", "value": "q8", "dtype": "float16", "tokens": 3}
    layout, (keys, values) = make_layout(case), vectors(case)
    with simulated() as counters, impl.using("ops"):
        found = encode(keys, values, layout)
    assert same_bits(found.rows, encode_ref(keys, values, layout).rows)
    assert counters == []
