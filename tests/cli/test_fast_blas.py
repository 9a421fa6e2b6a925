"""A command multiplies with OpenBLAS, where one is installed; a program that imports mlx_tq keeps its own libraries."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from .tools import environment

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="macOS uses Accelerate"),
    pytest.mark.skipif(find_spec("faiss") is None, reason="no OpenBLAS: faiss-cpu is not installed"),
]
# A command of one's own, which shows what the process has loaded, what it multiplies, and its variables.
COMMAND = """
import argparse, ctypes, json, os, sys
from mlx_tq.cli.runner import run_command

def run(args):
    import mlx.core as mx
    import numpy as np
    from mlx_tq.cli.fast_blas import describe_blas
    from mlx_tq.kernels.cpu_streams import blas_threads
    from mlx_tq.kernels import backend
    a, b = (np.random.default_rng(seed).standard_normal((300, 300)).astype(np.float32) for seed in (0, 1))
    error = float(np.abs(np.array(mx.array(a) @ mx.array(b)) - a.astype(np.float64) @ b).max())
    names = [name for name in os.environ if name.startswith("OMP_")]
    is_global = hasattr(ctypes.CDLL(None), "openblas_get_config")
    is_mapped = "libopenblas" in open("/proc/self/maps").read()
    print(json.dumps([describe_blas(), is_mapped, is_global, blas_threads(), error < 1e-3, names]))
    return 0

"""
CORES = min(len(os.sched_getaffinity(0)), 8)
RUN = 'sys.exit(run_command(argparse.ArgumentParser(prog="mlx_tq.doctor"), run, []))'
IMPORT = "import mlx_tq; mlx_tq.KVConfig; run(None)"


def output(program, **changes):
    variables = environment(**changes)
    for name in {"LD_PRELOAD", "LD_LIBRARY_PATH", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"} - changes.keys():
        variables.pop(name, None)
    done = subprocess.run(
        [sys.executable, "-c", COMMAND + program], env=variables, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.strip()


def test_a_command_finds_that_of_faiss():
    assert output(RUN) == f'["OpenBLAS", true, true, {CORES}, true, []]'


def test_the_threads_that_were_chosen_stay():
    assert output(RUN, OMP_NUM_THREADS="1") == '["OpenBLAS", true, true, 1, true, ["OMP_NUM_THREADS"]]'


def test_an_import_changes_nothing():
    assert output(IMPORT).startswith("[\"reference BLAS of mlx's wheel, slow in float32; faster: pip install faiss-cpu")


WITHOUT_FAISS = "sys.modules['faiss'] = None\n"  # then the library of the system is looked for by its name


def test_a_library_of_another_kind_is_refused(tmp_path):
    """One that has no products of matrices."""
    (math,) = {
        Path(line.split()[-1]) for line in Path("/proc/self/maps").read_text().splitlines() if "/libm.so" in line
    }
    (tmp_path / "libopenblas.so.0").symlink_to(math)
    found = output(WITHOUT_FAISS + RUN, LD_LIBRARY_PATH=str(tmp_path))
    assert found.startswith('["reference BLAS')


def test_the_library_of_the_system_is_found(tmp_path):
    (openblas,) = Path(find_spec("faiss").origin).parents[1].glob("faiss_cpu.libs/libopenblas*")
    (tmp_path / "libopenblas.so.0").symlink_to(openblas)
    found = output(WITHOUT_FAISS + RUN, LD_LIBRARY_PATH=f"{tmp_path}:{openblas.parent}")
    assert found == f'["OpenBLAS", true, true, {CORES}, true, []]'
