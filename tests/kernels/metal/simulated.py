"""Kernels of mlx_tq on the simulator instead of a GPU."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import mlx.core as mx
from metal_sim.run import Counters, simulate

from mlx_tq.kernels import build, impl, phases
from mlx_tq.kernels.attend import _attend_gpu
from mlx_tq.kernels.phases import Phases

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


def attend_in_all_orders(short: int) -> Callable[..., mx.array]:
    """Attention on the simulator, once in each order of threads: the result must be the same bit for bit.

    Up to `short` tokens in one kernel, of more in two.
    """

    def solve(*arguments: Any, **options: Any) -> mx.array:
        found = []
        for order in ORDERS:
            with simulated(order=order), phases.using(Phases(short=short)):
                found.append(_attend_gpu(*arguments, **options))
        assert all(mx.array_equal(out, found[0]) for out in found)
        return found[0]

    return solve
