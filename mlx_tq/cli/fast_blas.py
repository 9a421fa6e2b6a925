"""Gives mlx a fast BLAS on Linux: its CPU wheel brings the reference BLAS, several times slower in float32.

A library in the global scope of the process comes before those of the wheel, as with LD_PRELOAD, if it is there before
mlx is loaded. Only commands do this: an import must not change the process of a program.
"""

import ctypes
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

_SLOW_BLAS = "reference BLAS of mlx's wheel"
_FASTER_BLAS = "pip install faiss-cpu, which brings OpenBLAS, or apt install libopenblas0-pthread"
_DEPENDENCIES = ("libquadmath", "libgfortran", "libgomp")  # of FAISS's OpenBLAS, each after what it depends on
_MOST_THREADS = 8  # more were not measured


def use_fast_blas() -> None:
    """Load OpenBLAS for mlx, if mlx would use the reference BLAS and one is installed: FAISS's, or the system's."""
    if sys.platform != "linux" or "mlx.core" in sys.modules or not _has_slow_blas():
        return
    if hasattr(ctypes.CDLL(None), "cblas_sgemm"):  # preloaded
        return
    with _patient_threads():
        for path in (_faiss_openblas(), "libopenblas.so.0"):
            if path is not None and _load(path):
                return


def _has_slow_blas() -> bool:
    return bool(_libraries("mlx", "mlx_cpu.libs"))


def _libraries(package: str, folder: str) -> list[Path]:
    """Return the libraries that a package's wheel brings in a folder next to the package."""
    spec = find_spec(package)
    places = [] if spec is None else spec.submodule_search_locations or []
    return sorted(file for place in places for file in (Path(place).parent / folder).glob("lib*"))


def _faiss_openblas() -> str | None:
    """Return the OpenBLAS of FAISS's wheel, whose dependencies, which it cannot find itself, are then loaded."""
    files = _libraries("faiss", "faiss_cpu.libs")
    for name in _DEPENDENCIES:
        for file in files:
            if file.name.startswith(name):
                with suppress(OSError):
                    ctypes.CDLL(str(file))
    return next((str(file) for file in files if file.name.startswith("libopenblas")), None)


def _load(path: str) -> bool:
    """Make a library's symbols global, if it is an OpenBLAS with 32-bit integers, as mlx calls it."""
    try:
        library = ctypes.CDLL(path)
        library.openblas_get_config.restype = ctypes.c_char_p
        if b"USE64BITINT" in library.openblas_get_config() or not hasattr(library, "cblas_sgemm"):
            return False
        ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
    except (OSError, AttributeError):
        return False
    return True


@contextmanager
def _patient_threads() -> Iterator[None]:
    """Set the variables that OpenBLAS and OpenMP read when they are loaded, unless the user has; no child sees them.

    Threads that wait actively would take the cores from the kernels' threads.
    """
    threads = str(min(len(os.sched_getaffinity(0)), _MOST_THREADS))
    variables = {"OMP_NUM_THREADS": threads, "OMP_WAIT_POLICY": "passive"}
    chosen = {*os.environ, *(["OMP_NUM_THREADS"] if "OPENBLAS_NUM_THREADS" in os.environ else [])}
    names = variables.keys() - chosen
    os.environ.update({name: variables[name] for name in names})
    try:
        yield
    finally:
        for name in names:
            del os.environ[name]


def describe_blas() -> str:
    """Return the library that multiplies float32 matrices on a CPU; that of mlx's Linux wheel is slow."""
    from mlx_tq.kernels import cpu_streams  # loads mlx

    if platform.system() == "Darwin":
        return "Accelerate"
    path = cpu_streams.blas_library()
    if path is None:
        return "unknown"
    if path.name.startswith("libopenblas"):
        return "OpenBLAS"
    return f"{_SLOW_BLAS}, slow in float32; faster: {_FASTER_BLAS}"


def blas_warning() -> str | None:
    """Return what makes float32 faster on this CPU, or None if its BLAS is fast or a GPU computes."""
    from mlx_tq.kernels.gpu import gpu_backend  # loads mlx

    if gpu_backend() is not None or not describe_blas().startswith(_SLOW_BLAS):
        return None
    return f"float32 prompts are slow with the {_SLOW_BLAS}. Faster: {_FASTER_BLAS}."
