"""encode, dequantize, score, recall_score, wht and compact on the simulator, on covering arrays of problems."""

from functools import partial
from itertools import product

import mlx.core as mx
import numpy as np
import pytest
from cases import (
    ALL_FORMATS,
    DIMS,
    DTYPES,
    FORMATS,
    GROUPS,
    RINGS,
    dtype_of,
    make_layout,
    make_problem,
    random,
    same_bits,
)
from checks import compacts, dequantizes, encodes, flags, recalls, rotates, scores, some_rows
from covering import case_id, covering
from simulated import ORDERS, simulated

from metal_sim.run import SimulationError
from mlx_tq.codec.rotation import get_rotation
from mlx_tq.errors import KernelUnavailableError
from mlx_tq.kernels import backend
from mlx_tq.kernels.dequantize import _dequantize_gpu, dequantize_ref
from mlx_tq.kernels.encode import _encode_gpu, encode
from mlx_tq.kernels.wht import wht

PARAMETERS = {
    "key_dim": DIMS,
    "key": FORMATS,
    "value": FORMATS,
    "dtype": DTYPES,
    "normalized": (None, "blocks", "gaps"),
    "rule": ("raw", "matched", "ls", "unbiased"),
    "wide": (False, True),
    "body": (1, 31, 32, 33, 97),
}
ALL_TOKENS = (1, 2, 31, 32, 33, 97, 255, 256, 257, 1025, 4096)
SHORT = {name: values for name, values in PARAMETERS.items() if name not in ALL_FORMATS} | {"body": (1, 9, 33)}
TRELLIS = [
    {name: values[number % len(values)] for name, values in SHORT.items()}
    | dict(zip(ALL_FORMATS, RINGS[number % len(RINGS)], strict=True))
    for number in range(len(DIMS))
]


def with_value_dims(cases: list[dict]) -> list[dict]:
    return [{**case, "value_dim": DIMS[(number * 4 + 1) % 9]} for number, case in enumerate(cases)]


CASES = with_value_dims(covering(PARAMETERS)) + with_value_dims(TRELLIS)
CHECKS = {"encode": encodes, "dequantize": dequantizes, "score": scores, "recall": recalls}
# Scores have as many texts as keys have formats and sizes; of encode and dequantize, most cases are one.
SCORING = ("score", "recall")
FEW = [(name, number) for name in CHECKS for number in range(0, len(CASES), 3 if name in SCORING else 1)]
BLOCKS = ((32,), (32, 5, 1, 33, 70), (16, 17), (100,), (1,))
PARTS = 20


def check(name: str, case: dict, number: int, *orders: int, **how) -> None:
    """Query heads and turned dims, which only scores have, take turns; so do queries and blocks of recall."""
    case = {"groups": GROUPS[number % 6], "length": 1, "recent": number % 7, **case}
    if name == "recall":
        case |= {"batch": 1, "length": (1, 5, 3, 2)[number % 4]}
    dims = case.pop("key_dim"), case.pop("value_dim")
    problem = make_problem(dims, **case, seed=number)
    changing = {"score": {"turned": (1, 4, 0)[number % 3]}, "recall": {"sizes": BLOCKS[number % 5]}}
    kernel = partial(CHECKS[name], **changing.get(name, {}))
    for order in orders:
        kernel(problem, order=order, **how)


@pytest.mark.parametrize(("name", "number"), FEW, ids=[f"{name}-{case_id(CASES[number])}" for name, number in FEW])
def test_kernel(name, number):
    check(name, CASES[number], number, ORDERS[number % 3])


@pytest.mark.full
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("name", CHECKS)
def test_all_texts(name, part):
    """Every three values of any parameters, in all orders of threads."""
    for number, case in enumerate(covering({**PARAMETERS, **ALL_FORMATS, "value_dim": DIMS}, ways=3)[part::PARTS]):
        check(name, case, number, *ORDERS)


@pytest.mark.full
@pytest.mark.parametrize("body", ALL_TOKENS)
@pytest.mark.parametrize("name", CHECKS)
def test_all_sizes(name, body):
    for number, (batch, groups) in enumerate(product((1, 3), GROUPS if name in SCORING else (1,))):
        check(name, {**CASES[number % 4], "body": body, "batch": batch, "groups": groups}, number, *ORDERS)


@pytest.mark.parametrize("number", range(0, len(CASES), 24))
@pytest.mark.parametrize("name", CHECKS)
def test_under_sanitizers(name, number):
    check(name, {**CASES[number], "body": 3}, number, 0, sanitize=True)


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("key", ["q8", "tq4", "fp16"])
def test_flags(key, dtype, normalized):
    flags(key, dtype, normalized)


X = random((2, 3, 20, 128))
VIEWS = {
    "sliced": X[:, 1:2, 3:9, 64:],
    "broadcast": mx.broadcast_to(X[:1, :1, :6, :64], (2, 3, 6, 64)),
    "reversed": X[::-1, :, ::-1, :64],
    "every other dim": X[..., ::2],
}


@pytest.mark.parametrize("view", VIEWS)
def test_encode_any_strides(view):
    layout, keys = make_layout((64, 64), "tq4", "q8", "float16"), VIEWS[view]
    values = random(keys.shape, seed=5)
    with simulated():
        found = _encode_gpu(keys, values, layout)
    with simulated() as counters, backend.using("reference"):
        expected = encode(keys, values, layout)
    assert same_bits(found.rows, expected.rows)
    assert counters == [], "where mlx is chosen it does it"


@pytest.mark.parametrize("out", DTYPES)
def test_type_of_decoded_is_a_choice(out):
    problem = make_problem(key="fp16", dtype="float32", body=5)
    arguments = problem.arguments["rows"][:, :, :5], problem.layout, dtype_of(out)
    with simulated():
        found = _dequantize_gpu(*arguments)
    for ours, theirs in zip(found, dequantize_ref(*arguments), strict=True):
        assert ours.dtype == theirs.dtype == dtype_of(out)
        assert mx.allclose(ours, theirs, rtol=1e-2 if out == "bfloat16" else 1e-3)


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("dim", [16, *DIMS, 448])
def test_wht(dim, inverse):
    for order in ORDERS:
        rotates(random((3, 11, dim), DTYPES[dim // 16 % 3]), inverse, order=order)


@pytest.mark.full
@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [16, 32, *DIMS, 320, 384, 448])
def test_wht_all_types(dim, dtype, inverse):
    for number, tokens in enumerate((1, 31, 32, 33, 97)):
        rotates(random((2, 2, tokens, dim), dtype), inverse, order=ORDERS[number % 3])


def test_wht_any_strides_and_ranks():
    x = random((2, 3, 4, 5, 112))
    for view in (x, x[0].swapaxes(0, 1), x[0, :, ::2, 1:3], x[0, 0, 0], x[0, 0, 0, 0], x[:, :, :, ::-1]):
        rotates(view, inverse=True)
    rotates(random((5, 80)), sanitize=True)


def test_dense_rotations_have_no_kernel():
    with simulated() as counters, pytest.raises(KernelUnavailableError, match="cannot rotate by Haar"):
        wht(random((4, 64), "float32"), get_rotation("haar", 64, 7))
    assert counters == []


@pytest.mark.parametrize("kept", [[0], [4], [0, 2, 3], list(range(5)), list(range(1, 40, 2)), []])
def test_compact(kept):
    rows = some_rows(40)
    for view in (rows, rows[:, ::2], rows[1:]):
        compacts(view, kept, order=7)
    compacts(rows, kept, sanitize=True)
    with pytest.raises(SimulationError, match="out of bounds"):
        compacts(some_rows(9), [1, 9 * 6 + 18])


@pytest.mark.full
@pytest.mark.parametrize("tokens", ALL_TOKENS)
def test_compact_all_sizes(tokens):
    rng = np.random.default_rng(tokens)
    for batch, words, share in product((1, 3), (1, 31, 32, 33, 67, 131), (0.1, 0.5, 1.0)):
        kept = np.flatnonzero(rng.random(tokens) < share).tolist()
        for order in ORDERS:
            compacts(some_rows(tokens, words, batch), kept, order=order)
