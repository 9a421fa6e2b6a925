"""encode, dequantize, score, recall_score, wht and compact on the simulator, on covering arrays of problems."""

from itertools import product

import mlx.core as mx
import numpy as np
import pytest

from kernels.cases import (
    ALL_FORMATS,
    DIMS,
    DTYPES,
    FORMATS,
    GROUPS,
    SORTED,
    TRELLIS_PAIRS,
    has_same_bits,
    make_layout,
    make_problem,
    random,
)
from kernels.covering import case_id, covering
from kernels.metal import checks
from kernels.metal.simulated import ORDERS, reference, simulated
from metal_sim.run import SimulationError
from mlx_tq.kernels import mlx_attention
from mlx_tq.kernels.encode import encode
from mlx_tq.kernels.mlx_attention import MemoryBounds
from mlx_tq.kernels.prefill import prefill

PARAMETERS = {
    "key_dim": DIMS,
    "key": FORMATS,
    "value": FORMATS,
    "dtype": DTYPES,
    "normalized": (None, "blocks", "gaps"),
    "rule": ("raw", "matched", "ls", "unbiased"),
    "wide": (False, True),
    "packed": (1, 31, 32, 33, 97),
}
ALL_TOKENS = (1, 2, 31, 32, 33, 97, 255, 256, 257, 1025, 4096)
SHORT = {name: values for name, values in PARAMETERS.items() if name not in ALL_FORMATS} | {"packed": (1, 9, 33)}
TRELLIS = [
    {name: values[number % len(values)] for name, values in SHORT.items()}
    | dict(zip(ALL_FORMATS, TRELLIS_PAIRS[number % len(TRELLIS_PAIRS)], strict=True))
    for number in range(len(DIMS))
]


def with_value_dims(cases: list[dict]) -> list[dict]:
    return [{**case, "value_dim": DIMS[(number * 4 + 1) % 9]} for number, case in enumerate(cases)]


CASES = with_value_dims(covering(PARAMETERS)) + with_value_dims(TRELLIS)
CHECKS = {
    "encode": checks.check_encode,
    "dequantize": checks.check_dequantize,
    "score": checks.check_score,
    "recall": checks.check_recall_score,
}
# Scores have one text per format and size of keys; encode and dequantize have a text of their own in most cases.
SCORING = ("score", "recall")
FEW = [(name, number) for name in CHECKS for number in range(0, len(CASES), 3 if name in SCORING else 1)]
BLOCKS = ((32,), (32, 5, 1, 33, 70), (16, 17), (100,), (1,))
PARTS = 20


def check(name: str, case: dict, number: int, *orders: int, **simulation) -> None:
    """Check a kernel; query heads, RoPE pairs, and the queries and blocks of recall follow from the number."""
    case = {"groups": GROUPS[number % 6], "length": 1, "recent": number % 7, **case}
    if name == "recall":
        case |= {"batch": 1, "length": (1, 5, 3, 2)[number % 4]}
    dims = case.pop("key_dim"), case.pop("value_dim")
    problem = make_problem(dims, **case, seed=number)
    options = {"score": {"rotated": (1, 4, 0)[number % 3]}, "recall": {"sizes": BLOCKS[number % 5]}}
    for order in orders:
        CHECKS[name](problem, **options.get(name, {}), order=order, **simulation)


@pytest.mark.parametrize("max_threads", [64, 32])
@pytest.mark.parametrize("dim", [64, 128, 256, 512])
@pytest.mark.parametrize("name", [*CHECKS, "wht", "compact"])
def test_few_threads(name, dim, max_threads):
    if name == "wht":
        checks.check_wht(random((1, 2, 5, dim)), max_threads=max_threads)
    elif name == "compact":
        checks.check_compact(checks.random_rows(dim), [0, *range(7, dim, 3)], max_threads=max_threads)
    else:
        case = {"key": "tq4", "value": "tq3", "normalized": "gaps", "packed": 33}
        check(name, case | {"key_dim": dim, "value_dim": dim}, 0, 0, max_threads=max_threads)


@pytest.mark.parametrize(("name", "number"), FEW, ids=[f"{name}-{case_id(CASES[number])}" for name, number in FEW])
def test_kernel(name, number):
    check(name, CASES[number], number, ORDERS[number % 3])


SORTED_KEYS = covering(
    SHORT
    | {"key_dim": (64, 128, 256, 96), "key": SORTED, "value": ("tq4", "tcq3"), "value_dim": (64, 96)}
    | {"packed": (1, 17, 33)}
)


@pytest.mark.parametrize(
    "number",
    [pytest.param(number, marks=[] if number % 5 == 0 else pytest.mark.full) for number in range(len(SORTED_KEYS))],
    ids=[case_id(case) for case in SORTED_KEYS],
)
@pytest.mark.parametrize("name", CHECKS)
def test_keys_of_sorted_dims(name, number):
    check(name, SORTED_KEYS[number], number, ORDERS[number % 3])


@pytest.mark.full
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("name", CHECKS)
def test_all_texts(name, part):
    for number, case in enumerate(covering({**PARAMETERS, **ALL_FORMATS, "value_dim": DIMS}, ways=3)[part::PARTS]):
        check(name, case, number, *ORDERS)


@pytest.mark.full
@pytest.mark.parametrize("packed", ALL_TOKENS)
@pytest.mark.parametrize("name", CHECKS)
def test_all_sizes(name, packed):
    for number, (batch, groups) in enumerate(product((1, 3), GROUPS if name in SCORING else (1,))):
        check(name, {**CASES[number % 4], "packed": packed, "batch": batch, "groups": groups}, number, *ORDERS)


@pytest.mark.parametrize("number", range(0, len(CASES), 24))
@pytest.mark.parametrize("name", CHECKS)
def test_under_sanitizers(name, number):
    check(name, {**CASES[number], "packed": 3}, number, 0, sanitize=True)


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("key", ["q8", "tq4", "fp16", "stcq3"])
def test_health_counts(key, dtype, normalized):
    checks.check_health(key, dtype, normalized)


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
        rows = encode(keys, values, layout).rows
    with simulated() as counters:
        expected = reference(encode, keys, values, layout).rows
    assert has_same_bits(rows, expected)
    assert counters == [], "the reference backend runs no kernel"


@pytest.mark.parametrize("normalized", [None, "gaps"])
def test_heads_are_decoded_one_at_a_time(normalized):
    """The kernel gets the rows of one head, which are not contiguous with those of the other sequence."""
    problem = make_problem(packed=97, length=9, batch=2, normalized=normalized, mask="causal")
    with simulated(sanitize=True):
        whole = problem.solve(prefill)
        with mlx_attention.using(MemoryBounds(scores=1 << 40, decoded=1)):
            assert has_same_bits(problem.solve(prefill), whole)


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("dim", [16, *DIMS, 448])
def test_wht(dim, inverse):
    for order in ORDERS:
        checks.check_wht(random((3, 11, dim), DTYPES[dim // 16 % 3]), inverse, order=order)


@pytest.mark.full
@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [16, 32, *DIMS, 320, 384, 448])
def test_wht_all_dtypes(dim, dtype, inverse):
    for number, tokens in enumerate((1, 31, 32, 33, 97)):
        checks.check_wht(random((2, 2, tokens, dim), dtype), inverse, order=ORDERS[number % 3])


def test_wht_any_strides_and_ranks():
    x = random((2, 3, 4, 5, 112))
    for view in (x, x[0].swapaxes(0, 1), x[0, :, ::2, 1:3], x[0, 0, 0], x[0, 0, 0, 0], x[:, :, :, ::-1]):
        checks.check_wht(view, inverse=True)
    checks.check_wht(random((5, 80)), sanitize=True)


@pytest.mark.parametrize("kept", [[0], [4], [0, 2, 3], list(range(5)), list(range(1, 40, 2)), []])
def test_compact(kept):
    rows = checks.random_rows(40)
    for view in (rows, rows[:, ::2], rows[1:]):
        checks.check_compact(view, kept, order=7)
    checks.check_compact(rows, kept, sanitize=True)


def test_compact_of_rows_out_of_bounds():
    with pytest.raises(SimulationError, match="out of bounds"):
        checks.check_compact(checks.random_rows(9), [1, 9 * 6 + 18])


@pytest.mark.full
@pytest.mark.parametrize("tokens", ALL_TOKENS)
def test_compact_all_sizes(tokens):
    rng = np.random.default_rng(tokens)
    for batch, words, share in product((1, 3), (1, 31, 32, 33, 67, 131), (0.1, 0.5, 1.0)):
        kept = np.flatnonzero(rng.random(tokens) < share).tolist()
        for order in ORDERS:
            checks.check_compact(checks.random_rows(tokens, words, batch), kept, order=order)
