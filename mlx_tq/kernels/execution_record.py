"""Records what computes attention in this process: kernels, reference implementations, or mlx's own attention."""

import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")

PREFILL, SHORT_PASSES, DECODE = PHASES = ("prefill", "short passes", "decode")


class _Thread(threading.local):
    phase: str | None = None


_thread = _Thread()
_names: dict[str, dict[str, None]] = {phase: {} for phase in PHASES}  # in the order in which they first ran


def run_in_phase(
    phase: str, call: Callable[_Parameters, _Result], *args: _Parameters.args, **kwargs: _Parameters.kwargs
) -> _Result:
    """Call a function, and record what runs meanwhile in this thread under a phase."""
    outer, _thread.phase = _thread.phase, phase
    try:
        return call(*args, **kwargs)
    finally:
        _thread.phase = outer


def record(name: str) -> None:
    if _thread.phase is not None:
        _names[_thread.phase][name] = None


def recorded() -> dict[str, list[str]]:
    """Return what has run by phase, without phases in which nothing did."""
    return {phase: list(names) for phase, names in _names.items() if names}


def clear() -> None:
    for names in _names.values():
        names.clear()
