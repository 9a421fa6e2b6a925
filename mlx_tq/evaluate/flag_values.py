"""Parse the lists in flags; this imports no model code, so that a typing error is reported immediately."""

import argparse

from mlx_tq.errors import ConfigError

DEPTHS = {"start": 0.0, "middle": 0.5, "end": 1.0}


def check_values(args: argparse.Namespace) -> None:
    """Raise ConfigError for lengths or depths of a measurement that cannot be read."""
    if hasattr(args, "lengths"):
        whole_numbers(args.lengths, "--lengths")
    if hasattr(args, "depths"):
        parse_depths(args.depths)


def whole_numbers(text: str, flag: str, least: int = 1) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"{flag} is {text!r}; write whole numbers like 500,1000.") from None
    if min(numbers) < least:
        raise ConfigError(f"{flag} is {text!r}; each must be {least} or more.")
    return numbers


def parse_depths(text: str) -> list[float]:
    """Return the depths of a list, each from 0 to 1."""
    depths = []
    for part in text.split(","):
        try:
            depths.append(DEPTHS[part] if part in DEPTHS else float(part))
        except ValueError:
            raise ConfigError(f"depth {part!r} is unknown; write start, middle, end or a number from 0 to 1.") from None
        if not 0 <= depths[-1] <= 1:
            raise ConfigError(f"depth is {part}; it must be from 0 (start) to 1 (end).")
    return depths
