"""Builds kernels when they are first called, and runs them on the GPU."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import mlx.core as mx

from mlx_tq.errors import KernelUnavailableError
from mlx_tq.kernels.source import text

# What a kernel's text leaves open, by name: each set of values is compiled by itself.
Constant = int | bool | mx.Dtype
Constants = tuple[tuple[str, Constant], ...]


@dataclass(frozen=True)
class Kernel:
    """A kernel by name, built when it is first called.

    Attributes:
        name: of its file in metal/.
        inputs, outputs: names of its arrays, as the text uses them.
        sources: names of further inputs, of which there is one array for each of its constant SOURCES, all of the first
            name, then all of the second. The text takes array number n, or the only one, by TQ_SELECT(name, n). Such a
            kernel reads contiguous arrays, and others are copied for it.

    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    sources: tuple[str, ...] = ()

    def with_more(self, *, inputs: tuple[str, ...] = (), sources: tuple[str, ...] = ()) -> "Kernel":
        """The same text with further inputs and sources, which its part for normalized keys uses."""
        return replace(self, inputs=self.inputs + inputs, sources=self.sources + sources)

    def names(self, sources: int) -> list[str]:
        """Of all inputs."""
        return [*self.inputs, *(f"{name}_{i}" for name in self.sources for i in range(sources))]


def gpu_backend() -> str | None:
    """What runs kernels here: "metal", "cuda" or None."""
    if mx.default_device() != mx.gpu:
        return None
    return "metal" if mx.metal.is_available() else "cuda" if mx.cuda.is_available() else None


@cache
def built(kernel: Kernel, where: str, constants: Constants) -> Callable[..., list[mx.array]]:
    """The object of `mx.fast` for a kernel with these constants; its text is compiled when it first runs.

    The constants stand in the text, and not in `template`, which mlx takes apart at every call: twenty values take
    2 us. As mlx keeps one text for a name, they are in the name too.
    """
    make: Any = mx.fast.metal_kernel if where == "metal" else mx.fast.cuda_kernel
    known = dict(constants)
    flags = {"normalized": ("NORMALIZED",), "trellis": ("KEY_TRELLIS", "VALUE_TRELLIS")}
    header, body = text(
        kernel.name, where, **{flag: any(known.get(name) for name in names) for flag, names in flags.items()}
    )
    sources = known.get("SOURCES", 1)
    assert isinstance(sources, int)  # noqa: S101 - tells the type checker
    made: Callable[..., list[mx.array]] = make(
        name="_".join(["mlx_tq", kernel.name, *(_written(value, "plain") for _, value in constants)]),
        input_names=kernel.names(sources),
        output_names=list(kernel.outputs),
        header=header,
        source="".join(_declared(name, value, where) for name, value in constants) + _selected(body, sources),
        ensure_row_contiguous=bool(kernel.sources),
    )
    return made


_SELECT = re.compile(r"TQ_SELECT\((\w+), (\w+)\)")


def _selected(body: str, sources: int) -> str:
    """The text with expressions in place of TQ_SELECT."""

    def chosen(match: re.Match[str]) -> str:
        name, number = match.groups()
        others = [f"{number} == {i} ? {name}_{i} : " for i in range(sources - 1)]
        return f"({''.join(others)}{name}_{sources - 1})"

    return _SELECT.sub(chosen, body)


_TYPES = {
    "metal": {mx.float16: "float16_t", mx.bfloat16: "bfloat16_t", mx.float32: "float"},
    "cuda": {mx.float16: "__half", mx.bfloat16: "__nv_bfloat16", mx.float32: "float"},
    "plain": {mx.float16: "float16", mx.bfloat16: "bfloat16", mx.float32: "float32"},
}


def _written(value: Constant, where: str) -> str:
    return str(int(value)) if isinstance(value, int) else _TYPES[where][value]


def _declared(name: str, value: Constant, where: str) -> str:
    written = _written(value, where)
    if isinstance(value, mx.Dtype):
        return f"using {name} = {written};\n"
    return f"constexpr {'bool' if isinstance(value, bool) else 'int'} {name} = {written};\n"


# Kernels that have run: the compiler has accepted them.
_proven: set[Callable[..., list[mx.array]]] = set()


def run(
    kernel: Kernel,
    *,
    inputs: Sequence[mx.array],
    constants: Constants,
    grid: tuple[int, int, int],
    threadgroup: tuple[int, int, int],
    output_shapes: Sequence[tuple[int, ...]],
    output_dtypes: Sequence[mx.Dtype],
) -> list[mx.array]:
    """Call a kernel; the arguments but `constants` are those of `mx.fast.metal_kernel`'s objects.

    The first call with given constants waits for its result, because that is when mlx compiles the text.

    Raises:
        KernelUnavailableError: there is no GPU, or its compiler refuses the text; with the compiler's message.

    """
    where = gpu_backend()
    if where is None:
        raise KernelUnavailableError(
            f"kernel {kernel.name!r} needs a GPU and mlx's default device is {mx.default_device()}; use mlx_tq's own "
            "operations there."
        )
    try:
        made = built(kernel, where, constants)
        outputs = made(
            inputs=list(inputs),
            grid=grid,
            threadgroup=threadgroup,
            output_shapes=list(output_shapes),
            output_dtypes=list(output_dtypes),
        )
        if made not in _proven and _evaluated(outputs):
            _proven.add(made)
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
