"""attend.metal with merge.metal, and attend_short.metal, on the simulator: as exact as mx.fast attention.

The product of all parameters would have millions of cases. These are covering arrays; the full run has the product of
all sizes, which do not change the text, and any three values of all parameters together.
"""

import math
from itertools import product

import mlx.core as mx
import pytest
from cache import tunables

from kernels.cases import (
    ALL_FORMATS,
    DTYPES,
    GROUPS,
    PARAMETERS,
    SORTED,
    TRELLIS_PAIRS,
    check_attention,
    make_problem,
    random_mask,
    read_as_latents,
)
from kernels.covering import case_id, covering
from kernels.metal.checks import PEAK, check_attend
from kernels.metal.simulated import ORDERS, simulated
from mlx_tq.errors import KernelUnavailableError
from mlx_tq.kernels import thresholds
from mlx_tq.kernels.attend import attend
from mlx_tq.kernels.thresholds import KernelThresholds

ONE = 65536  # threshold of tokens with which one kernel attends to all
either_form = pytest.mark.parametrize("short_tokens", [0, ONE], ids=["two", "one"])

# In two kernels: parameters that change the text, wide heads last, and parameters that do not, large sizes first.
TEXT = ("dims", "key", "value", "dtype", "normalized")
TEXTS = sorted(covering({name: PARAMETERS[name] for name in TEXT}), key=lambda text: sum(text["dims"]))
SIZES = sorted(
    covering({name: PARAMETERS[name] for name in PARAMETERS if name not in TEXT}),
    key=lambda sizes: -math.prod(sizes[name] for name in ("packed", "batch", "groups", "length")),
)
TWO = [{**TEXTS[number * len(TEXTS) // len(SIZES)], **sizes} for number, sizes in enumerate(SIZES)]
# In one kernel: texts with every value, and every head size once.
AT_ONCE = {name: PARAMETERS[name] for name in (*TEXT, "sinks", "groups")} | {"mask": (None, "causal", "bool")}
FEW_TEXTS = [
    {name: values[(i * (3 if name == "value" else 1)) % len(values)] for name, values in AT_ONCE.items()}
    for i in range(len(PARAMETERS["dims"]))
]
FEW_SIZES = covering(
    {name: PARAMETERS[name] for name in PARAMETERS if name not in AT_ONCE}
    | {"packed": (0, 1, 31, 32, 33, 97, 256, 257)}
)
TRELLIS = [
    {name: values[number % len(values)] for name, values in AT_ONCE.items()}
    | dict(zip(ALL_FORMATS, pair, strict=True))
    | {"dims": PARAMETERS["dims"][(3 * number + 1) % 10], "packed": (97, 33, 257)[number % 3], "batch": 1 + number % 2}
    for number, pair in enumerate(TRELLIS_PAIRS)
]
CASES = [(short_tokens, case) for case in TRELLIS for short_tokens in (0, ONE)] + [(0, case) for case in TWO]
CASES += [(ONE, {**FEW_TEXTS[number % len(FEW_TEXTS)], **sizes}) for number, sizes in enumerate(FEW_SIZES)]

# For a thousand cases. In fp32 the largest error is that of a score: a lane sums D products in sequence, the reference
# in 16 sums or more, which rounds sqrt(16) times less.
LONG_RUN_PEAK = 6.0
PACKED = (*PARAMETERS["packed"], 4096)
SIZED_TEXTS = (
    {"dims": (48, 64), "key": "tq3", "value": "tq4", "dtype": "float32"},
    {"dims": (64, 48), "key": "q8", "value": "tq2", "dtype": "bfloat16"},
    {"dims": (80, 48), "key": "fp16", "value": "q8", "dtype": "float16"},
)
REST = covering({name: PARAMETERS[name] for name in ("sink_tokens", "recent", "mask", "sinks")})
ALL = PARAMETERS | ALL_FORMATS | {"mask": (None, "causal", "bool", "additive"), "short_tokens": (0, 4096)}
# Sizes with one or two query rows per lane, which have other texts and are rare among all sizes.
FEW_ROWS = {"groups": (1, 2), "length": (1, 2), "packed": (33, 97)}
PARTS = 40


@pytest.mark.parametrize(
    "number", range(len(CASES)), ids=[f"{short_tokens}-{case_id(case)}" for short_tokens, case in CASES]
)
def test_error_is_at_most_twice_the_reference(number):
    short_tokens, case = CASES[number]
    check_attend(make_problem(**case, seed=number), short_tokens, order=ORDERS[number % 3])


def check_all_orders(case: dict, seed: int) -> None:
    """The result is exact in each order of threads, and the same bit for bit."""
    short_tokens = case.pop("short_tokens")
    problem = make_problem(**case, seed=seed)
    results = [check_attend(problem, short_tokens, peak=LONG_RUN_PEAK, order=order) for order in ORDERS]
    assert all(mx.array_equal(result, results[0]) for result in results)


@pytest.mark.full
@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("packed", PACKED)
def test_all_sizes(packed, groups):
    for number, (batch, length) in enumerate(product(PARAMETERS["batch"], PARAMETERS["length"])):
        case = {**SIZED_TEXTS[number % 3], **REST[number % len(REST)], "short_tokens": 4096 * (number % 2)}
        check_all_orders({**case, "packed": packed, "groups": groups, "batch": batch, "length": length}, number)


@pytest.mark.full
@pytest.mark.parametrize("part", range(PARTS))
def test_all_texts(part):
    cases = covering(ALL, ways=3) + covering(ALL | FEW_ROWS)
    for number in range(part, len(cases), PARTS):
        check_all_orders(dict(cases[number]), number)


LATENT = covering(
    {
        "dims": ((64, 32), (128, 64), (256, 64), (512, 64)),
        "key": ALL_FORMATS["key"],
        "value": ("q8", "fp16"),
        "dtype": DTYPES,
        "groups": (1, 4, 20),
        "packed": (1, 33, 97, 256),
        "batch": (1, 2),
        "sink_tokens": (0, 5),
        "recent": (0, 70),
        "short_tokens": (0, ONE),
    }
)


@pytest.mark.parametrize(
    "number",
    [pytest.param(number, marks=[] if number % 20 == 0 else pytest.mark.full) for number in range(len(LATENT))],
    ids=[case_id(case) for case in LATENT],
)
def test_latents_are_keys_and_values(number):
    """One query, as their longer passes are decoded, with the scores of rotated parts as a mask."""
    case = dict(LATENT[number])
    short_tokens = case.pop("short_tokens")
    tokens = case["sink_tokens"] + case["packed"] + case["recent"] + 1
    mask = random_mask("additive", (case["batch"], 2 * case["groups"], 1, tokens), case["dtype"])
    problem = read_as_latents(make_problem(**case, length=1, mask=mask, seed=number))
    check_attend(problem, short_tokens, order=ORDERS[number % 3])


# Keys of sorted dims, also by products of matrices; each head has groups of other widths.
SORTED_KEYS = covering(
    {
        "dims": ((64, 64), (128, 128), (256, 256), (96, 80), (512, 64)),
        "key": SORTED,
        "value": ("tq4", "tcq3", "q8"),
        "dtype": DTYPES,
        "normalized": (None, "blocks", "gaps"),
        "rows": ((1, 1), (4, 1), (8, 2), (7, 3)),
        "packed": (0, 1, 33, 97, 256),
        "batch": (1, 2),
        "mask": (None, "causal", "bool"),
        "wide": (False, True),
        "short_tokens": (0, ONE),
    }
)


@pytest.mark.parametrize(
    "number",
    [pytest.param(number, marks=[] if number % 5 == 0 else pytest.mark.full) for number in range(len(SORTED_KEYS))],
    ids=[case_id(case) for case in SORTED_KEYS],
)
def test_keys_of_sorted_dims(number):
    case = dict(SORTED_KEYS[number])
    (groups, length), short_tokens = case.pop("rows"), case.pop("short_tokens")
    check_attend(
        make_problem(**case, groups=groups, length=length, seed=number), short_tokens, order=ORDERS[number % 3]
    )


# From 16 query rows of a KV head on, in half precision.
MATRIX = covering(
    {
        "dims": ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256)),
        "key": (*ALL_FORMATS["key"], "tq4"),
        "value": ALL_FORMATS["value"],
        "dtype": ("float16", "bfloat16"),
        "rows": ((16, 1), (8, 2), (4, 5), (8, 5), (16, 8), (2, 8), (7, 3)),
        "packed": (1, 31, 32, 33, 97, 256, 257),
        "normalized": (None, "blocks", "gaps"),
        "batch": (1, 2),
        "sink_tokens": (0, 5),
        "recent": (0, 70),
        "mask": (None, "causal"),
        "sinks": (False, True),
    }
)


@pytest.mark.parametrize("number", range(len(MATRIX)), ids=[case_id(case) for case in MATRIX])
def test_products_of_matrices_are_as_exact(number):
    case = dict(MATRIX[number])
    groups, length = case.pop("rows")
    with simulated() as counters, thresholds.using(KernelThresholds(short_tokens=0)):
        problem = make_problem(**case, groups=groups, length=length, seed=number)
        result = problem.solve(attend)
    check_attention(problem, result, peak=PEAK)
    assert counters[0].operations["matrix"]


@pytest.mark.parametrize("max_threads", [64, 32])
@pytest.mark.parametrize("dim", [64, 128, 256, 512])
@pytest.mark.parametrize("rows", [(4, 1), (8, 1), (8, 3)])
def test_few_threads_are_as_exact(rows, dim, max_threads):
    """Two simdgroups or one in a threadgroup: fewer rows in a tile, and two kernels in place of attend_short."""
    groups, length = rows
    problem = make_problem((dim, dim), key="tq4", value="tq4", groups=groups, length=length, batch=1, mask="causal")
    for short_tokens in (0, ONE):
        limits = KernelThresholds(short_tokens=short_tokens, merge_simdgroups=8)
        with simulated(max_threads=max_threads), thresholds.using(limits):
            check_attention(problem, problem.solve(attend), peak=PEAK)


@either_form
@pytest.mark.parametrize(("key", "value"), [("tq4", "tq2"), ("tq4", "tq4"), ("q8", "tq4")])
def test_levels_from_tables_are_those_of_the_polynomial(key, value, short_tokens):
    problem = make_problem((80, 112), key=key, value=value, packed=97, groups=6, length=1)
    results = [check_attend(problem, short_tokens, level_tables=tables) for tables in (0, 1, 2)]
    assert all(mx.array_equal(result, results[0]) for result in results)


@either_form
@pytest.mark.parametrize("key", ["fp16", "tq3"])
def test_under_sanitizers(key, short_tokens):
    dims = (80, 192) if short_tokens else (80, 112)
    case = {"dims": dims, "key": key, "dtype": "bfloat16", "batch": 1, "groups": 7, "length": 1, "sinks": True}
    check_attend(make_problem(**case, seed=1), short_tokens, sanitize=True)


@pytest.mark.parametrize("kind", ["bool", "additive"])
@pytest.mark.parametrize("shape", [(3, 178), (2, 4, 3, 178), (2, 1, 1, 178)])
def test_mask_arrays(shape, kind):
    mask = random_mask(kind, shape, "float16")
    check_attend(make_problem(recent=73, mask=mask, sinks=True))


@either_form
def test_lengths_do_not_change_the_text(short_tokens):
    texts = set()
    limits = KernelThresholds(short_tokens=short_tokens)
    with simulated(edit=lambda text: texts.add(text) or text), thresholds.using(limits):
        for packed, mask in ((33, None), (97, "causal"), (257, "causal")):
            make_problem(packed=packed, batch=1, sink_tokens=packed // 10, mask=mask).solve(attend)
    assert len(texts) == (1 if short_tokens else 2)


@pytest.mark.parametrize(("limit", "kernels"), [(111, 1), (110, 2)])
def test_threshold_counts_all_tokens(limit, kernels):
    with simulated() as counters, thresholds.using(KernelThresholds(short_tokens=limit)):
        make_problem().solve(attend)
    assert len(counters) == kernels


@either_form
@pytest.mark.parametrize("kind", ["bool", "additive"])
def test_a_fully_masked_query_is_finite_and_large_scores_do_not_overflow(kind, short_tokens):
    mask = mx.zeros((3, 1), mx.bool_) if kind == "bool" else mx.full((3, 111), -mx.inf)
    with simulated(), thresholds.using(KernelThresholds(short_tokens=short_tokens)):
        assert mx.isfinite(make_problem(mask=mask).solve(attend)).all()
    check_attend(make_problem(dtype="float32").replace(scale=50.0), short_tokens, peak=2.0)


@either_form
def test_any_strides(short_tokens):
    problem = make_problem(batch=3, groups=1, dtype="float32", mask="causal")
    arguments, names = problem.arguments, ("queries", "full_keys", "full_values")
    reversed_heads = {name: arguments[name][1:2, ::-1] for name in (*names, "packed_rows")}
    spaced_tokens = {name: mx.repeat(arguments[name], 2, axis=2)[:, :, ::2] for name in names}
    with simulated(), thresholds.using(KernelThresholds(short_tokens=short_tokens)):
        whole = problem.solve(attend)
        assert mx.array_equal(problem.solve(attend, **spaced_tokens), whole)
        assert mx.allclose(problem.solve(attend, **reversed_heads), whole[1:2, ::-1], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("min_block", "max_blocks"), [(32, 256), (64, 3), (1000, 256)])
def test_any_number_of_blocks(min_block, max_blocks):
    problem = make_problem(packed=257, recent=70, mask="causal", sinks=True)
    with thresholds.using(KernelThresholds(min_block=min_block, max_blocks=max_blocks)):
        check_attend(problem, peak=2.0)


@pytest.mark.parametrize("context", [150, 700])
@pytest.mark.parametrize("formats", tunables.FORMATS)
@pytest.mark.parametrize(("name", "value"), tunables.EXTREMES)
def test_thresholds_do_not_change_results(name, value, formats, context):
    """Both ends of each: the work is divided differently."""
    with simulated():
        tunables.check(name, value, formats, context)


def test_unsupported_formats_and_dtypes_are_errors():
    problem = make_problem()
    with simulated(), pytest.raises(KernelUnavailableError, match=r"keys of Q8Codec .* rotation Haar.*reference back"):
        make_problem(rotation="haar").solve(attend)
    with simulated(), pytest.raises(KernelUnavailableError, match=r"cannot compute in .*int32.* bfloat16"):
        problem.solve(attend, queries=problem.arguments["queries"].astype(mx.int32))
