"""Kernels of mlx_tq on the simulator instead of a GPU."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import mlx.core as mx
from metal_sim.run import Counters, simulate

from mlx_tq.kernels import build, impl

ORDERS = (0, 1, 7)


@contextmanager
def simulated(
    *, order: int = 0, sanitize: bool = False, edit: Callable[[str], str] = lambda text: text
) -> Iterator[list[Counters]]:
    """The simulator is the GPU meanwhile, and is chosen; yields the counters of each call."""
    counters: list[Counters] = []

    def run(kernel: build.Kernel, constants: build.Constants, **call: Any) -> list[Any]:
        result = simulate(build.built(kernel, "metal", constants), **call, order=order, sanitize=sanitize, edit=edit)
        counters.append(result.counters)
        return result.outputs

    with (
        mock.patch.object(build, "run", run),
        mock.patch.object(build, "backend", return_value="metal"),
        impl.using("metal"),
    ):
        yield counters


def in_all_orders(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel's wrapper on the simulator, once in each order of threads: its results must be the same bit for bit."""

    def solve(*arguments: Any, **options: Any) -> Any:
        found = []
        for order in ORDERS:
            with simulated(order=order):
                found.append(kernel(*arguments, **options))
        assert all(_same(result, found[0]) for result in found)
        return found[0]

    return solve


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, mx.array):
        return mx.array_equal(a, b, equal_nan=a.dtype in (mx.float16, mx.bfloat16, mx.float32)).item()
    return all(_same(*pair) for pair in zip(a, b, strict=True))
