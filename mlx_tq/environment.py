"""The machine and the versions that a figure belongs to."""

import platform
from importlib.metadata import version

import mlx.core as mx

from mlx_tq import __version__
from mlx_tq.kernels import impl, phases


def backend() -> str:
    """What the arrays are computed on: "metal", "cuda" or "cpu"."""
    if mx.metal.is_available():
        return "metal"
    return "cpu" if mx.default_device().type == mx.DeviceType.cpu else "cuda"


def device_name() -> str:
    """Name of the GPU, or of the processor where there is none."""
    name = mx.device_info().get("device_name") if backend() != "cpu" else None
    return str(name or platform.processor() or platform.machine())


def environment() -> dict[str, str]:
    """Machine and versions, for the head of a report."""
    return {
        "device": device_name(),
        "backend": backend(),
        "attention": impl.describe(),
        "phases": phases.table().origin,
        "system": platform.platform(),
        "python": platform.python_version(),
        **{package: version(package) for package in ("mlx", "mlx-lm", "numpy")},
        "mlx_tq": __version__,
    }
