"""attend.metal and merge.metal on the simulator: as accurate as mx.fast attention over the decoded cache."""

import mlx.core as mx
import numpy as np
import pytest
from attention_cases import (
    assert_as_good_as_reference,
    make_problem,
    random_sinks,
)
from simulated import ORDERS, simulated

from mlx_tq.errors import KernelUnavailableError
from mlx_tq.kernels.attend import _attend_gpu


def solve(problem, *arguments, **how) -> mx.array:
    with simulated(**how):
        return problem.solve(_attend_gpu, *arguments)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("mask", [None, "causal", "bool", "additive"])
def test_masks_and_sinks(mask, order):
    problem = make_problem(body=97, prefix=5, recent=70)
    if mask in ("bool", "additive"):
        visible = np.random.default_rng(1).random((3, problem.tokens)) < 0.5
        mask = mx.array(visible) if mask == "bool" else mx.where(mx.array(visible), 0.5, -mx.inf).astype(mx.float16)
    sinks = random_sinks(problem)
    assert_as_good_as_reference(problem, solve(problem, mask, sinks, order=order), mask, sinks)


def test_haar_is_refused():
    problem = make_problem(rotation="haar")
    with simulated(), pytest.raises(KernelUnavailableError, match=r"keys of Q8Codec .* rotation Haar.*mlx's own"):
        problem.solve(_attend_gpu)
