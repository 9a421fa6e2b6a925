"""Run a kernel's text on arrays."""

import ctypes
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from metal_sim.build import build
from metal_sim.capture import capture
from metal_sim.translate import Parameter, parameters, translate

MAX_BUFFERS = 32
ERROR_BYTES = 8192
OPERATIONS = (
    "collective",
    "barrier",
    "add",
    "multiply",
    "fma",
    "divide",
    "transcendental",
    "compare",
    "convert",
    "integer",
    "shared",
)


class SimulationError(Exception):
    """A kernel did what Metal leaves undefined, or a sanitizer found something."""


class _Buffer(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("bytes", ctypes.c_uint64),
        ("origin", ctypes.c_uint64),
        ("loaded", ctypes.c_uint64),
        ("stored", ctypes.c_uint64),
    )


class _Dispatch(ctypes.Structure):
    """As in cpp/dispatch.h."""

    _fields_ = (
        ("buffers", _Buffer * MAX_BUFFERS),
        ("operations", ctypes.c_uint64 * len(OPERATIONS)),
        ("order", ctypes.c_uint64),
        ("count", ctypes.c_uint32),
        ("grid", ctypes.c_uint32 * 3),
        ("threadgroup", ctypes.c_uint32 * 3),
        ("padding", ctypes.c_uint32),
        ("error", ctypes.c_char * ERROR_BYTES),
    )


class Counters(NamedTuple):
    """What a dispatch cost: bytes by buffer name, lane operations by kind."""

    loaded: dict[str, int]
    stored: dict[str, int]
    operations: dict[str, int]


class Result(NamedTuple):
    """Outputs and their cost."""

    outputs: list[mx.array]
    counters: Counters


def _as_numpy(array: mx.array) -> np.ndarray:
    """The array's own memory, with its strides; bfloat16, which NumPy lacks, as uint16."""
    mx.eval(array)
    return np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array, copy=False)


def _as_mlx(array: np.ndarray, dtype: mx.Dtype) -> mx.array:
    return mx.array(array).view(mx.bfloat16) if dtype == mx.bfloat16 else mx.array(array)


def _numpy_dtype(dtype: mx.Dtype) -> np.dtype:
    return _as_numpy(mx.zeros(1, dtype)).dtype


def _named_arrays(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """All that mlx may pass by name: each array, its shape, its strides in elements, and its rank."""
    found = dict(arrays)
    for name, array in arrays.items():
        found[f"{name}_shape"] = np.array(array.shape, np.int32)
        found[f"{name}_strides"] = np.array(array.strides, np.int64) // array.itemsize
        found[f"{name}_ndim"] = np.array(array.ndim, np.int32)
    return found


def _fill(buffer: _Buffer, array: np.ndarray) -> None:
    low, high = np.lib.array_utils.byte_bounds(array)
    buffer.data, buffer.bytes, buffer.origin = low, high - low, array.ctypes.data - low


@lru_cache(maxsize=256)
def _library(path: Path) -> Any:
    return ctypes.CDLL(str(path)).tqsim_dispatch


def _run_sanitized(program: Path, dispatch: _Dispatch) -> None:
    """Run in a program of its own; its results replace what the dispatch and its buffers hold."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "dispatch")
        used = dispatch.buffers[: dispatch.count]
        file.write_bytes(bytes(dispatch) + b"".join(ctypes.string_at(b.data, b.bytes) for b in used))
        environment = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0"}
        environment.pop("LD_PRELOAD", None)  # the sanitizers want no library before theirs
        done = subprocess.run([program, file], capture_output=True, text=True, env=environment, check=False)
        if done.returncode:
            found = re.search(r"ERROR: AddressSanitizer: .*|runtime error: .*", done.stderr)
            raise SimulationError(found.group(0) if found else done.stderr)
        content = file.read_bytes()
    places = [(b.data, b.bytes) for b in used]
    ctypes.memmove(ctypes.byref(dispatch), content, ctypes.sizeof(dispatch))
    start = ctypes.sizeof(dispatch)
    for place, size in places:
        ctypes.memmove(place, content[start : start + size], size)
        start += size


def _quote(message: str, text: str) -> str:
    """A report with the line of the text that it names."""
    found = re.search(r"line (\d+)", message)
    lines = text.splitlines()
    if not found or int(found.group(1)) > len(lines):
        return message
    return f"{message}\n  line {found.group(1)}: {lines[int(found.group(1)) - 1].strip()}"


def simulate(
    kernel: Callable[..., Any],
    *,
    inputs: Sequence[mx.array],
    output_shapes: Sequence[tuple[int, ...]],
    output_dtypes: Sequence[mx.Dtype],
    grid: tuple[int, int, int],
    threadgroup: tuple[int, int, int],
    template: Sequence[tuple[str, Any]] = (),
    order: int = 0,
    sanitize: bool = False,
    edit: Callable[[str], str] = lambda text: text,
) -> Result:
    """Call an `mx.fast.metal_kernel` as on a Mac.

    Args:
        kernel: what `mx.fast.metal_kernel` returned.
        inputs: arrays, whose strides the kernel sees.
        output_shapes: of what it returns.
        output_dtypes: theirs.
        grid: of threads.
        threadgroup: how many of them work together.
        template: values that mlx writes into the text.
        order: in which threads run: 0 by index, 1 the reverse, others shuffled.
        sanitize: under the address and undefined-behaviour sanitizers.
        edit: changes the generated text, to see whether a mistake in it is found.

    Raises:
        SimulationError: divergent collectives, a deadlock, a race, an access out of bounds, and the like.

    """
    call = {"output_shapes": list(output_shapes), "output_dtypes": list(output_dtypes), "template": list(template)}
    text = edit(capture(kernel, list(inputs), grid=grid, threadgroup=threadgroup, **call))
    declared = _buffers(text)
    given = _split(declared, inputs, output_shapes, output_dtypes)
    counters = run_text(text, given, grid=grid, threadgroup=threadgroup, order=order, sanitize=sanitize)
    names = [p.name for p in declared[-len(output_dtypes) :]]
    outputs = [_as_mlx(given[name], dtype) for name, dtype in zip(names, output_dtypes, strict=True)]
    return Result(outputs, counters)


def run_text(
    text: str,
    arrays: dict[str, np.ndarray],
    *,
    grid: tuple[int, int, int],
    threadgroup: tuple[int, int, int],
    order: int = 0,
    sanitize: bool = False,
) -> Counters:
    """Run a kernel in Metal on arrays by the names of its buffers, in place; the rest as in `simulate`."""
    declared = _buffers(text)
    dispatch = _Dispatch(order=order, count=len(declared), grid=grid, threadgroup=threadgroup)
    for parameter in declared:
        _fill(dispatch.buffers[parameter.number], arrays[parameter.name])
    built = build(translate(text), sanitize=sanitize)
    if sanitize:
        _run_sanitized(built, dispatch)
    else:
        _library(built)(ctypes.byref(dispatch))
    if dispatch.error:
        raise SimulationError(_quote(dispatch.error.decode(), text))
    return _counters(dispatch, [p.name for p in declared])


def _buffers(text: str) -> list[Parameter]:
    return [p for p in parameters(text) if p.number is not None]


def _split(
    declared: list[Parameter], inputs: Sequence[mx.array], shapes: Sequence[tuple[int, ...]], dtypes: Sequence[mx.Dtype]
) -> dict[str, np.ndarray]:
    """The arrays of a kernel's buffers by name. Outputs start with every bit set, a NaN where they are floats."""
    outputs = [p.name for p in declared[-len(shapes) :]]
    extras = re.compile(r"_(?:shape|strides|ndim)$")
    names = [p.name for p in declared if p.name not in outputs and not extras.search(p.name)]
    arrays = _named_arrays(dict(zip(names, map(_as_numpy, inputs), strict=True)))
    for name, shape, dtype in zip(outputs, shapes, dtypes, strict=True):
        arrays[name] = np.empty(shape, _numpy_dtype(dtype))
        arrays[name].view(np.uint8)[...] = 0xFF
    return arrays


def _counters(dispatch: _Dispatch, names: list[str]) -> Counters:
    used = dict(zip(names, dispatch.buffers[: dispatch.count], strict=True))
    return Counters(
        loaded={name: buffer.loaded for name, buffer in used.items()},
        stored={name: buffer.stored for name, buffer in used.items()},
        operations=dict(zip(OPERATIONS, dispatch.operations, strict=True)),
    )
