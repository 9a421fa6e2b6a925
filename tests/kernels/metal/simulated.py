"""Kernels of mlx_tq on the simulator instead of a GPU."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import mlx.core as mx

from metal_sim.capture import capture
from metal_sim.run import Counters, simulate
from mlx_tq.kernels import backend, build

ORDERS = (0, 1, 7)


@contextmanager
def simulated(
    *, order: int = 0, sanitize: bool = False, edit: Callable[[str], str] = lambda text: text
) -> Iterator[list[Counters]]:
    """The simulator is the GPU meanwhile, and is chosen; yields the counters of each call."""
    counters: list[Counters] = []

    def run(kernel: build.Kernel, constants: build.Constants, **call: Any) -> list[Any]:
        if kernel.sources:  # mlx copies for it what is not contiguous
            call["inputs"] = [mx.contiguous(array) for array in call["inputs"]]
        result = simulate(build.built(kernel, "metal", constants), **call, order=order, sanitize=sanitize, edit=edit)
        counters.append(result.counters)
        return result.outputs

    with (
        mock.patch.object(build, "run", run),
        mock.patch.object(build, "backend", return_value="metal"),
        backend.using("metal"),
    ):
        yield counters


@contextmanager
def captured() -> Iterator[dict[str, str]]:
    """Yields the texts of the kernels called meanwhile, by name; their outputs are zeros."""
    texts: dict[str, str] = {}

    def run(kernel: build.Kernel, *, inputs: list[mx.array], constants: build.Constants, **call: Any) -> list[mx.array]:
        texts[kernel.name] = capture(build.built.__wrapped__(kernel, "metal", constants), list(inputs), **call)
        return [mx.zeros(*made) for made in zip(call["output_shapes"], call["output_dtypes"], strict=True)]

    with mock.patch.object(build, "run", run):
        yield texts
