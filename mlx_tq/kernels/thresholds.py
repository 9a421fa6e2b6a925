"""Which kernel serves when, and how its work is cut: one table a chip class, and one that was measured on this machine.

The built-in tables follow from the number of GPU cores and were not measured. `mlx_tq.bench --tune` measures, and
writes a file that is taken from then on, by the chip that it names.
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

VERSION = 2

# The least and the most of each value. A threadgroup of MERGING simdgroups must fit D = 512.
RANGES = {
    "packed_queries": (1, 64),
    "short": (0, 65536),
    "simdgroups": (1, 65536),
    "least_block": (32, 4096),
    "most_blocks": (1, 1024),
    "merging": (1, 8),
}


@dataclass(frozen=True)
class KernelThresholds:
    """How the work of kernels is cut, for one chip class.

    Attributes:
        packed_queries: up to this many queries attend to packed rows; for more, the past is decoded first.
        short: up to this many tokens one kernel attends to; of more, one attends to blocks and a second merges them.
        simdgroups: the first of the two cuts tokens into blocks until that many simdgroups are at work,
        least_block: of this many tokens at least,
        most_blocks: and into this many at most.
        merging: simdgroups that merge the blocks of a query row.

    Raises:
        ConfigError: a value is no whole number of its range.
    """

    packed_queries: int = 8
    short: int = 512
    simdgroups: int = 1024
    least_block: int = 64
    most_blocks: int = 256
    merging: int = 4

    def __post_init__(self) -> None:
        """Check every value."""
        for name, (least, most) in RANGES.items():
            value = getattr(self, name)
            if type(value) is not int or not least <= value <= most:
                raise ConfigError(f"{name} is {value!r}; valid are whole numbers from {least} to {most}.")


# About 32 simdgroups a core: 8 to 10 cores, 14 to 20, 30 to 40, 60 to 80; an H200 has 132.
TABLES = {
    "base": KernelThresholds(simdgroups=256),
    "Pro": KernelThresholds(simdgroups=512),
    "Max": KernelThresholds(simdgroups=1024),
    "Ultra": KernelThresholds(simdgroups=2048),
    "cuda": KernelThresholds(simdgroups=4096),
    "reference": KernelThresholds(),
}


class ThresholdsWarning(RuntimeWarning):
    """A measured table cannot be read, and the built-in one serves instead."""


class Table(NamedTuple):
    """Thresholds, and where they come from, in a few words."""

    values: KernelThresholds
    origin: str


def file() -> Path:
    """The file that `mlx_tq.bench --tune` writes."""
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "mlx_tq" / "thresholds.json"
    base = os.environ.get("XDG_CONFIG_HOME")
    return (Path(base) if base else Path.home() / ".config") / "mlx_tq" / "thresholds.json"


def machine() -> str:
    """What a measured table belongs to: the chip and what computes on it."""
    return f"{mx.device_info().get('device_name', 'unknown')}, {backend.current()}"


def chip_class() -> str:
    """The name of the built-in table for this machine."""
    if backend.current() != "metal":
        return backend.current()
    last = str(mx.device_info().get("device_name", "")).rpartition(" ")[2]
    return last if last in TABLES else "base"


def table() -> Table:
    """What is in use: measured on this machine, or built in.

    A file that cannot be read is ignored with a `ThresholdsWarning` that says why.
    """
    return _table(machine(), chip_class(), file())


@cache
def _table(machine: str, chip: str, path: Path) -> Table:
    built_in = Table(TABLES[chip], f"built in for {chip!r}")
    try:
        values = _read(path).get(machine)
        return built_in if values is None else Table(_parsed(values), f"measured, {path}")
    except (OSError, ValueError, ConfigError) as error:
        warnings.warn(
            f"the measured thresholds in {path} are ignored: {error} Run mlx_tq.bench --tune again, or delete the file",
            ThresholdsWarning,
            stacklevel=4,
        )
        return built_in


def _read(path: Path) -> dict[str, Any]:
    """The tables of a file by machine; none where there is no file."""
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"this is no JSON ({error}).") from error
    if (
        not isinstance(content, dict)
        or content.get("version") != VERSION
        or not isinstance(content.get("tables"), dict)
    ):
        raise ConfigError(f"an object with version {VERSION} and tables is expected.")
    tables: dict[str, Any] = content["tables"]
    return tables


def _parsed(values: object) -> KernelThresholds:
    names = [field.name for field in fields(KernelThresholds)]
    if not isinstance(values, dict) or sorted(values) != sorted(names):
        raise ConfigError(f"a table has the values {', '.join(names)}.")
    return KernelThresholds(**values)


def write(values: KernelThresholds) -> Path:
    """Keep what was measured on this machine, beside other machines' tables; whole or not at all. Returns the file.

    Raises:
        ConfigError: the file that is there cannot be read, or none can be written.
    """
    path = file()
    content = {"version": VERSION, "tables": {**_read(path), machine(): asdict(values)}}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as temporary:
            temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"the measured thresholds cannot be kept in {path}: {error}. Make its folder writable."
        ) from error
    _table.cache_clear()
    _in_use.cache_clear()
    return path


_chosen: list[KernelThresholds] = []


def current() -> KernelThresholds:
    """The thresholds in use."""
    return _chosen[-1] if _chosen else _in_use(backend.current())


@cache
def _in_use(where: str) -> KernelThresholds:
    """Those of the table for `where`, what computes now: each layer of each step asks."""
    return table().values


@contextmanager
def using(values: KernelThresholds) -> Iterator[None]:
    """Take these thresholds until the context ends."""
    _chosen.append(values)
    try:
        yield
    finally:
        _chosen.pop()
