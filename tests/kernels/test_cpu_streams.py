"""Packed tokens divided between CPU cores: each token is taken once, and the result is that of one core."""

import os
import subprocess
import sys
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import mlx.core as mx
import pytest

from kernels.cases import check_attention, make_problem
from mlx_tq.kernels import cpu_streams
from mlx_tq.kernels.attend import attend


@pytest.fixture(params=[1, 2, 4])
def cores(monkeypatch, request):
    """Set the number of cores, and a BLAS with one thread."""
    monkeypatch.setattr(cpu_streams, "blas_threads", lambda: 1)
    monkeypatch.setattr(cpu_streams, "_STREAMS", [mx.new_thread_local_stream(mx.cpu) for _ in range(request.param)])
    return request.param


@pytest.mark.parametrize("tokens", [1, 511, 1023, 1024, 1536, 2047, 4096, 100_003])
def test_ranges_cover_the_tokens_once(cores, tokens):
    ranges = cpu_streams.split_tokens(tokens)
    assert len({str(stream) for stream, _, _ in ranges}) == len(ranges), "one stream each"
    edges = [ranges[0][1], *(stop for _, _, stop in ranges)]
    assert (edges[0], edges[-1]) == (0, tokens)
    assert all(first < last for first, last in pairwise(edges))
    assert [start for _, start, _ in ranges] == edges[:-1]
    assert len(ranges) == min(cores, max(1, tokens // cpu_streams.MIN_TOKENS))


@pytest.mark.parametrize("mask", [None, "causal", "bool"])
def test_attention_on_several_cores(cores, mask):
    problem = make_problem(packed=2100, dtype="float32", mask=mask)
    check_attention(problem, problem.solve(attend))


def test_a_blas_with_several_threads_gets_all_cores(cores, monkeypatch):
    monkeypatch.setattr(cpu_streams, "blas_threads", lambda: 2)
    assert [(start, stop) for _, start, stop in cpu_streams.split_tokens(100_003)] == [(0, 100_003)]


@pytest.mark.skipif(sys.platform != "linux", reason="macOS uses Accelerate")
@pytest.mark.parametrize("count", [1, 2])
def test_blas_threads_of_the_loaded_library(count):
    """FAISS's wheel has an OpenBLAS; the reference BLAS of mlx's wheel has one thread."""
    program = "import mlx.core; from mlx_tq.kernels.cpu_streams import *; print(blas_library().name, blas_threads())"
    plain = {name: value for name, value in os.environ.items() if name not in ("LD_PRELOAD", "OPENBLAS_NUM_THREADS")}
    (openblas,) = Path(find_spec("faiss").origin).parents[1].glob("faiss_cpu.libs/libopenblas*")

    def run(**variables):
        environment = {**plain, "OMP_NUM_THREADS": str(count), **variables}
        return subprocess.check_output([sys.executable, "-c", program], env=environment, text=True).split()

    loaded = run(LD_PRELOAD=str(openblas), LD_LIBRARY_PATH=str(openblas.parent))
    assert loaded == [openblas.name, str(min(count, os.cpu_count()))]
    reference, threads = run()
    assert (reference.startswith("libblas"), threads) == (True, "1")
