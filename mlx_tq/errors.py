"""Every error that mlx_tq raises on purpose.

A message states what went wrong, the offending value, what would be valid, and what to do.
"""

import difflib
import re
from collections.abc import Iterable
from typing import Any

_MAX_LINE = 240  # characters
_NO_MEMORY = re.compile("alloc|memory", re.IGNORECASE)  # in what mlx raises then


class MlxTqError(Exception):
    """Base class of all errors that mlx_tq raises on purpose."""


class ConfigError(MlxTqError, ValueError):
    """Reports an invalid setting, flag, argument or model (exit code 2 of commands)."""


class UnsupportedModelError(MlxTqError):
    """Reports a model whose attention cannot run on a compressed cache."""


class KernelUnavailableError(MlxTqError):
    """Reports a GPU kernel that could not be built or run."""


class NonFiniteError(MlxTqError):
    """Reports NaN or infinity in a model's keys, values or logits."""


class CacheFormatError(MlxTqError):
    """Reports a cache or cache file that is damaged, foreign or of another configuration."""


class RankError(MlxTqError):
    """Reports ranks that disagree or are gone; with `on_all_ranks` all raise it, and one of them prints it."""

    def __init__(self, message: str, *, on_all_ranks: bool = False) -> None:
        super().__init__(message)
        self.on_all_ranks = on_all_ranks


class RescueError(MlxTqError):
    """Reports a rescue service that is required and did not answer."""


class UncalibratedWarning(UserWarning):
    """Warns that eviction runs without a calibration of the model, and may evict what questions need."""


def is_out_of_memory(error: Exception) -> bool:
    """Return whether Python or mlx could not allocate memory."""
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and bool(_NO_MEMORY.search(str(error))))


def backend_error(error: ImportError) -> ConfigError | None:
    """Return what to install if mlx lacks its backend, a package of its own on Linux; None for other errors."""
    if "libmlx" not in str(error):
        return None
    return ConfigError(
        f"mlx has no backend here ({one_line(error)}). Run: pip install 'mlx-tq[cpu]', or 'mlx-tq[cuda]' for an "
        "NVIDIA GPU."
    )


def one_line(message: object) -> str:
    """Return another library's message as one short line, or the name of its error if the message is empty."""
    text = " ".join(str(message).split()).rstrip(".") or type(message).__name__
    return text if len(text) <= _MAX_LINE else f"{text[:_MAX_LINE]}..."


def unknown_name(kind: str, name: object, valid_names: Iterable[Any]) -> ConfigError:
    """Return the error for a name that is not valid; it lists the valid ones and suggests the nearest."""
    valid = list(map(str, valid_names))
    nearest = difflib.get_close_matches(str(name), valid, n=1)
    hint = f" Did you mean {nearest[0]}?" if nearest else ""
    return ConfigError(f"{kind} {name!r} is unknown; valid are {', '.join(valid)}.{hint}")
