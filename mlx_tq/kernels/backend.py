"""Chooses the backend of compressed caches for the process: GPU kernels or their reference implementations."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import ParamSpec, TypeVar

import mlx.core as mx

from mlx_tq.errors import ConfigError, KernelUnavailableError
from mlx_tq.kernels import gpu
from mlx_tq.kernels.cpu.arrays import TracedArrayError
from mlx_tq.kernels.cpu.build import load_library
from mlx_tq.kernels.execution_record import record

BACKENDS = ("auto", "metal", "cuda", "cpu", "reference")
GPUS = ("metal", "cuda")

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


class KernelFallbackWarning(RuntimeWarning):
    """A kernel could not be used, and its reference implementation ran instead."""


@dataclass
class _State:
    choice: str = "auto"
    failure: str | None = None  # why "auto" stopped using kernels


_state = _State()


def choose(name: str) -> None:
    """Use a backend from now on, in the whole process.

    "auto" uses the device that mlx uses, and switches to "reference", with a warning, when a kernel cannot be built or
    run. "metal", "cuda" and "cpu" raise instead. "reference" computes with mlx operations.
    """
    if name not in BACKENDS:
        raise ConfigError(f"unknown backend {name!r}; valid are {', '.join(BACKENDS)}.")
    if name in (*GPUS, "cpu") and _device() != name:
        raise KernelUnavailableError(
            f"backend {name!r} is not available: mlx's default device is {mx.default_device()}, with backend "
            f"{_device()}. Use auto or reference."
        )
    if name == "cpu":
        load_library()
    _state.choice, _state.failure = name, None


@contextmanager
def using(name: str) -> Iterator[None]:
    """Use a backend inside a `with` block, then the previous one again."""
    previous = _state.choice, _state.failure
    choose(name)
    try:
        yield
    finally:
        _state.choice, _state.failure = previous


def current() -> str:
    if _state.choice != "auto":
        return _state.choice
    return "reference" if _state.failure else _device()


def is_chosen(name: str) -> bool:
    """Return whether a backend was chosen by its name."""
    return _state.choice == name


def is_gpu() -> bool:
    return current() in GPUS


def _device() -> str:
    return gpu.gpu_backend() or "cpu"


def describe() -> str:
    """Return the backend in use and the reason for it, in a few words for reports."""
    if current() != "reference":
        return f"{current()} kernels"
    if _state.failure:
        return f"reference implementation, because a kernel failed: {_state.failure.rstrip('.')}"
    return "reference implementation (chosen)"


def prepare() -> None:
    """Compile the kernels of a CPU, unless they are. "auto" falls back with a `KernelFallbackWarning`."""
    if current() != "cpu":
        return
    try:
        load_library()
    except KernelUnavailableError as error:
        if _state.choice != "auto":
            raise
        _fall_back(error, stacklevel=3)


def _fall_back(error: KernelUnavailableError, stacklevel: int) -> None:
    message = f"{str(error).rstrip('.')}. The reference implementation runs instead, which is slow."
    warnings.warn(message, KernelFallbackWarning, stacklevel=stacklevel)
    if not isinstance(error, gpu.UnsupportedByKernelError):
        _state.failure = str(error)


def dispatch(
    launch: Callable[_Parameters, _Result] | None = None, cpu: Callable[_Parameters, _Result] | None = None
) -> Callable[[Callable[_Parameters, _Result]], Callable[_Parameters, _Result]]:
    """Run `launch`, which launches GPU kernels, or `cpu`, in place of the decorated function, as the backend is.

    The decorated function is the reference implementation. "auto" falls back to it with a `KernelFallbackWarning`: for
    this call where kernels do not support the case, for good where a kernel cannot be built or run. On a CPU it runs
    without a warning for what kernels do not support, and where arrays have no values, which they need: inside
    `mx.compile`, `mx.vmap` and `mx.grad`.
    """

    def decorate(reference: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
        @wraps(reference)
        def run(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
            name, run_kernel = reference.__name__, launch if is_gpu() else cpu if current() == "cpu" else None
            if run_kernel is None:
                if launch is not None:
                    record(f"reference {name}")
                return reference(*args, **kwargs)
            try:
                return run_kernel(*args, **kwargs)
            except TracedArrayError:
                record(f"reference {name}")
                return reference(*args, **kwargs)
            except KernelUnavailableError as error:
                # On a CPU the reference implementation runs on the same device.
                if is_gpu() or not isinstance(error, gpu.UnsupportedByKernelError):
                    if _state.choice != "auto":
                        raise
                    _fall_back(error, stacklevel=3)
                record(f"reference {name}")
                return reference(*args, **kwargs)

        return run

    return decorate
