"""Builds kernels when they are first called, and runs them on the GPU."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import mlx.core as mx

from mlx_tq.errors import KernelUnavailableError
from mlx_tq.kernels.source import text

Template = tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class Kernel:
    """A kernel by name.

    Attributes:
        name: of its file in metal/.
        inputs, outputs: names of its arrays, as the text uses them.

    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def backend() -> str | None:
    """What runs kernels here: "metal", "cuda" or None."""
    if mx.default_device() != mx.gpu:
        return None
    return "metal" if mx.metal.is_available() else "cuda" if mx.cuda.is_available() else None


@cache
def built(kernel: Kernel, where: str) -> Callable[..., list[mx.array]]:
    """The object of `mx.fast` for a kernel; its text is compiled when it first runs. Inputs are never copied."""
    make: Any = mx.fast.metal_kernel if where == "metal" else mx.fast.cuda_kernel
    header, source = text(kernel.name)
    made: Callable[..., list[mx.array]] = make(
        name=f"mlx_tq_{kernel.name}",
        input_names=list(kernel.inputs),
        output_names=list(kernel.outputs),
        header=header,
        source=source,
        ensure_row_contiguous=False,
    )
    return made


# Kernels and template values that have run: the compiler has accepted them.
_proven: set[tuple[Kernel, Template]] = set()


def run(
    kernel: Kernel,
    *,
    inputs: Sequence[mx.array],
    template: Template,
    grid: tuple[int, int, int],
    threadgroup: tuple[int, int, int],
    output_shapes: Sequence[tuple[int, ...]],
    output_dtypes: Sequence[mx.Dtype],
) -> list[mx.array]:
    """Call a kernel; the arguments are those of `mx.fast.metal_kernel`'s objects.

    The first call with given template values waits for its result, because that is when mlx compiles the text.

    Raises:
        KernelUnavailableError: there is no GPU, or its compiler refuses the text; with the compiler's message.

    """
    where = backend()
    if where is None:
        raise KernelUnavailableError(
            f"kernel {kernel.name!r} needs a GPU and mlx's default device is {mx.default_device()}; use mlx_tq's own "
            "operations there."
        )
    try:
        outputs = built(kernel, where)(
            inputs=list(inputs),
            template=list(template),
            grid=grid,
            threadgroup=threadgroup,
            output_shapes=list(output_shapes),
            output_dtypes=list(output_dtypes),
        )
        if (kernel, template) not in _proven and _evaluated(outputs):
            _proven.add((kernel, template))
    except (RuntimeError, ValueError) as error:
        raise KernelUnavailableError(f"kernel {kernel.name!r} cannot run on {where}: {error}") from error
    return outputs


def _evaluated(arrays: list[mx.array]) -> bool:
    """Wait for arrays; False inside `mx.compile` and its like, where there is nothing to wait for."""
    try:
        mx.eval(arrays)
    except ValueError:  # from the compiler of a kernel comes a RuntimeError
        return False
    return True
