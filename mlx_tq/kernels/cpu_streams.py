"""CPU cores that work side by side: mlx computes each of its CPU streams in a thread of its own."""

import os
import sys
from itertools import pairwise

import mlx.core as mx

from mlx_tq.kernels import cpu_blas

MOST = 4  # cores in use
LEAST_TOKENS = 512  # packed tokens that are worth a core: fewer take less time than to wait for it


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


_STREAMS = [mx.new_thread_local_stream(mx.cpu) for _ in range(min(_cores(), MOST))]

Stream = mx.ThreadLocalStream | mx.Stream


def runs(tokens: int) -> list[tuple[Stream, int, int]]:
    """Cut [0, tokens) into runs for streams: (stream, start, stop) each.

    One run where mlx computes on a GPU, or where matrices are multiplied in several threads: these wait for their next
    work without leaving their cores, and a second stream takes longer than it saves.
    """
    default = mx.default_stream(mx.default_device())
    if default.device != mx.Device(mx.cpu) or cpu_blas.threads() > 1:
        return [(default, 0, tokens)]
    count = max(1, min(len(_STREAMS), tokens // LEAST_TOKENS))
    edges = [tokens * lane // count for lane in range(count + 1)]
    streams: list[Stream] = [default, *_STREAMS[1:count]]
    return [(stream, start, stop) for stream, (start, stop) in zip(streams, pairwise(edges), strict=True)]
