"""Cores that share the packed tokens: each token is taken once, and the answer is one core's."""

from itertools import pairwise

import mlx.core as mx
import pytest
from cases import check_attention, make_problem

from mlx_tq.kernels import cpu_streams
from mlx_tq.kernels.attend import attend


@pytest.fixture(params=[1, 2, 4])
def cores(monkeypatch, request):
    """So many, whatever the machine has: a stream each."""
    monkeypatch.setattr(cpu_streams, "_STREAMS", [mx.new_thread_local_stream(mx.cpu) for _ in range(request.param)])
    return request.param


@pytest.mark.parametrize("tokens", [1, 511, 1023, 1024, 1536, 2047, 4096, 100_003])
def test_runs_cover_the_tokens_once(cores, tokens):
    cut = cpu_streams.runs(tokens)
    assert len({str(stream) for stream, _, _ in cut}) == len(cut), "streams of their own"
    edges = [cut[0][1], *(stop for _, _, stop in cut)]
    assert (edges[0], edges[-1]) == (0, tokens)
    assert all(first < last for first, last in pairwise(edges))
    assert [start for _, start, _ in cut] == edges[:-1]
    assert len(cut) == min(cores, max(1, tokens // cpu_streams.LEAST_TOKENS))


@pytest.mark.parametrize("mask", [None, "causal", "bool"])
def test_attention_shared_by_cores(cores, mask):
    problem = make_problem(body=2100, dtype="float32", mask=mask)
    check_attention(problem, problem.solve(attend))
