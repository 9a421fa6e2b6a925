"""How key and value vectors are stored, and how storage formats are found by name."""

from importlib.metadata import entry_points

from mlx_tq.codec.formats import compared, scalar, sorted_pairs, trellis, turbo
from mlx_tq.codec.formats.base import Codec, CodecOptions, Encoded, Format
from mlx_tq.errors import ConfigError

__all__ = ["Codec", "CodecOptions", "Encoded", "Format", "format_names", "get_format", "register_format"]

ENTRY_POINTS = "mlx_tq.formats"

ALIASES = {"turbo8": "q8", "turbo4": "tq4", "turbo3": "tq3", "turbo2": "tq2"}  # names in other programs
_COMPARED = {fmt.name: fmt for fmt in compared.FORMATS}
_formats = {fmt.name: fmt for fmt in (*scalar.FORMATS, *turbo.FORMATS, *trellis.FORMATS, *sorted_pairs.FORMATS)}
_entry_points = [*entry_points(group=ENTRY_POINTS)]


def register_format(fmt: Format) -> None:
    """Make a format available by its name in this process."""
    _formats[fmt.name] = fmt


def _load_entry_points() -> None:
    while _entry_points:  # one is removed before it is loaded, so that its module can call get_format
        register_format(_entry_points.pop().load())


def format_names(*, compared: bool = True) -> list[str]:
    """Return the names of formats, most bits first, with or without those that exist for comparison only."""
    _load_entry_points()
    formats = [*_formats.values(), *(_COMPARED.values() if compared else ())]
    return [fmt.name for fmt in sorted(formats, key=lambda fmt: (-fmt.bits, fmt.name))]


def get_format(name: str) -> Format:
    """Return the format called `name`, which may be one of ALIASES, or raise ConfigError."""
    _load_entry_points()
    try:
        return (_COMPARED | _formats)[ALIASES.get(name, name)]
    except KeyError:
        valid = ", ".join(format_names(compared=False))
        reason = f"format {name!r} is unknown; valid are {valid}. docs/reference/formats.md lists more."
        raise ConfigError(reason) from None
