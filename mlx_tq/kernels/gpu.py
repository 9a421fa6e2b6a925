"""Compiles the kernels of metal/ when they are first called, and runs them on the GPU."""

import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import mlx.core as mx

from mlx_tq.errors import KernelUnavailableError
from mlx_tq.kernels.execution_record import record

# Values that a kernel's text leaves open, by name. Each set of values is compiled separately.
Constant = int | bool | mx.Dtype
Constants = tuple[tuple[str, Constant], ...]

_COMMENT = re.compile(r"[ \t]*//.*")
_INDENT = re.compile(r"\n\s+")
# tq_compat.h has the part for CUDA, then the one for Metal.
_DIALECTS = re.compile(r"#if defined\(__CUDACC__\).*?\n(.*?)\n#else\n(.*?)\n#endif\n", re.S)
# Text for normalized keys, trellis codes or keys of sorted dims, and its alternative.
_OPTIONAL = re.compile(r"#if TQ_(NORMALIZED|TRELLIS|SORTED)\n(.*?)(?:#else\n(.*?))?#endif\n", re.S)
_INCLUDE = re.compile(r'#include "(\w+\.(?:h|inc))"\n')
_SELECT = re.compile(r"TQ_SELECT\((\w+), (\w+)\)")
# Of two errors that mlx raises when it evaluates a kernel: too many threads, and a call inside of `mx.compile`.
THREAD_LIMIT = re.compile(r"maximum allowed threads per threadgroup \((\d+)\)")
_TRACING = "function transformations"
_TYPE_NAMES = {
    "metal": {mx.float16: "float16_t", mx.bfloat16: "bfloat16_t", mx.float32: "float"},
    "cuda": {mx.float16: "__half", mx.bfloat16: "__nv_bfloat16", mx.float32: "float"},
    "plain": {mx.float16: "float16", mx.bfloat16: "bfloat16", mx.float32: "float32"},
}

_Result = TypeVar("_Result")


def simdgroup_grid(count: int, simdgroups: int, others: int = 1) -> dict[str, tuple[int, int, int]]:
    """Return grid and threadgroup for `count` simdgroups, in threadgroups of `simdgroups`, times `others`.

    They lie along x, for CUDA allows no more than 65,535 threadgroups along y and z.
    """
    threads = 32 * simdgroups
    return {"grid": (threads * -(-count // simdgroups), others, 1), "threadgroup": (threads, 1, 1)}


class UnsupportedByKernelError(KernelUnavailableError):
    """Kernels do not have this format, rotation, head size or dtype; other calls can still use them."""


class ThreadLimitError(KernelUnavailableError):
    """A threadgroup has more threads than the GPU runs; the limit depends on the chip and the kernel."""


def fit_simdgroups(most: int, launch: Callable[[int], _Result]) -> _Result:
    """Call `launch` with a number of simdgroups per threadgroup, halved while it exceeds the GPU's thread limit."""
    while True:
        try:
            return launch(most)
        except ThreadLimitError:
            if most == 1:
                raise
            most //= 2


class KernelText(NamedTuple):
    header: str  # helper functions
    body: str  # statements of the kernel's function


@dataclass(frozen=True)
class Kernel:
    """A file of metal/ and the names of its arrays.

    The text with the constant NORMALIZED has further arrays, `normalized`, and that with KEY_SORTED has `key_groups`.
    A kernel with `sources` gets SOURCES arrays (a constant) for each name in `sources` and of these arrays;
    TQ_SELECT(name, n) in the text selects one of them. mlx copies those that are not contiguous.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    sources: tuple[str, ...] = ()
    normalized: tuple[str, ...] = ()

    def input_names(self, constants: Constants) -> list[str]:
        values: dict[str, Any] = dict(constants)
        of_keys = ["key_groups"] if values.get("KEY_SORTED") else []
        of_keys += self.normalized if values.get("NORMALIZED") else ()
        levels = ["trellis_levels"] if _has_trellis(values) else []
        if not self.sources:
            return [*self.inputs, *of_keys, *levels]
        sources = [f"{name}_{i}" for name in (*self.sources, *of_keys) for i in range(values["SOURCES"])]
        return [*self.inputs, *levels, *sources]

    def run(self, *, inputs: list[mx.array], constants: Constants, **call: Any) -> list[mx.array]:
        """Run the kernel; its first call with given constants waits for the compiler and the result.

        Inputs are in the order of `input_names`; `call` has the other arguments of the objects of `mx.fast`.
        """
        device = gpu_backend()
        if device is None:
            raise KernelUnavailableError(
                f"kernel {self.name!r} needs a GPU and mlx's default device is {mx.default_device()}. "
                "Use backend auto or reference."
            )
        threads = math.prod(call["threadgroup"])
        try:
            compiled = compile_kernel(self, device, constants)
            compiled.check(self.name, threads)
            outputs = compiled(inputs=inputs, **call)
            compiled.wait_once(outputs)
        except (RuntimeError, ValueError) as error:
            if limit := THREAD_LIMIT.search(str(error)):
                compiled.thread_limit = int(limit.group(1))
                thread_limits[self.name] = min(compiled.thread_limit, thread_limits.get(self.name, threads))
                compiled.check(self.name, threads)
            raise KernelUnavailableError(f"kernel {self.name!r} cannot run on {device}: {error}") from error
        record(self.name)
        return outputs


class CompiledKernel:
    """A kernel with given constants: the function of mlx, and what its first call showed."""

    def __init__(self, call: Callable[..., list[mx.array]]) -> None:
        self._call = call
        self._has_run = False  # the GPU's compiler has accepted the text
        self.thread_limit: int | None = None  # of a threadgroup, where a call exceeded it

    def __call__(self, **call: Any) -> list[mx.array]:
        return self._call(**call)

    def check(self, name: str, threads: int) -> None:
        if self.thread_limit is not None and threads > self.thread_limit:
            raise ThreadLimitError(
                f"kernel {name!r} has {threads} threads per threadgroup, and the GPU allows {self.thread_limit}."
            )

    def wait_once(self, outputs: list[mx.array]) -> None:
        """Wait for the first outputs, except inside of `mx.compile`, where nothing can wait."""
        if self._has_run:
            return
        try:
            mx.eval(outputs)
            self._has_run = True
        except ValueError as error:
            if _TRACING not in str(error):
                raise


# Threads per threadgroup that the GPU allows, by kernel, where a call exceeded them.
thread_limits: dict[str, int] = {}


def gpu_backend() -> str | None:
    """Return "metal" or "cuda", whichever runs kernels on mlx's default device, or None on a CPU."""
    if mx.default_device() != mx.gpu:
        return None
    return "metal" if mx.metal.is_available() else "cuda" if mx.cuda.is_available() else None


def usable_memory() -> int:
    """Return the bytes that arrays may take: those that the GPU recommends or has free, else this machine's."""
    info = mx.device_info()
    for name in ("max_recommended_working_set_size", "free_memory", "total_memory"):
        if name in info:
            return int(info[name])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@cache
def compile_kernel(kernel: Kernel, device: str, constants: Constants) -> CompiledKernel:
    """Make the function of `mx.fast` for a kernel; the GPU compiles its text at the first call.

    Constants stand in the text, for mlx would parse `template` values at every call, and in the name, for mlx keeps one
    text per name.
    """
    values: dict[str, Any] = dict(constants)
    parts = {
        "normalized": bool(values.get("NORMALIZED")),
        "trellis": _has_trellis(values),
        "sorted_keys": bool(values.get("KEY_SORTED")),
    }
    header, body = kernel_text(kernel.name, device, **parts)
    last = values.get("SOURCES", 1) - 1

    def select(match: re.Match[str]) -> str:
        name, number = match.groups()
        choices = [f"{number} == {i} ? {name}_{i} : " for i in range(last)]
        return f"({''.join(choices)}{name}_{last})"

    declarations = [
        f"using {name} = {_literal(value, device)};\n"
        if isinstance(value, mx.Dtype)
        else f"constexpr {type(value).__name__} {name} = {_literal(value, device)};\n"
        for name, value in constants
    ]
    make: Any = mx.fast.metal_kernel if device == "metal" else mx.fast.cuda_kernel
    call = make(
        name="_".join(["mlx_tq", kernel.name, *(_literal(value, "plain") for value in values.values())]),
        input_names=kernel.input_names(constants),
        output_names=list(kernel.outputs),
        header=header,
        source="".join(declarations) + _SELECT.sub(select, body),
        ensure_row_contiguous=bool(kernel.sources),
    )
    return CompiledKernel(call)


def _has_trellis(values: dict[str, Any]) -> bool:
    return bool(values.get("KEY_TRELLIS") or values.get("VALUE_TRELLIS"))


def _literal(value: Constant, device: str) -> str:
    return str(int(value)) if isinstance(value, int) else _TYPE_NAMES[device][value]


def kernels_folder() -> Traversable:
    """Return metal/, from the wheel or from a checkout."""
    checkout = Path(__file__).parents[2] / "metal"
    for folder in (files("mlx_tq") / "metal", checkout):
        if (folder / "tq_compat.h").is_file():
            return folder
    raise KernelUnavailableError(f"the kernels' text is missing: {checkout} has no kernels. Install mlx_tq again.")


@cache
def kernel_text(
    name: str, device: str = "metal", *, normalized: bool = False, trellis: bool = False, sorted_keys: bool = False
) -> KernelText:
    """Return the text of metal/`name`.metal with its includes, each once, and its optional parts resolved.

    Comments, indents, empty lines and the other dialect are dropped: mlx copies and compares the text at every call,
    and searches all of it for names.
    """
    included: set[str] = set()
    enabled = {"NORMALIZED": normalized, "TRELLIS": trellis, "SORTED": sorted_keys}

    def include(file: str) -> str:
        if file in included:
            return ""
        included.add(file)
        text = (kernels_folder() / file).read_text(encoding="utf-8")
        text = _OPTIONAL.sub(lambda match: match.group(2 if enabled[match.group(1)] else 3) or "", text)
        return _INCLUDE.sub(lambda match: include(match.group(1)), text)

    text = _DIALECTS.sub(lambda match: match.group(1 if device == "cuda" else 2), include(f"{name}.metal"))
    header, body = text.split("//// body\n")
    return KernelText(*(_INDENT.sub("\n", _COMMENT.sub("", part)) for part in (header, body)))
