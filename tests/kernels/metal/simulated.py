"""Runs the kernels of mlx_tq on the simulator in place of a GPU."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar
from unittest import mock

import mlx.core as mx

from metal_sim.capture import capture
from metal_sim.run import Counters, simulate
from mlx_tq.kernels import backend, gpu
from mlx_tq.kernels.gpu import Constants, Kernel

ORDERS = (0, 1, 7)

Result = TypeVar("Result")


@contextmanager
def launching(run: Callable[..., list[mx.array]], device: str = "metal") -> Iterator[None]:
    """Find a GPU, and call `run` in place of `Kernel.run`."""
    device_patch = mock.patch.object(gpu, "gpu_backend", return_value=device)
    with mock.patch.object(Kernel, "run", run), device_patch, backend.using(device):
        yield


@contextmanager
def simulated(
    *, order: int = 0, sanitize: bool = False, edit: Callable[[str], str] = lambda text: text
) -> Iterator[list[Counters]]:
    """Use the simulator as the GPU, and yield the counters of each call; the arguments are those of `simulate`."""
    counters: list[Counters] = []

    def run(kernel: Kernel, *, inputs: list[mx.array], constants: Constants, **call: Any) -> list[mx.array]:
        if kernel.sources:  # mlx copies arrays that are not contiguous
            inputs = [mx.contiguous(array) for array in inputs]
        compiled = gpu.compile_kernel(kernel, "metal", constants)
        result = simulate(compiled, inputs=inputs, **call, order=order, sanitize=sanitize, edit=edit)
        counters.append(result.counters)
        return result.outputs

    with launching(run):
        yield counters


class Captured(NamedTuple):
    text: str
    threads: int  # of a threadgroup


@contextmanager
def captured(dialect: str = "metal") -> Iterator[dict[str, Captured]]:
    """Use a GPU whose outputs are zeros, and yield the kernels called, by name, with the helpers of a dialect."""
    kernels: dict[str, Captured] = {}
    kernel_text = gpu.kernel_text

    def run(kernel: Kernel, *, inputs: list[mx.array], constants: Constants, **call: Any) -> list[mx.array]:
        text = capture(gpu.compile_kernel.__wrapped__(kernel, "metal", constants), inputs, **call)
        kernels[kernel.name] = Captured(text, math.prod(call["threadgroup"]))
        return zeros(**call)

    def text(name: str, _device: str, **parts: bool) -> gpu.KernelText:
        return kernel_text(name, dialect, **parts)

    with launching(run, dialect), mock.patch.object(gpu, "kernel_text", text):
        yield kernels


def zeros(output_shapes: list[tuple[int, ...]], output_dtypes: list[mx.Dtype], **call: Any) -> list[mx.array]:
    return [mx.zeros(*output) for output in zip(output_shapes, output_dtypes, strict=True)]


def reference(operation: Callable[..., Result], *arguments: Any, **options: Any) -> Result:
    """Call an operation's reference implementation."""
    with backend.using("reference"):
        return operation(*arguments, **options)
