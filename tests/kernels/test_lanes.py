"""Cores that share the packed tokens: each token is taken once, and the answer is one core's."""

from itertools import pairwise

import mlx.core as mx
import pytest
from attention_cases import assert_as_good_as_reference, make_problem

from mlx_tq.kernels import lanes
from mlx_tq.kernels.attend import attend


@pytest.fixture(params=[1, 2, 4])
def cores(monkeypatch, request):
    """So many, whatever the machine has: a stream each."""
    monkeypatch.setattr(lanes, "_LANES", [mx.new_thread_local_stream(mx.cpu) for _ in range(request.param)])
    return request.param


@pytest.mark.parametrize("tokens", [1, 511, 1023, 1024, 1536, 2047, 4096, 100_003])
def test_runs_cover_the_tokens_once(cores, tokens):
    runs = lanes.lanes(tokens)
    edges = [runs[0][1], *(stop for _, _, stop in runs)]
    assert (edges[0], edges[-1]) == (0, tokens)
    assert all(first < last for first, last in pairwise(edges))
    assert [start for _, start, _ in runs] == edges[:-1]
    assert len(runs) == min(cores, max(1, tokens // lanes.LEAST_TOKENS))


def test_cores_work_on_streams_of_their_own(cores):
    assert len({str(stream) for stream, _, _ in lanes.lanes(4096)}) == cores


@pytest.mark.parametrize("mask", [None, "causal", "array"])
def test_attention_shared_by_cores(cores, mask):
    problem = make_problem(body=2100, dtype="float32")
    if mask == "array":
        mask = mx.random.uniform(shape=(3, problem.tokens)) < 0.5
    assert_as_good_as_reference(problem, problem.solve(attend, mask), mask)
