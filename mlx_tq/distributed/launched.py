"""What `mlx.launch` tells a process of its place, known before mlx is loaded."""

import os
from collections.abc import Mapping

# `mlx.launch` sets it with each of its backends.
_VARIABLE = "MLX_RANK"


def is_launched(environ: Mapping[str, str] = os.environ) -> bool:
    """`mlx.launch` started this process, maybe with others."""
    return _VARIABLE in environ


def launched_rank(environ: Mapping[str, str] = os.environ) -> int:
    """The number of this process among those that were launched together; 0 where it was not launched."""
    return int(environ.get(_VARIABLE, "0"))
