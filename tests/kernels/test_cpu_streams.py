"""Cores that share the packed tokens: each token is taken once, and the answer is one core's."""

import os
import subprocess
import sys
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import mlx.core as mx
import pytest
from cases import check_attention, make_problem

from mlx_tq.kernels import cpu_blas, cpu_streams
from mlx_tq.kernels.attend import attend


@pytest.fixture(params=[1, 2, 4])
def cores(monkeypatch, request):
    """So many, whatever the machine has: a stream each, and a BLAS of one thread."""
    monkeypatch.setattr(cpu_blas, "threads", lambda: 1)
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


def test_a_blas_of_several_threads_has_the_cores_alone(cores, monkeypatch):
    monkeypatch.setattr(cpu_blas, "threads", lambda: 2)
    assert [(start, stop) for _, start, stop in cpu_streams.runs(100_003)] == [(0, 100_003)]


@pytest.mark.skipif(sys.platform != "linux", reason="macOS has a BLAS of its own")
@pytest.mark.parametrize("count", [1, 2])
def test_the_threads_are_those_of_the_blas_that_is_loaded(count):
    """FAISS's wheel brings an OpenBLAS; without it the one of mlx's wheel is found, which has one thread."""
    asked = "import mlx.core; from mlx_tq.kernels import cpu_blas; print(cpu_blas.library().name, cpu_blas.threads())"
    plain = {name: value for name, value in os.environ.items() if name not in ("LD_PRELOAD", "OPENBLAS_NUM_THREADS")}
    (openblas,) = Path(find_spec("faiss").origin).parents[1].glob("faiss_cpu.libs/libopenblas*")

    def found(**more):
        environment = {**plain, "OMP_NUM_THREADS": str(count), **more}
        return subprocess.check_output([sys.executable, "-c", asked], env=environment, text=True).split()

    loaded = found(LD_PRELOAD=str(openblas), LD_LIBRARY_PATH=str(openblas.parent))
    assert loaded == [openblas.name, str(min(count, os.cpu_count()))]
    reference, threads = found()
    assert (reference.startswith("libblas"), threads) == (True, "1")
