"""attend.metal with merge.metal, and attend_short.metal, on the simulator: as accurate as mx.fast attention.

The product of all parameters would have millions of cases. These are covering arrays instead; the full run has the
product of all sizes, which are data to a text, and every four of dims, key, value and dtype.
"""

import math
from itertools import product

import mlx.core as mx
import pytest
from cases import ALL_FORMATS, GROUPS, PARAMETERS, RINGS, make_problem, random_mask
from checks import attends
from covering import case_id, covering
from simulated import ORDERS, simulated

from mlx_tq.errors import KernelUnavailableError
from mlx_tq.kernels import thresholds
from mlx_tq.kernels.attend import _attend_gpu
from mlx_tq.kernels.thresholds import KernelThresholds

ONE = 65536  # tokens up to which one kernel attends: to all
either_form = pytest.mark.parametrize("short", [0, ONE], ids=["two", "one"])

# In two kernels: what makes another text, wide heads last, and what is data to one, large sizes first: in this order.
FORMS = ("dims", "key", "value", "dtype")
TEXT = (*FORMS, "normalized")
TEXTS = sorted(covering({name: PARAMETERS[name] for name in TEXT}), key=lambda text: sum(text["dims"]))
SIZES = sorted(
    covering({name: PARAMETERS[name] for name in PARAMETERS if name not in TEXT}),
    key=lambda sizes: -math.prod(sizes[name] for name in ("body", "batch", "groups", "length")),
)
TWO = [{**TEXTS[number * len(TEXTS) // len(SIZES)], **sizes} for number, sizes in enumerate(SIZES)]
# In one: texts that hold every value, and stand for every head size once.
AT_ONCE = {name: PARAMETERS[name] for name in (*TEXT, "sinks", "groups")} | {"mask": (None, "causal", "bool")}
FEW_TEXTS = [
    {name: values[(i * (3 if name == "value" else 1)) % len(values)] for name, values in AT_ONCE.items()}
    for i in range(len(PARAMETERS["dims"]))
]
FEW_SIZES = covering(
    {name: PARAMETERS[name] for name in PARAMETERS if name not in AT_ONCE} | {"body": (0, 1, 31, 32, 33, 97, 256, 257)}
)
TRELLIS = [
    {name: values[number % len(values)] for name, values in AT_ONCE.items()}
    | dict(zip(ALL_FORMATS, pair, strict=True))
    | {"dims": PARAMETERS["dims"][(3 * number + 1) % 10], "body": (97, 33, 257)[number % 3], "batch": 1 + number % 2}
    for number, pair in enumerate(RINGS)
]
CASES = [(short, case) for case in TRELLIS for short in (0, ONE)] + [(0, case) for case in TWO]
CASES += [(ONE, {**FEW_TEXTS[number % len(FEW_TEXTS)], **sizes}) for number, sizes in enumerate(FEW_SIZES)]

# Of the largest error in a thousand cases. In fp32 it is that of a score: a lane sums D products one after the other,
# the reference in 16 sums or more, which sqrt(16) times less rounding reaches.
LONG_RUN_PEAK = 6.0
BODIES = (*PARAMETERS["body"], 4096)
SIZED_TEXTS = (
    {"dims": (48, 64), "key": "tq3", "value": "tq4", "dtype": "float32"},
    {"dims": (64, 48), "key": "q8", "value": "tq2", "dtype": "bfloat16"},
    {"dims": (80, 48), "key": "fp16", "value": "q8", "dtype": "float16"},
)
REST = covering({name: PARAMETERS[name] for name in ("sink_tokens", "recent", "mask", "sinks")})
ALL = PARAMETERS | ALL_FORMATS | {"mask": (None, "causal", "bool", "additive"), "short": (0, 4096)}
# Beside all sizes, those that hold one or two query rows in a lane: other texts, which few of all sizes need.
FEW_ROWS = {"groups": (1, 2), "length": (1, 2), "body": (33, 97)}
PARTS = 40


@pytest.mark.parametrize("number", range(len(CASES)), ids=[f"{short}-{case_id(case)}" for short, case in CASES])
def test_error_is_at_most_twice_the_reference(number):
    short, case = CASES[number]
    attends(make_problem(**case, seed=number), short, order=ORDERS[number % 3])


def in_all_orders(case: dict, seed: int) -> None:
    """As accurate in each order of threads, and the same bit for bit."""
    short = case.pop("short")
    problem = make_problem(**case, seed=seed)
    found = [attends(problem, short, peak=LONG_RUN_PEAK, order=order) for order in ORDERS]
    assert all(mx.array_equal(out, found[0]) for out in found)


@pytest.mark.full
@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("body", BODIES)
def test_all_sizes(body, groups):
    for number, (batch, length) in enumerate(product(PARAMETERS["batch"], PARAMETERS["length"])):
        case = {**SIZED_TEXTS[number % 3], **REST[number % len(REST)], "short": 4096 * (number % 2)}
        in_all_orders({**case, "body": body, "groups": groups, "batch": batch, "length": length}, number)


@pytest.mark.full
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize(("parameters", "whole"), [(ALL, FORMS), (ALL | FEW_ROWS, ())], ids=["all", "few rows"])
def test_all_texts(parameters, whole, part):
    cases = covering(parameters, ways=3, whole=whole)
    for number in range(part, len(cases), PARTS):
        in_all_orders(dict(cases[number]), number)


@either_form
@pytest.mark.parametrize("key", ["fp16", "tq3"])
def test_under_sanitizers(key, short):
    dims = (80, 192) if short else (80, 112)
    case = {"dims": dims, "key": key, "dtype": "bfloat16", "batch": 1, "groups": 7, "length": 1, "sinks": True}
    attends(make_problem(**case, seed=1), short, sanitize=True)


@pytest.mark.parametrize("kind", ["bool", "additive"])
@pytest.mark.parametrize("shape", [(3, 178), (2, 4, 3, 178), (2, 1, 1, 178)])
def test_mask_arrays(shape, kind):
    mask = random_mask(kind, shape, "float16")
    attends(make_problem(recent=73, mask=mask, sinks=True))


@either_form
def test_one_text_for_every_length(short):
    """Lengths, capacities and blocks are data: none of them compiles another text."""
    texts = set()
    with simulated(edit=lambda text: texts.add(text) or text), thresholds.using(KernelThresholds(short=short)):
        for body, mask in ((33, None), (97, "causal"), (257, "causal")):
            make_problem(body=body, batch=1, sink_tokens=body // 10, mask=mask).solve(_attend_gpu)
    assert len(texts) == (1 if short else 2)
    for least, kernels in ((111, 1), (110, 2)):  # the threshold counts all tokens
        with simulated() as counters, thresholds.using(KernelThresholds(short=least)):
            make_problem().solve(_attend_gpu)
        assert len(counters) == kernels


@either_form
@pytest.mark.parametrize("kind", ["bool", "additive"])
def test_a_query_that_is_all_masked_is_finite(kind, short):
    mask = mx.zeros((3, 1), mx.bool_) if kind == "bool" else mx.full((3, 111), -mx.inf)
    with simulated(), thresholds.using(KernelThresholds(short=short)):
        assert mx.isfinite(make_problem(mask=mask).solve(_attend_gpu)).all()
    attends(make_problem(dtype="float32").asked(scale=50.0), short, peak=2.0)  # nor do large scores overflow


@either_form
def test_any_strides(short):
    """Rows of a batch, heads the other way round, tokens that skip: as if they lay side by side."""
    problem = make_problem(batch=3, groups=1, dtype="float32", mask="causal")
    arguments = problem.arguments
    turned = {name: arguments[name][1:2, ::-1] for name in ("queries", "rows", "keys", "values")}
    spaced = {name: mx.repeat(arguments[name], 2, axis=2)[:, :, ::2] for name in ("keys", "values", "queries")}
    with simulated(), thresholds.using(KernelThresholds(short=short)):
        whole = problem.solve(_attend_gpu)
        assert mx.array_equal(problem.solve(_attend_gpu, **spaced), whole)
        assert mx.allclose(problem.solve(_attend_gpu, **turned), whole[1:2, ::-1], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("least", "most"), [(32, 256), (64, 3), (1000, 256)])
def test_any_number_of_blocks(least, most):
    problem = make_problem(body=257, recent=70, mask="causal", sinks=True)
    with thresholds.using(KernelThresholds(least_block=least, most_blocks=most)):
        attends(problem, peak=2.0)


def test_what_kernels_lack_is_refused():
    with simulated(), pytest.raises(KernelUnavailableError, match=r"keys of Q8Codec .* rotation Haar.*mlx's own"):
        make_problem(rotation="haar").solve(_attend_gpu)
    problem = make_problem()
    with simulated(), pytest.raises(KernelUnavailableError, match=r"cannot compute in .*int32.* bfloat16"):
        problem.solve(_attend_gpu, queries=problem.arguments["queries"].astype(mx.int32))
