"""Where a user's own files are that nobody named."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """The user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mlx_tq"
