"""Thresholds of the attention kernels: tables that follow from a GPU's number of cores, and measured ones.

`mlx_tq.bench --tune` measures a table and writes a file, which is used from then on by the chip that it names.
"""

import json
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx

from mlx_tq.errors import ConfigError
from mlx_tq.files import atomic_write
from mlx_tq.kernels import backend

VERSION = 1

# Smallest and largest value of each threshold. A threadgroup of `merge_simdgroups` must fit D = 512.
RANGES = {
    "packed_queries": (1, 64),
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
    """The file of measured thresholds cannot be read, and the built-in table is used."""


class Table(NamedTuple):
    """Thresholds, and a few words on where they come from."""

    values: KernelThresholds
    origin: str


def file() -> Path:
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "mlx_tq" / "thresholds.json"
    base = os.environ.get("XDG_CONFIG_HOME")
    return (Path(base) if base else Path.home() / ".config") / "mlx_tq" / "thresholds.json"


def machine() -> str:
    """Return the key of this machine in the file: chip and backend."""
    return f"{mx.device_info().get('device_name', 'unknown')}, {backend.current()}"


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
    built_in = Table(TABLES[chip_class()], f"built in for {chip_class()!r}")
    try:
        values = _read(file()).get(machine())
        if values is None:
            return built_in
        names = [field.name for field in fields(KernelThresholds)]
        if not isinstance(values, dict) or sorted(values) != sorted(names):
            raise ConfigError(f"a table must have the values {', '.join(names)}.")
        return Table(KernelThresholds(**values), f"measured, {file()}")
    except (OSError, ValueError, ConfigError) as error:
        warnings.warn(
            f"ignoring the measured thresholds in {file()}: {error} Run mlx_tq.bench --tune again, or delete the file",
            ThresholdsWarning,
            stacklevel=4,
        )
        return built_in


def _read(path: Path) -> dict[str, Any]:
    """Return the tables of a file by machine, or none if there is no file."""
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"not valid JSON ({error}).") from error
    tables = content.get("tables") if isinstance(content, dict) and content.get("version") == VERSION else None
    if not isinstance(tables, dict):
        raise ConfigError(f"expected an object with version {VERSION} and tables.")
    return tables


def write(values: KernelThresholds) -> Path:
    """Save the thresholds measured on this machine, next to those of other machines, and return the file."""
    path = file()
    content = {"version": VERSION, "tables": {**_read(path), machine(): asdict(values)}}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as temporary:
            temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot save the thresholds in {path}: {error}. Make its folder writable.") from error
    _table.cache_clear()
    return path


_overrides: list[KernelThresholds] = []


def current() -> KernelThresholds:
    return _overrides[-1] if _overrides else _table(backend.current()).values


@contextmanager
def using(values: KernelThresholds) -> Iterator[None]:
    _overrides.append(values)
    try:
        yield
    finally:
        _overrides.pop()
