"""attend.metal and merge.metal on the simulator: as accurate as mx.fast attention over the decoded cache."""

import math
from collections.abc import Iterator
from dataclasses import replace
from unittest import mock

import mlx.core as mx
import numpy as np
import pytest
from attention_cases import (
    PARAMETERS,
    assert_as_good_as_reference,
    expected,
    make_problem,
    poison,
    random_sinks,
    run_case,
)
from covering import case_id, covering
from simulated import ORDERS, simulated

from mlx_tq.errors import KernelUnavailableError
from mlx_tq.kernels import phases
from mlx_tq.kernels.attend import _attend_gpu, attend_ref
from mlx_tq.kernels.phases import Phases

# What makes another text, wide heads last, and what is data to one, large sizes first: the two meet in this order.
TEXTS = sorted(
    covering({name: PARAMETERS[name] for name in ("dims", "key", "value", "dtype")}), key=lambda text: sum(text["dims"])
)
SIZES = sorted(
    covering({name: PARAMETERS[name] for name in PARAMETERS if name not in TEXTS[0]}),
    key=lambda sizes: -math.prod(sizes[name] for name in ("body", "batch", "groups", "length")),
)
PEAK = 3.0  # of the largest error: see run_case's other users


def on_simulator(short=0, **how):
    """`_attend_gpu`, run there: in two kernels, or in one for up to `short` tokens."""

    def solve(*arguments, **options) -> mx.array:
        with simulated(**how), phases.using(replace(phases.current(), short=short)):
            return _attend_gpu(*arguments, **options)

    return solve


either_form = pytest.mark.parametrize("solve", [on_simulator(), on_simulator(short=65536)], ids=["two", "one"])


def sizes_of(number: int) -> Iterator[dict]:
    """Each text runs on one or two of the sizes, all of which occur."""
    return iter(SIZES[number * len(SIZES) // len(TEXTS) : (number + 1) * len(SIZES) // len(TEXTS)])


@pytest.mark.parametrize("number", range(len(TEXTS)), ids=[case_id(case) for case in TEXTS])
def test_error_is_at_most_twice_the_reference(number):
    for sizes in sizes_of(number):
        order = ORDERS[number % len(ORDERS)]
        run_case(on_simulator(order=order), {**TEXTS[number], **sizes}, seed=number, peak=PEAK)


def test_every_size_runs():
    assert len(TEXTS) <= len(SIZES)
    ran = [sizes for number in range(len(TEXTS)) for sizes in sizes_of(number)]
    assert sorted(map(str, ran)) == sorted(map(str, SIZES))


@pytest.mark.parametrize("key", ["fp16", "tq3"])
def test_under_sanitizers(key):
    case = {"dims": (80, 112), "key": key, "value": "tq4", "dtype": "bfloat16", "body": 97, "batch": 1, "groups": 7}
    case |= {"length": 1, "prefix": 5, "recent": 6, "mask": None, "sinks": True}
    run_case(on_simulator(sanitize=True), case, seed=1)


@pytest.mark.parametrize("additive", [False, True])
@pytest.mark.parametrize("shape", ["LS", "BQLS", "B11S"])
def test_mask_arrays(shape, additive):
    problem = make_problem(body=97, prefix=5, recent=70)
    sizes = {"B": 2, "Q": 4, "L": 3, "S": problem.tokens, "1": 1}
    rng = np.random.default_rng(1)
    visible = rng.random([sizes[letter] for letter in shape]) < 0.5
    bias = np.where(visible, rng.standard_normal(visible.shape), -np.inf).astype(np.float16)
    mask = mx.array(bias) if additive else mx.array(visible)
    sinks = random_sinks(problem)
    out = problem.solve(on_simulator(), mask, sinks)
    assert_as_good_as_reference(problem, out, mask, sinks, peak=PEAK)


@pytest.mark.parametrize("solve", [attend_ref, on_simulator()], ids=["twin", "kernel"])
@pytest.mark.parametrize(("window", "padding"), [(40, (0, 0)), (200, (7, 60)), (2, (0, 150)), (1000, (1, 3))])
@pytest.mark.parametrize("mask", [None, "causal"])
def test_windows_and_padding(solve, window, padding, mask):
    """Ranges of each query of each batch row, as data: they end and begin within prefix, body and tail."""
    problem = make_problem(body=161, prefix=5, recent=20)
    places = np.arange(problem.tokens - 3, problem.tokens)
    first = np.maximum(places - window + 1, np.array(padding)[:, None])
    last = np.full_like(first, problem.tokens - 1) if mask else np.broadcast_to(places + 1, first.shape)
    visible = mx.array(np.stack([first, last], axis=-1).astype(np.int32))
    token = np.arange(problem.tokens)
    seen = (token >= first[..., None]) & (token < last[..., None])
    seen &= token <= places[:, None]
    found = solve(**problem.arguments, mask=mask, visible=visible)
    array = mx.array(seen[:, None])
    assert_as_good_as_reference(problem, found, array, peak=PEAK)


@pytest.mark.parametrize("short", [0, 4096])
def test_one_text_for_every_window(short):
    """Ranges, lengths and blocks are data: none of them compiles another text."""
    chosen = phases.using(Phases(short=short))
    with simulated() as counters, chosen, mock.patch("simulated.simulate", wraps=mock.DEFAULT) as run:
        run.side_effect = Stopped
        texts = set()
        for body, window in ((33, None), (97, [[0, 50]] * 3), (257, [[9, 60]] * 3)):
            problem = make_problem(body=body, batch=1)
            visible = None if window is None else mx.array([window])
            with pytest.raises(Stopped):
                _attend_gpu(**problem.arguments, visible=visible)
            texts.add(run.call_args.args[0])
    assert len(texts) == 1
    assert counters == []


class Stopped(Exception):  # noqa: N818  it ends a call, it is no error
    pass


def test_a_query_that_sees_nothing_is_zero():
    problem = make_problem(body=97)
    visible = mx.array([[[0, 1000], [50, 50], [0, 1000]]] * 2)
    found = np.array(on_simulator()(**problem.arguments, visible=visible))
    assert np.array_equal(found[:, :, 1], np.zeros_like(found[:, :, 1]))
    others = [0, 2]
    assert np.allclose(found[:, :, others], expected(problem)[:, :, others], atol=2e-3)


@pytest.mark.parametrize("mask", [mx.zeros((3, 1), mx.bool_), mx.full((3, 111), -mx.inf)], ids=["bool", "additive"])
def test_a_query_that_is_all_masked_is_finite(mask):
    problem = make_problem(body=97)
    assert problem.tokens == 111
    assert np.isfinite(np.array(problem.solve(on_simulator(), mask))).all()


@either_form
def test_unused_capacity_is_never_read(solve):
    """NaN, or zeros, or no capacity at all."""
    problem = make_problem(body=33)
    rows = problem.arguments["rows"][:, :, :33]
    outputs = []
    for spare, word in ((1, 0xFFFFFFFF), (300, 0x7E007E00), (5, 0), (0, 0)):
        problem.arguments["rows"] = poison(rows, spare, word)
        outputs.append(problem.solve(solve, "causal"))
    assert all(mx.array_equal(out, outputs[0]) for out in outputs)


@either_form
def test_any_strides(solve):
    """Rows of a batch, heads the other way round, tokens that skip: read in place."""
    problem = make_problem(batch=3, groups=1, dtype="float32")
    arguments = dict(problem.arguments)
    for name in ("queries", "rows", "keys", "values"):
        arguments[name] = arguments[name][1:2, ::-1]
    whole = problem.solve(solve, "causal")[1:2, ::-1]
    assert mx.allclose(solve(**arguments, mask="causal"), whole, rtol=1e-6, atol=1e-6)
    spaced = {name: mx.repeat(problem.arguments[name], 2, axis=2)[:, :, ::2] for name in ("keys", "values", "queries")}
    found = solve(**{**problem.arguments, **spaced}, mask="causal")
    assert mx.array_equal(found, problem.solve(solve, "causal"))


@pytest.mark.parametrize(("least", "most"), [(32, 256), (64, 3), (1000, 256)])
def test_any_number_of_blocks(least, most):
    problem = make_problem(body=257, recent=70)
    sinks = random_sinks(problem)
    with phases.using(Phases(least_block=least, most_blocks=most)):
        out = problem.solve(on_simulator(), "causal", sinks)
    assert_as_good_as_reference(problem, out, "causal", sinks)


def test_large_scores_do_not_overflow():
    problem = make_problem(dtype="float32")
    problem.arguments["scale"] = 50.0
    assert_as_good_as_reference(problem, problem.solve(on_simulator()))


def test_haar_is_refused():
    problem = make_problem(rotation="haar")
    with simulated(), pytest.raises(KernelUnavailableError, match=r"keys of Q8Codec .* rotation Haar.*mlx's own"):
        problem.solve(_attend_gpu)


def test_other_types_are_refused():
    problem = make_problem()
    problem.arguments["queries"] = problem.queries.astype(mx.int32)
    with simulated(), pytest.raises(KernelUnavailableError, match=r"cannot compute in .*int32.* bfloat16"):
        problem.solve(_attend_gpu)
