"""The library that multiplies float32 matrices for mlx on a Linux CPU, as far as it can be told."""

import ctypes
import platform
from functools import cache
from pathlib import Path


@cache
def library() -> Path | None:
    """The file of the BLAS that mlx has loaded, or None where that is not known: macOS has its own."""
    if platform.system() != "Linux":
        return None
    loaded = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/" in line}
    # NumPy brings one of its own, which mlx does not use.
    paths = [Path(path) for path in sorted(loaded) if "numpy" not in path]
    ours = [path for name in ("libopenblas", "libblas") for path in paths if path.name.startswith(name)]
    return ours[0] if ours else None


@cache
def threads() -> int:
    """Threads in which it multiplies; 1 where it does not say."""
    path = library()
    if path is None or not path.name.startswith("libopenblas"):
        return 1
    count = getattr(ctypes.CDLL(str(path)), "openblas_get_num_threads", None)
    return 1 if count is None else int(count())
