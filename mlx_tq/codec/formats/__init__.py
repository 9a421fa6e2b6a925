"""Storage formats by name.

A format is one file in this folder with one or more `Format` subclasses that have a `name`. Other packages add theirs
through the entry-point group `mlx_tq.formats`.
"""

import importlib
import pkgutil
from functools import cache
from importlib.metadata import entry_points

from mlx_tq.codec.formats.base import Codec, CodecOptions, Encoded, Format
from mlx_tq.errors import ConfigError

__all__ = ["Codec", "CodecOptions", "Encoded", "Format", "format_names", "get_format"]

ENTRY_POINTS = "mlx_tq.formats"

# What other programs call them.
ALIASES = {"turbo8": "q8", "turbo4": "tq4", "turbo3": "tq3", "turbo2": "tq2"}


def _named_subclasses(base: type[Format]) -> list[type[Format]]:
    named = [base] if hasattr(base, "name") else []
    return named + [found for subclass in base.__subclasses__() for found in _named_subclasses(subclass)]


@cache
def _registry() -> dict[str, Format]:
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    for entry in entry_points(group=ENTRY_POINTS):
        entry.load()
    formats = [fmt for subclass in _named_subclasses(Format) for fmt in subclass.variants()]  # type: ignore[type-abstract]
    return {fmt.name: fmt for fmt in sorted(formats, key=lambda fmt: (-fmt.bits, fmt.name))}


def format_names() -> list[str]:
    """All format names, most bits first."""
    return list(_registry())


def get_format(name: str) -> Format:
    """The format called `name`, or by one of ALIASES.

    Raises:
        ConfigError: there is none.
    """
    try:
        return _registry()[ALIASES.get(name, name)]
    except KeyError:
        raise ConfigError(f"format {name!r} is unknown; valid are {', '.join(format_names())}.") from None
