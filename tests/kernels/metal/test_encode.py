"""encode.metal on the simulator: every bit of the rows equals the codec's."""

import mlx.core as mx
import pytest
from covering import case_id, covering
from kernel_cases import ALL_TOKENS, DIMS, DTYPES, FORMATS, RULES, TOKENS, dtype_of, make_layout, random, same_bits
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

CASES = [{**case, "value_dim": DIMS[(number * 4 + 1) % len(DIMS)]} for number, case in enumerate(covering(PARAMETERS))]
PARTS = 20


def vectors(case: dict, seed: int = 0) -> list[mx.array]:
    """Keys and values of a case, some of them zero, tiny, huge or of one value; in memory S comes before H."""
    found = []
    for part, scale in (("key", 3.0), ("value", 0.2)):
        x = random((case.get("batch", 1), case["tokens"], 2, case[f"{part}_dim"]), "float32", seed)
        x = x * mx.array([scale, 1e-3])[:, None]
        x[:, -1, 0] = 0
        x[:, -1, 1, 1:] = 0
        x[:, ::7, 1] = x[:, ::7, 1] * 2e4
        found.append(x.astype(dtype_of(case["dtype"])).swapaxes(1, 2))
        seed += 1
    return found


def check(case: dict, *orders: int, **how) -> None:
    layout, (keys, values) = make_layout(case), vectors(case)
    expected = encode_ref(keys, values, layout)
    for order in orders:
        with simulated(order=order, **how) as counters:
            found = _encode_gpu(keys, values, layout)
        assert same_bits(found.rows, expected.rows)
        assert found.health.tolist() == expected.health.tolist()
        (counted,) = counters
        assert counted.loaded["keys"] == keys.nbytes, "each value is loaded once"
        assert counted.loaded["values"] == values.nbytes
        assert counted.stored["packed_rows"] == found.rows.nbytes, "each word is stored once"


@pytest.mark.parametrize("number", range(len(CASES)), ids=[case_id(case) for case in CASES])
def test_rows_are_the_codecs_bit_for_bit(number):
    check(CASES[number], ORDERS[number % len(ORDERS)])


@pytest.mark.full
@pytest.mark.parametrize("part", range(PARTS))
def test_all_texts(part):
    """Every three values of any parameters, in all orders of threads."""
    for case in covering({**PARAMETERS, "value_dim": DIMS}, ways=3)[part::PARTS]:
        check(case, *ORDERS)


@pytest.mark.full
@pytest.mark.parametrize("tokens", ALL_TOKENS)
def test_all_sizes(tokens):
    for number, batch in enumerate((1, 3)):
        check({**CASES[number], "tokens": tokens, "batch": batch}, *ORDERS)


@pytest.mark.parametrize("number", range(0, len(CASES), 24), ids=lambda number: case_id(CASES[number]))
def test_under_sanitizers(number):
    check({**CASES[number], "tokens": 3}, 0, sanitize=True)


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
