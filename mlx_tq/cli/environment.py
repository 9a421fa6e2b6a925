"""Describe the machine and the versions that figures belong to."""

import platform
from importlib.metadata import version

import mlx.core as mx

from mlx_tq import __version__
from mlx_tq.kernels import backend, cpu_streams, thresholds

# Debian's name of a library that is about six times faster for float32 prompts.
FASTER_BLAS = "apt install libopenblas0-pthread, and LD_PRELOAD=libopenblas.so.0"


def blas() -> str:
    """Return the library that multiplies float32 matrices on a CPU; that of mlx's Linux wheel is slow."""
    if platform.system() == "Darwin":
        return "Accelerate"
    path = cpu_streams.blas_library()
    if path is None:
        return "unknown"
    if path.name.startswith("libopenblas"):
        return "OpenBLAS"
    return f"reference BLAS of mlx's wheel, slow in float32; faster: {FASTER_BLAS}"


def environment() -> dict[str, str]:
    """Return the machine and the versions, for the head of a report."""
    used = "cpu" if mx.default_device().type == mx.DeviceType.cpu else "cuda"
    used = "metal" if mx.metal.is_available() else used
    name = None if used == "cpu" else mx.device_info().get("device_name")
    return {
        "device": str(name or platform.processor() or platform.machine()),
        "backend": used,
        "blas": blas(),
        "attention": backend.describe(),
        "thresholds": thresholds.table().origin,
        "system": platform.platform(),
        "python": platform.python_version(),
        **{package: version(package) for package in ("mlx", "mlx-lm", "numpy")},
        "mlx_tq": __version__,
    }
