"""dequantize.metal on the simulator, against the codec and float64."""

import mlx.core as mx
import numpy as np
import pytest
from covering import case_id, covering
from kernel_cases import (
    ALL_TOKENS,
    DIMS,
    DTYPES,
    FORMATS,
    TOKENS,
    dtype_of,
    exact,
    largest_error,
    make_layout,
    random,
    same_bits,
)
from simulated import ORDERS, simulated

from mlx_tq.codec import RowLayout
from mlx_tq.kernels import dequantize
from mlx_tq.kernels.dequantize import _dequantize_gpu, dequantize_ref
from mlx_tq.kernels.encode import encode_ref
from mlx_tq.kernels.wht import wht_ref

PARAMETERS = {
    "key_dim": DIMS,
    "key": FORMATS,
    "value": FORMATS,
    "dtype": DTYPES,
    "wide": (False, True),
    "tokens": TOKENS,
}
CASES = [{**case, "value_dim": DIMS[(number * 4 + 1) % len(DIMS)]} for number, case in enumerate(covering(PARAMETERS))]
PARTS = 20
CAPACITY = 16  # unused tokens after the used ones


def poisoned_rows(case: dict, layout: RowLayout) -> mx.array:
    """Rows [2, 2, S, W], a part of a buffer whose unused capacity would decode to NaN or nonsense."""
    batch, tokens = case.get("batch", 2), case["tokens"]
    keys = random((batch, 2, tokens, case["key_dim"]), case["dtype"]) * 5
    values = random((batch, 2, tokens, case["value_dim"]), case["dtype"], seed=1)
    rows = encode_ref(keys, values, layout).rows
    poison = mx.full((batch, 2, CAPACITY, layout.words), 0xFFFFFFFF, mx.uint32)
    return mx.concatenate([rows, poison], axis=2)[:, :, :tokens]


def check(case: dict, *orders: int, **how) -> None:
    layout, dtype = make_layout(case), dtype_of(case["dtype"])
    rows = poisoned_rows(case, layout)
    expected = dequantize_ref(rows, layout, dtype)
    parts = ((layout.key, layout.keys(rows)), (layout.value, layout.values(rows)))
    truths = [exact(codec, encoded) for codec, encoded in parts]
    for order in orders:
        with simulated(order=order, **how) as counters:
            found = _dequantize_gpu(rows, layout, dtype)
        for ours, theirs, truth, (_, encoded) in zip(found, expected, truths, parts, strict=True):
            assert ours.shape == theirs.shape
            assert ours.dtype == dtype
            if encoded.scale is None:
                assert same_bits(ours, theirs)
            roundings = 4 * 2.0**-24 * np.abs(truth).max()  # of factor, gain, level and product, all in fp32
            assert largest_error(ours, truth) <= max(2 * largest_error(theirs, truth), roundings)
        (counted,) = counters
        assert counted.stored["keys_out"] == found[0].nbytes, "each value is stored once"
        assert counted.stored["values_out"] == found[1].nbytes


@pytest.mark.parametrize("number", range(len(CASES)), ids=[case_id(case) for case in CASES])
def test_error_is_at_most_twice_the_reference(number):
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


@pytest.mark.parametrize("out", DTYPES)
def test_type_of_the_result_is_a_choice(out):
    case = {"key_dim": 64, "value_dim": 64, "key": "fp16", "value": "tq4", "dtype": "float32", "tokens": 5}
    layout = make_layout(case)
    rows = poisoned_rows(case, layout)
    with simulated():
        found = _dequantize_gpu(rows, layout, dtype_of(out))
    for ours, theirs in zip(found, dequantize_ref(rows, layout, dtype_of(out)), strict=True):
        assert ours.dtype == theirs.dtype
        assert mx.allclose(ours, theirs, rtol=1e-2 if out == "bfloat16" else 1e-3)


@pytest.mark.parametrize("number", range(0, len(CASES), 9), ids=lambda number: case_id(CASES[number]))
def test_what_follows_is_rotated_behind_the_past(number):
    """Exactly what decoding and rotation give one by one; what follows lies in a larger buffer."""
    case = CASES[number]
    layout, dtype = make_layout(case), dtype_of(case["dtype"])
    rows = poisoned_rows(case, layout)
    keys, values = (random((3, 2, 9, case[f"{part}_dim"]), case["dtype"])[1:, :, 2:7] for part in ("key", "value"))
    with simulated(order=ORDERS[number % len(ORDERS)]) as counters:
        found = _dequantize_gpu(rows, layout, dtype, (keys, values))
        past = _dequantize_gpu(rows, layout, dtype)
    assert counters[0].stored["keys_out"] == found[0].nbytes, "each value is stored once"
    for whole, decoded, codec, full in zip(found, past, (layout.key, layout.value), (keys, values), strict=True):
        rotated = full if codec.rotation is None else wht_ref(full, codec.rotation)
        assert same_bits(whole, mx.concatenate([decoded, rotated], axis=2))


def test_mlx_operations_decode_in_blocks(monkeypatch):
    """Any number of them gives what one gives."""
    case = {"key_dim": 64, "value_dim": 80, "key": "q8", "value": "tq3", "dtype": "bfloat16", "tokens": 97}
    layout = make_layout(case)
    full = random((2, 2, 5, 64), "bfloat16"), random((2, 2, 5, 80), "bfloat16")
    arguments = poisoned_rows(case, layout), layout, mx.bfloat16, full
    whole = dequantize_ref(*arguments)
    monkeypatch.setattr(dequantize, "BLOCK_TOKENS", 32)
    assert all(same_bits(a, b) for a, b in zip(dequantize_ref(*arguments), whole, strict=True))
