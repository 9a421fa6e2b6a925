"""Describe the machine and the versions that figures belong to."""

import platform
from importlib.metadata import version

import mlx.core as mx

from mlx_tq import __version__
from mlx_tq.kernels import backend, cpu_streams, thresholds

# Debian's name of a library that is about six times faster for float32 prompts.
FASTER_BLAS = "apt install libopenblas0-pthread, and LD_PRELOAD=libopenblas.so.0"


def mlx_backend() -> str:
    """Return what mlx computes on: "metal", "cuda" or "cpu"."""
    if mx.metal.is_available():
        return "metal"
    return "cpu" if mx.default_device().type == mx.DeviceType.cpu else "cuda"


def device_name() -> str:
    """Return the name of the GPU, or of the processor if there is none."""
    name = mx.device_info().get("device_name") if mlx_backend() != "cpu" else None
    return str(name or platform.processor() or platform.machine())


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
    return {
        "device": device_name(),
        "backend": mlx_backend(),
        "blas": blas(),
        "attention": backend.describe(),
        "thresholds": thresholds.table().origin,
        "system": platform.platform(),
        "python": platform.python_version(),
        **{package: version(package) for package in ("mlx", "mlx-lm", "numpy")},
        "mlx_tq": __version__,
    }
