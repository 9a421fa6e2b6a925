"""Splits packed tokens between CPU cores: mlx computes each of its CPU streams in a separate thread."""

import ctypes
import os
import platform
import sys
from functools import cache
from itertools import pairwise
from pathlib import Path

import mlx.core as mx

MAX_CORES = 4
MIN_TOKENS = 512  # fewer packed tokens take less time than waiting for another core

_CORES = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
_STREAMS = [mx.new_thread_local_stream(mx.cpu) for _ in range(min(_CORES, MAX_CORES))]

Stream = mx.ThreadLocalStream | mx.Stream


def split_tokens(tokens: int) -> list[tuple[Stream, int, int]]:
    """Split [0, tokens) into one range per stream: (stream, start, stop).

    A BLAS with several threads gets one range: its threads spin while they wait, and another stream would cost more
    than it saves.
    """
    default = mx.default_stream(mx.default_device())
    if default.device != mx.Device(mx.cpu) or blas_threads() > 1:
        return [(default, 0, tokens)]
    count = max(1, min(len(_STREAMS), tokens // MIN_TOKENS))
    edges = [tokens * i // count for i in range(count + 1)]
    streams: list[Stream] = [default, *_STREAMS[1:count]]
    return [(stream, start, stop) for stream, (start, stop) in zip(streams, pairwise(edges), strict=True)]


@cache
def blas_library() -> Path | None:
    """Return the file of the BLAS that mlx has loaded on Linux, or None if it is not known."""
    if platform.system() != "Linux":
        return None
    loaded = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/" in line}
    paths = [Path(path) for path in sorted(loaded) if "numpy" not in path]  # mlx does not use the BLAS of NumPy
    candidates = [path for name in ("libopenblas", "libblas") for path in paths if path.name.startswith(name)]
    return candidates[0] if candidates else None


@cache
def blas_threads() -> int:
    """Return the number of threads of that BLAS, 1 if it does not say."""
    path = blas_library()
    if path is None or not path.name.startswith("libopenblas"):
        return 1
    count = getattr(ctypes.CDLL(str(path)), "openblas_get_num_threads", None)
    return 1 if count is None else int(count())
