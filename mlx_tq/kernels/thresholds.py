"""Thresholds of the attention kernels: tables that follow from a GPU's number of cores, and measured ones.

`mlx_tq.bench --tune` measures them for several shapes of heads, and writes a file. What it has for another chip, or was
measured with another version of macOS or mlx, is not used.
"""

import json
import math
import os
import platform
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx

from mlx_tq.errors import ConfigError
from mlx_tq.files import atomic_write
from mlx_tq.kernels import backend

VERSION = 1

# Smallest and largest value of each threshold. A threadgroup of `merge_simdgroups` must fit D = 512.
RANGES = {
    "packed_queries": (0, 64),
    "short_tokens": (0, 65536),
    "simdgroups": (1, 65536),
    "min_block": (32, 4096),
    "max_blocks": (1, 1024),
    "merge_simdgroups": (1, 8),
    "level_tables": (0, 2),
    "matrix_queries": (8, 65536),
}


@dataclass(frozen=True)
class KernelThresholds:
    """Thresholds that choose an attention kernel and divide its work; they change results only by rounding."""

    packed_queries: int = 8  # up to this many attend to packed rows; with more, the packed region is decoded first
    short_tokens: int = 512  # up to this many take one kernel; more are cut into blocks, which a second kernel merges
    simdgroups: int = 1024  # tokens are cut into blocks until this many have work
    min_block: int = 64  # smallest block in tokens
    max_blocks: int = 256
    merge_simdgroups: int = 4  # that merge the blocks of a query row
    level_tables: int = 2  # levels of codes are looked up: of none, of values, or of keys and values
    matrix_queries: int = 16  # from this many query rows of a KV head on, half precision multiplies matrices

    def __post_init__(self) -> None:
        for name, (smallest, largest) in RANGES.items():
            value = getattr(self, name)
            if type(value) is not int or not smallest <= value <= largest:
                raise ConfigError(f"{name} is {value!r}; valid are integers from {smallest} to {largest}.")


# About 32 simdgroups per GPU core: 8 to 10 cores, 14 to 20, 30 to 40, 60 to 80; an H200 has 132.
TABLES = {
    "base": KernelThresholds(simdgroups=256),
    "Pro": KernelThresholds(simdgroups=512),
    "Max": KernelThresholds(simdgroups=1024),
    "Ultra": KernelThresholds(simdgroups=2048),
    "cuda": KernelThresholds(simdgroups=4096),
    "cpu": KernelThresholds(),
    "reference": KernelThresholds(),
}


class ThresholdsWarning(RuntimeWarning):
    """The file of measured thresholds cannot be used, and the built-in table is used."""


class HeadShape(NamedTuple):
    head_dim: int  # of keys
    group: int  # query heads of a KV head

    def distance(self, other: "HeadShape") -> float:
        return sum(abs(math.log2(a / b)) for a, b in zip(self, other, strict=True))


class Table(NamedTuple):
    """Thresholds by shape, those of other shapes if none are measured, and a few words on where they come from."""

    measured: dict[HeadShape, KernelThresholds]
    built_in: KernelThresholds
    origin: str

    def nearest(self, shape: HeadShape) -> KernelThresholds:
        """Return the thresholds of the measured shape that is most like this one."""
        return self.measured[min(self.measured, key=shape.distance)] if self.measured else self.built_in


def file() -> Path:
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "mlx_tq" / "thresholds.json"
    base = os.environ.get("XDG_CONFIG_HOME")
    return (Path(base) if base else Path.home() / ".config") / "mlx_tq" / "thresholds.json"


def machine() -> str:
    """Return the key of this machine in the file: chip and backend."""
    return f"{_chip()}, {backend.current()}"


def _chip() -> str:
    return str(mx.device_info().get("device_name", "unknown"))


def _versions() -> dict[str, str]:
    """Return what changes how fast kernels are on the same chip."""
    system = f"macOS {platform.mac_ver()[0]}" if sys.platform == "darwin" else platform.system()
    return {"system": system, "mlx": version("mlx")}


def chip_class() -> str:
    """Return the name of the built-in table for this machine."""
    if backend.current() != "metal":
        return backend.current()
    last_word = str(mx.device_info().get("device_name", "")).rpartition(" ")[2]
    return last_word if last_word in TABLES else "base"


def table() -> Table:
    return _table(backend.current())


@cache
def _table(_backend: str) -> Table:
    """Load the table once per backend, because every layer of every step needs it."""
    built_in = TABLES[chip_class()]
    try:
        measured = _measured_here(_read(file()))
        if measured:
            shapes = ", ".join(f"D {dim} G {group}" for dim, group in measured)
            return Table(measured, built_in, f"measured for {shapes} in {file()}; other shapes use the nearest")
    except (OSError, ValueError, ConfigError) as error:
        warnings.warn(
            f"ignoring the measured thresholds in {file()}: {error} Run mlx_tq.bench --tune again, or delete the file",
            ThresholdsWarning,
            stacklevel=4,
        )
    return Table({}, built_in, f"built in for {chip_class()!r}")


def _measured_here(machines: dict[str, Any]) -> dict[HeadShape, KernelThresholds]:
    """Return the thresholds of this machine, or none; raise ConfigError if all were measured elsewhere."""
    entry = machines.get(machine())
    if entry is None:
        if machines and not any(name.startswith(f"{_chip()}, ") for name in machines):
            raise ConfigError(f"they are of {'; '.join(machines)}, and this is {machine()}.")
        return {}
    names = [field.name for field in fields(KernelThresholds)]
    shapes = entry.get("shapes") if isinstance(entry, dict) else None
    if not isinstance(shapes, list):
        raise ConfigError("a machine must have system, mlx, and a list of shapes.")
    installed = _versions()
    measured_with = {name: entry.get(name) for name in installed}
    if measured_with != installed:
        then, now = ("{system} and mlx {mlx}".format(**versions) for versions in (measured_with, installed))
        raise ConfigError(f"they were measured with {then}, and this is {now}.")
    measured = {}
    for values in shapes:
        if not isinstance(values, dict) or sorted(values) != sorted([*HeadShape._fields, *names]):
            raise ConfigError(f"a shape must have the values {', '.join([*HeadShape._fields, *names])}.")
        shape = HeadShape(*(values[name] for name in HeadShape._fields))
        if not all(type(size) is int and size > 0 for size in shape):
            raise ConfigError(
                f"head_dim and group are {shape.head_dim!r} and {shape.group!r}; valid are positive integers."
            )
        measured[shape] = KernelThresholds(**{name: values[name] for name in names})
    return measured


def _read(path: Path) -> dict[str, Any]:
    """Return what a file has by machine, or nothing if there is no file."""
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"not valid JSON ({error}).") from error
    machines = content.get("machines") if isinstance(content, dict) and content.get("version") == VERSION else None
    if not isinstance(machines, dict):
        raise ConfigError(f"expected an object with version {VERSION} and machines.")
    return machines


def to_rows(measured: dict[HeadShape, KernelThresholds]) -> list[dict[str, int]]:
    """Return thresholds as plain data: a row for each shape."""
    return [shape._asdict() | asdict(values) for shape, values in measured.items()]


def write(measured: dict[HeadShape, KernelThresholds]) -> Path:
    """Save the thresholds measured on this machine, next to those of other machines, and return the file."""
    path = file()
    entry = {**_versions(), "shapes": to_rows(measured)}
    content = {"version": VERSION, "machines": {**_read(path), machine(): entry}}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as temporary:
            temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot save the thresholds in {path}: {error}. Make its folder writable.") from error
    _table.cache_clear()
    return path


_overrides: list[KernelThresholds] = []


class _Thread(threading.local):
    changes: tuple[dict[str, int], ...] = ()


_thread = _Thread()


def current(head_dim: int, group: int) -> KernelThresholds:
    """Return the thresholds for heads of this size, with `group` query heads for each KV head."""
    values = _overrides[-1] if _overrides else table().nearest(HeadShape(head_dim, group))
    for changes in _thread.changes:
        values = replace(values, **changes)
    return values


def fingerprint() -> str:
    """Return what changes when the thresholds of any shape do."""
    return repr(_overrides[-1] if _overrides else table()[:2])


@contextmanager
def changed(**values: int) -> Iterator[None]:
    """Replace some of the thresholds of every shape inside a `with` block, in this thread."""
    outer, _thread.changes = _thread.changes, (*_thread.changes, values)
    try:
        yield
    finally:
        _thread.changes = outer


@contextmanager
def using(values: KernelThresholds) -> Iterator[None]:
    _overrides.append(values)
    try:
        yield
    finally:
        _overrides.pop()
