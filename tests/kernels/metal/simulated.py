"""Runs the kernels of mlx_tq on the simulator in place of a GPU."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from math import prod
from typing import Any, NamedTuple, TypeVar
from unittest import mock

import mlx.core as mx

from metal_sim.capture import capture
from metal_sim.run import Counters, simulate
from mlx_tq.kernels import backend, gpu
from mlx_tq.kernels.gpu import CompiledKernel, Constants, Kernel

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
    *,
    order: int = 0,
    sanitize: bool = False,
    edit: Callable[[str], str] = lambda text: text,
    max_threads: int = 1024,
) -> Iterator[list[Counters]]:
    """Use the simulator as the GPU, and yield the counters of each call; the arguments are those of `simulate`.

    With more than `max_threads` in a threadgroup, a call raises the error of mlx.
    """
    counters: list[Counters] = []
    compile_kernel = gpu.compile_kernel

    @cache
    def compile_simulated(kernel: Kernel, device: str, constants: Constants) -> CompiledKernel:
        compiled = compile_kernel(kernel, device, constants)

        def call(*, inputs: list[mx.array], **call: Any) -> list[mx.array]:
            if (threads := prod(call["threadgroup"])) > max_threads:
                raise ValueError(
                    f"Thread group size ({threads}) is greater than  the maximum allowed threads per threadgroup "
                    f"({max_threads})."
                )
            if kernel.sources:  # mlx copies arrays that are not contiguous
                inputs = [mx.contiguous(array) for array in inputs]
            result = simulate(compiled, inputs=inputs, **call, order=order, sanitize=sanitize, edit=edit)
            counters.append(result.counters)
            return result.outputs

        return CompiledKernel(call)

    with (
        mock.patch.object(gpu, "gpu_backend", return_value="metal"),
        mock.patch.object(gpu, "compile_kernel", compile_simulated),
        backend.using("metal"),
    ):
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
        kernels[kernel.name] = Captured(text, prod(call["threadgroup"]))
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
