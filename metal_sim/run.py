"""Runs a kernel's text on arrays."""

import ctypes
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from metal_sim.build import build
from metal_sim.capture import capture
from metal_sim.translate import parameters, translate

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
    "matrix",
)


class SimulationError(Exception):
    """A kernel did something that Metal leaves undefined, or a sanitizer reported an error."""


class _Buffer(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("bytes", ctypes.c_uint64),
        ("origin", ctypes.c_uint64),
        ("loaded", ctypes.c_uint64),
        ("stored", ctypes.c_uint64),
        ("fetched", ctypes.c_uint64),
    )


class _Dispatch(ctypes.Structure):
    """Mirror of the struct in cpp/dispatch.h."""

    _fields_ = (
        ("buffers", _Buffer * MAX_BUFFERS),
        ("operations", ctypes.c_uint64 * len(OPERATIONS)),
        ("order", ctypes.c_uint64),
        ("count", ctypes.c_uint32),
        ("grid", ctypes.c_uint32 * 3),
        ("threadgroup", ctypes.c_uint32 * 3),
        ("first", ctypes.c_uint32),
        ("error", ctypes.c_char * ERROR_BYTES),
    )


class Counters(NamedTuple):
    """The cost of a dispatch: bytes by buffer name, lane operations by kind."""

    loaded: dict[str, int]  # by all lanes
    fetched: dict[str, int]  # loaded, each byte once for all lanes of a threadgroup
    stored: dict[str, int]
    operations: dict[str, int]


class Result(NamedTuple):
    outputs: list[mx.array]
    counters: Counters


def _as_numpy(array: mx.array) -> np.ndarray:
    """Return the array's memory with its strides; bfloat16, which NumPy does not have, as uint16."""
    mx.eval(array)
    return np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array, copy=False)


def _as_mlx(array: np.ndarray, dtype: mx.Dtype) -> mx.array:
    return mx.array(array).view(mx.bfloat16) if dtype == mx.bfloat16 else mx.array(array)


def name_arrays(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Add what mlx may pass by name: the shape of each array, its strides in elements, and its rank."""
    named = dict(arrays)
    for name, array in arrays.items():
        named[f"{name}_shape"] = np.array(array.shape, np.int32)
        named[f"{name}_strides"] = np.array(array.strides, np.int64) // array.itemsize
        named[f"{name}_ndim"] = np.array(array.ndim, np.int32)
    return named


def _run_sanitized(program: Path, dispatch: _Dispatch) -> None:
    """Run in a separate program, and copy its results to the dispatch and its buffers."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "dispatch")
        used = dispatch.buffers[: dispatch.count]
        file.write_bytes(bytes(dispatch) + b"".join(ctypes.string_at(b.data, b.bytes) for b in used))
        environment = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0"}
        environment.pop("LD_PRELOAD", None)  # the sanitizers must be loaded first
        done = subprocess.run([program, file], capture_output=True, text=True, env=environment, check=False)
        if done.returncode:
            match = re.search(r"ERROR: AddressSanitizer: .*|runtime error: .*", done.stderr)
            raise SimulationError(match.group(0) if match else done.stderr)
        content = file.read_bytes()
    places = [(b.data, b.bytes) for b in used]
    ctypes.memmove(ctypes.byref(dispatch), content, ctypes.sizeof(dispatch))
    start = ctypes.sizeof(dispatch)
    for place, size in places:
        ctypes.memmove(place, content[start : start + size], size)
        start += size


def _quote(message: str, text: str) -> str:
    """Append the line of the text that a message names."""
    match = re.search(r"line (\d+)", message)
    lines = text.splitlines()
    if not match or int(match.group(1)) > len(lines):
        return message
    return f"{message}\n  line {match.group(1)}: {lines[int(match.group(1)) - 1].strip()}"


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
    """Call an `mx.fast.metal_kernel` as on a Mac; the kernel sees the strides of the inputs.

    Threads run in `order`: 0 by index, 1 the reverse, others shuffled. `sanitize` runs under the address and
    undefined-behavior sanitizers. `edit` changes the generated text, to test that a mistake in it is found.
    """
    call = {"output_shapes": list(output_shapes), "output_dtypes": list(output_dtypes), "template": list(template)}
    text = edit(capture(kernel, list(inputs), grid=grid, threadgroup=threadgroup, **call))
    declared = _buffers(text)
    given = _split(declared, inputs, output_shapes, output_dtypes)
    counters = run_text(text, given, grid=grid, threadgroup=threadgroup, order=order, sanitize=sanitize)
    names = [name for name, _ in declared[-len(output_dtypes) :]]
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
    first: int = 0,
) -> Counters:
    """Run a kernel in Metal on arrays by buffer name, in place; other arguments are those of `simulate`.

    Threadgroups before number `first` along x do not run.
    """
    declared = _buffers(text)
    count = max(number for _, number in declared) + 1
    dispatch = _Dispatch(order=order, count=count, grid=grid, threadgroup=threadgroup, first=first)
    for name, number in declared:
        array, buffer = arrays[name], dispatch.buffers[number]
        low, high = np.lib.array_utils.byte_bounds(array)
        buffer.data, buffer.bytes, buffer.origin = low, high - low, array.ctypes.data - low
    built = build(translate(text), sanitize=sanitize)
    if sanitize:
        _run_sanitized(built, dispatch)
    else:
        ctypes.CDLL(str(built)).tqsim_dispatch(ctypes.byref(dispatch))
    if dispatch.error:
        raise SimulationError(_quote(dispatch.error.decode(), text))
    used = {name: dispatch.buffers[number] for name, number in declared}
    return Counters(
        loaded={name: buffer.loaded for name, buffer in used.items()},
        fetched={name: buffer.fetched for name, buffer in used.items()},
        stored={name: buffer.stored for name, buffer in used.items()},
        operations=dict(zip(OPERATIONS, dispatch.operations, strict=True)),
    )


def _buffers(text: str) -> list[tuple[str, int]]:
    """Return the names and numbers of a kernel's buffers; numbers may be left out."""
    return [(p.name, p.number) for p in parameters(text) if p.number is not None]


def _split(
    declared: list[tuple[str, int]],
    inputs: Sequence[mx.array],
    shapes: Sequence[tuple[int, ...]],
    dtypes: Sequence[mx.Dtype],
) -> dict[str, np.ndarray]:
    """Return the arrays of a kernel's buffers by name. All bits of outputs are set, which is NaN for floats."""
    outputs = [name for name, _ in declared[-len(shapes) :]]
    extras = re.compile(r"_(?:shape|strides|ndim)$")
    names = [name for name, _ in declared if name not in outputs and not extras.search(name)]
    arrays = name_arrays(dict(zip(names, map(_as_numpy, inputs), strict=True)))
    for name, shape, dtype in zip(outputs, shapes, dtypes, strict=True):
        arrays[name] = np.empty(shape, _as_numpy(mx.zeros(1, dtype)).dtype)
        arrays[name].view(np.uint8)[...] = 0xFF
    return arrays
