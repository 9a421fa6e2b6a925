"""Which implementation computes: the kernels of metal/ on a GPU, or mlx's own operations.

One choice for the process, like mlx's default device. "auto" takes kernels where there is a GPU; should one fail to
build or run there, it warns and takes mlx's operations from then on. "metal" and "cuda" raise instead.
"reference" runs no kernels.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import mlx.core as mx

from mlx_tq.errors import ConfigError, KernelUnavailableError
from mlx_tq.kernels import build

BACKENDS = ("auto", "metal", "cuda", "reference")

_Result = TypeVar("_Result")


class KernelFallbackWarning(RuntimeWarning):
    """Kernels were expected and mlx's own operations serve instead."""


@dataclass
class _State:
    choice: str = "auto"
    failure: str | None = None  # why "auto" gave kernels up


_state = _State()


def choose(name: str) -> None:
    """Take an implementation of BACKENDS from now on.

    Raises:
        ConfigError: an unknown name.
        KernelUnavailableError: "metal" or "cuda" where mlx's default device is none.

    """
    if name not in BACKENDS:
        raise ConfigError(f"backend {name!r} is unknown; valid are {', '.join(BACKENDS)}.")
    if name in ("metal", "cuda") and build.gpu_backend() != name:
        raise KernelUnavailableError(
            f"backend {name!r} was asked for; mlx's default device here is {mx.default_device()}, with "
            f"{build.gpu_backend() or 'no GPU'}. Use auto or reference."
        )
    _state.choice, _state.failure = name, None


@contextmanager
def using(name: str) -> Iterator[None]:
    """Take an implementation until the context ends.

    Raises:
        ConfigError, KernelUnavailableError: as `choose`.

    """
    before = _State(_state.choice, _state.failure)
    choose(name)
    try:
        yield
    finally:
        _state.choice, _state.failure = before.choice, before.failure


def current() -> str:
    """What computes now: "metal", "cuda" or "reference"."""
    if _state.choice in ("metal", "cuda"):
        return _state.choice
    return "reference" if _state.choice == "reference" or _state.failure else build.gpu_backend() or "reference"


def describe() -> str:
    """What computes now and why, in a few words."""
    if current() != "reference":
        return f"{current()} kernels"
    if _state.failure:
        return f"mlx's own operations, because a kernel failed: {_state.failure}"
    return f"mlx's own operations ({'chosen' if _state.choice == 'ops' else 'no GPU'})"


def call(
    gpu: Callable[..., _Result],
    ref: Callable[..., _Result],
    *arguments: object,
    check: Callable[[], None] = lambda: None,
    **options: object,
) -> _Result:
    """The result of `gpu`, or of `ref` where kernels are not chosen, not there, or `check` says that they cannot.

    Raises:
        KernelUnavailableError: "metal" or "cuda" was chosen and the kernel cannot do it.

    """
    if current() == "reference":
        return ref(*arguments, **options)
    try:
        check()
    except KernelUnavailableError as error:  # this case only
        _fall_back(error)
        return ref(*arguments, **options)
    try:
        return gpu(*arguments, **options)
    except KernelUnavailableError as error:
        _fall_back(error)
        _state.failure = str(error)
        return ref(*arguments, **options)


def _fall_back(error: KernelUnavailableError) -> None:
    """Warn that mlx's operations serve; raise where that was ruled out."""
    if _state.choice != "auto":
        raise error
    warnings.warn(
        f"{str(error).rstrip('.')}. mlx's own operations serve instead, which is slow.",
        KernelFallbackWarning,
        stacklevel=3,
    )
