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
from mlx_tq.kernels.execution_record import record

BACKENDS = ("auto", "metal", "cuda", "reference")

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

    "auto" uses the GPU that mlx uses, else "reference", to which it also switches, with a warning, when a kernel cannot
    be built or run. "metal" and "cuda" raise instead. "reference" computes with mlx operations.
    """
    if name not in BACKENDS:
        raise ConfigError(f"unknown backend {name!r}; valid are {', '.join(BACKENDS)}.")
    if name in ("metal", "cuda") and gpu.gpu_backend() != name:
        raise KernelUnavailableError(
            f"backend {name!r} is not available: mlx's default device is {mx.default_device()}, with "
            f"{gpu.gpu_backend() or 'no GPU'}. Use auto or reference."
        )
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
    if _state.choice in ("metal", "cuda"):
        return _state.choice
    return "reference" if _state.choice == "reference" or _state.failure else gpu.gpu_backend() or "reference"


def describe() -> str:
    """Return the backend in use and the reason for it, in a few words for reports."""
    if current() != "reference":
        return f"{current()} kernels"
    if _state.failure:
        return f"reference implementation, because a kernel failed: {_state.failure}"
    return f"reference implementation ({'chosen' if _state.choice == 'reference' else 'no GPU'})"


def dispatch(
    launch: Callable[_Parameters, _Result],
) -> Callable[[Callable[_Parameters, _Result]], Callable[_Parameters, _Result]]:
    """Run `launch`, which launches GPU kernels, in place of the decorated function while the backend is a GPU.

    The decorated function is the reference implementation. "auto" falls back to it with a `KernelFallbackWarning`: for
    this call where kernels do not support the case, for good where a kernel cannot be built or run.
    """

    def decorate(reference: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
        @wraps(reference)
        def run(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
            if current() == "reference":
                record(f"reference {reference.__name__}")
                return reference(*args, **kwargs)
            try:
                return launch(*args, **kwargs)
            except KernelUnavailableError as error:
                if _state.choice != "auto":
                    raise
                message = f"{str(error).rstrip('.')}. The reference implementation runs instead, which is slow."
                warnings.warn(message, KernelFallbackWarning, stacklevel=2)
                if not isinstance(error, gpu.UnsupportedByKernelError):
                    _state.failure = str(error)
                record(f"reference {reference.__name__}")
                return reference(*args, **kwargs)

        return run

    return decorate
