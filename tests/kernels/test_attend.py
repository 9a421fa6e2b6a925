"""Attention of a few queries over packed rows: as accurate as mx.fast attention over the decoded cache."""

import itertools

import mlx.core as mx
import numpy as np
import pytest
from attention_cases import (
    PARAMETERS,
    assert_as_good_as_reference,
    double,
    expected,
    make_problem,
    poison,
    random_cases,
    random_sinks,
    run_case,
)
from covering import case_id, covering

from mlx_tq.kernels.attend import attend

BLOCK_TOKENS = "mlx_tq.kernels.attend.BLOCK_TOKENS"
CASES = covering(PARAMETERS)


def test_cases_cover_all_pairs():
    for a, b in itertools.combinations(PARAMETERS, 2):
        met = {(case[a], case[b]) for case in CASES}
        assert met == set(itertools.product(PARAMETERS[a], PARAMETERS[b]))
    assert len(CASES) < 150


@pytest.mark.parametrize("number", range(len(CASES)), ids=[case_id(case) for case in CASES])
def test_error_is_at_most_twice_the_reference(number):
    run_case(attend, CASES[number], seed=number)


@pytest.mark.full
@pytest.mark.parametrize("part", range(20))
def test_error_in_random_cases(part):
    for number, case in enumerate(random_cases(PARAMETERS, 50, seed=part)):
        run_case(attend, case, seed=1000 * part + number, peak=3.0)  # in thousands of cases 2x is passed by chance


@pytest.mark.parametrize("key", ["q8", "tq4", "tq3", "tq2"])
def test_haar(key):
    problem = make_problem(key=key, value="tq3", rotation="haar")
    assert_as_good_as_reference(problem, problem.solve(attend, "causal"), "causal")


@pytest.mark.parametrize("block", [1, 7, 32, 96, 97, 98])
@pytest.mark.parametrize("mask", [None, "causal", "array"])
def test_blocks_equal_one_block(monkeypatch, block, mask):
    problem = make_problem(body=97, dtype="float32")
    if mask == "array":
        mask = mx.array(np.random.default_rng(1).random((3, problem.tokens)) < 0.5)
    sinks = random_sinks(problem)
    whole = problem.solve(attend, mask, sinks)
    monkeypatch.setattr(BLOCK_TOKENS, block)
    parts = problem.solve(attend, mask, sinks)
    assert mx.allclose(parts, whole, rtol=1e-5, atol=1e-6)
    assert_as_good_as_reference(problem, parts, mask, sinks)


@pytest.mark.parametrize("additive", [False, True])
@pytest.mark.parametrize("hidden", [(0, 32), (32, 64), (64, 97), (0, 97)])
def test_wholly_masked_blocks(monkeypatch, hidden, additive):
    """Nothing of a masked block is seen, and no difference of two minus infinities appears."""
    monkeypatch.setattr(BLOCK_TOKENS, 32)
    problem = make_problem(body=97, prefix=5)
    visible = np.ones((3, problem.tokens), bool)
    visible[:, 5 + hidden[0] : 5 + hidden[1]] = False
    mask = mx.where(mx.array(visible), 0.0, -mx.inf).astype(mx.float16) if additive else mx.array(visible)
    assert_as_good_as_reference(problem, problem.solve(attend, mask), mask)


@pytest.mark.parametrize("additive", [False, True])
def test_query_that_sees_nothing_is_finite(additive):
    problem = make_problem()
    visible = np.ones((3, problem.tokens), bool)
    visible[1] = False
    mask = mx.where(mx.array(visible), 0.0, -mx.inf) if additive else mx.array(visible)
    out = double(problem.solve(attend, mask))
    assert np.isfinite(out).all()
    others = [0, 2]
    assert np.allclose(out[:, :, others], expected(problem)[:, :, others], atol=2e-3)


def test_unused_capacity_is_never_read():
    problem = make_problem(body=33)
    rows = problem.arguments["rows"][:, :, :33]
    outputs = []
    for spare, word in ((1, 0xFFFFFFFF), (300, 0x7E007E00), (5, 0), (0, 0)):
        problem.arguments["rows"] = poison(rows, spare, word)
        outputs.append(problem.solve(attend, "causal"))
    assert all(mx.array_equal(out, outputs[0]) for out in outputs)


def test_slices_of_larger_arrays():
    """A row of a batch is attended to in place, without a copy that would be contiguous."""
    problem = make_problem(batch=3)
    whole = problem.solve(attend, "causal")
    arguments = dict(problem.arguments)
    for name in ("queries", "rows", "keys", "values"):
        arguments[name] = arguments[name][1:2]
    assert mx.allclose(attend(**arguments, mask="causal"), whole[1:2], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("body", [0, 97])
def test_sinks_in_another_type(body):
    problem = make_problem(body=body)
    sinks = random_sinks(problem)
    half, wide = problem.solve(attend, "causal", sinks), problem.solve(attend, "causal", sinks.astype(mx.float32))
    assert mx.array_equal(half, wide)


def test_a_large_sink_takes_all():
    problem = make_problem()
    sinks = mx.full((problem.queries.shape[1],), 1e4)
    assert mx.array_equal(problem.solve(attend, sinks=sinks), mx.zeros_like(problem.solve(attend)))


def test_large_scores_do_not_overflow():
    problem = make_problem(dtype="float32")
    problem.arguments["scale"] = 50.0
    assert_as_good_as_reference(problem, problem.solve(attend))
